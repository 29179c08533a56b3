"""The jobs of one step, over all groups: those together that one kernel can make in one call."""

from __future__ import annotations

from typing import Any

from ._backends import reference
from ._table import Job

Launches = dict[Any, Any]
"""By kernel; the reference has one for each job."""


def add(job: Job, launches: Launches) -> None:
    """Add a job to the launch that it can be a part of."""
    table, gradient, step = job.table, job.gradient, job.step
    count, columns = gradient.count, gradient.columns
    if not count or not columns:
        return
    if table.pending is not None:
        job.note = table.pending.schedule.step + 1
    kernels, dtype = table.kernels, gradient.values.dtype
    words = None if kernels is None else kernels.words_of(gradient, job.note)
    if words is None:
        gradient.check_memory()
        launches[job] = reference.Launch(job)
        return
    if table.kernel_for != (step.rule, dtype, step.as_dense):
        table.kernel_for, table.kernel = (step.rule, dtype, step.as_dense), kernels.kernel_for(job)
    place = kernel = table.kernel
    launch = launches.get(kernel)
    if launch is not None and table.memory in launch.memory:  # two threads may not step them at the same time
        place, launch = job, None
    if table.ahead is not None and table.ahead.announced:
        launch = launches[job] = kernels.borrow(kernels.LaunchAhead, kernel)
    elif launch is None:
        launch = launches[place] = kernels.borrow(kernels.Launch, kernel)
    launch.memory.add(table.memory)
    launch.jobs.append(job)
    launch.params.append(table.param)
    launch.add(count, columns, count * columns * dtype.itemsize, words, table.words, step.words)
