"""The suite `sparse`: rowstep.SparseAdam against torch's optimizers and against the memory itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rowstep.cli._bench import cases, fresh, measures
from rowstep.cli._bench.cases import Sizes
from rowstep.cli._bench.results import Results


@dataclass(frozen=True)
class Part:
    """A piece of the suite that can be run on its own; `run` adds what it measured to the results."""

    name: str
    run: Callable[[Results], None]


def parts(sizes: Sizes, threads: Sequence[int], repeats: int) -> Iterator[Part]:
    def first_step(results: Results) -> None:
        results.first_step = fresh.first_step()

    def memory(results: Results) -> None:
        results.memory = fresh.peak_memory(sizes.memory_rows, sizes.memory_ids)

    def scaling(results: Results) -> None:
        results.measurements += measures.scaling(*sizes.scaling, threads, repeats)

    def loop(results: Results) -> None:
        results.measurements += [measures.loop(case, max(threads), repeats) for case in sizes.loops]

    def dense(results: Results) -> None:
        results.measurements += measures.dense(sizes.dense_rows, max(threads), repeats)

    yield Part("first-step", first_step)
    yield Part("memory", memory)
    for case in sizes.steps:
        yield Part(case.name, _steps(case, threads, repeats))
    yield Part("scaling", scaling)
    yield Part("loop", loop)
    yield Part("dense", dense)


def _steps(case: cases.Case, threads: Sequence[int], repeats: int) -> Callable[[Results], None]:
    def run(results: Results) -> None:
        for measurement, state in measures.steps(case, threads, repeats):
            results.measurements.append(measurement)
            results.state_bytes_per_weight = state

    return run
