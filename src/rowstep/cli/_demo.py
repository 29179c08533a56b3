"""`rowstep demo`: one model, four optimizers, the same batches: what a step takes, and what is learned.

The model has to tell the class of an id, which only that id's own row can learn. Ids follow Zipf's law, as words, users
and goods do: a few come in every batch, most of them rarely. So a batch touches a fraction of a percent of the table,
and dense Adam moves all of it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdam, SparseAdam

ROWS, COLUMNS, CLASSES, BATCH = 1_000_000, 64, 16, 4_096
RATE = 0.02
RECENT = 10  # steps whose losses are averaged into one

# The optimizers of a table and a layer. Torch's SparseAdam takes no dense gradients, so its layer needs another one.
# Fused is the fastest that torch's Adam can be on a CPU.
Params = list[nn.Parameter]
CONTENDERS: dict[str, Callable[[Params, Params], list[Optimizer]]] = {
    "torch.optim.Adam": lambda table, layer: [torch.optim.Adam(table + layer, RATE, fused=True)],
    "torch.optim.SparseAdam": lambda table, layer: [torch.optim.SparseAdam(table, RATE), torch.optim.Adam(layer, RATE)],
    "rowstep.SparseAdam": lambda table, layer: [SparseAdam(table + layer, RATE)],
    "rowstep.DeferredAdam": lambda table, layer: [DeferredAdam(table + layer, RATE)],
}
DENSE = "torch.optim.Adam"


@dataclass
class Run:
    name: str
    losses: list[float] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)  # seconds of each step: lookup, backward pass and optimizer
    alone: list[float] = field(default_factory=list)  # of these the optimizer's
    nbytes: int = 0  # of optimizer state and gradients

    def loss_after(self, steps: int) -> float:
        return mean(self.losses[max(0, steps - RECENT) : steps])


def run(arguments: argparse.Namespace) -> int:
    limits = f"{_count(arguments.steps, 'step')} or {_count(arguments.seconds, 'second')}"
    print(f"A table of {ROWS:,} x {COLUMNS} and a layer learn to tell classes of ids.")
    print(f"Each step has {BATCH:,} ids, which follow Zipf's law. Each optimizer takes up")
    print(f"to {limits}, on {arguments.threads} of {os.cpu_count()} cores.\n", flush=True)
    torch.set_num_threads(arguments.threads)
    runs = [train(name, arguments.steps, arguments.seconds) for name in CONTENDERS]
    print("", *report(runs, arguments.steps, arguments.seconds), sep="\n")
    return 0


def train(name: str, steps: int, seconds: float) -> Run:
    torch.manual_seed(0)
    table, layer = nn.Embedding(ROWS, COLUMNS, sparse=name != DENSE), nn.Linear(COLUMNS, CLASSES)
    optimizers = CONTENDERS[name](list(table.parameters()), list(layer.parameters()))
    run, stop = Run(name), math.inf
    while len(run.losses) < steps and time.perf_counter() < stop:
        _show_progress(run, steps, end="\r")
        ids, classes = _batch(len(run.losses))
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
            if isinstance(optimizer, DeferredAdam):  # the lookup would do it, and it is the optimizer's work
                optimizer.catch_up(table.weight, ids)
        caught_up = time.perf_counter()
        loss = nn.functional.cross_entropy(layer(table(ids)), classes)
        torch.autograd.backward(loss)
        backward = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        end = time.perf_counter()
        run.loops.append(end - start)
        run.alone.append(end - backward + caught_up - start)
        run.losses.append(loss.item())
        stop = min(stop, time.perf_counter() + seconds)  # from the end of the first step
    _show_progress(run, steps, end="\n")
    run.nbytes = sum(_nbytes(optimizer) for optimizer in optimizers)
    return run


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """The ids and classes of a step. Ids whose logarithms are uniform follow Zipf's law, the most frequent first."""
    draws = torch.rand(BATCH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    ids = (ROWS**draws).long() - 1
    return ids, ids * 2_654_435_761 % 2**32 * CLASSES // 2**32


def _nbytes(optimizer: Optimizer) -> int:
    slots = [slot for state in optimizer.state.values() for slot in state.values() if isinstance(slot, Tensor)]
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    return sum(tensor.nbytes for tensor in (*slots, *values))


def _show_progress(run: Run, steps: int, end: str) -> None:
    if end == "\n" or sys.stderr.isatty():
        done = len(run.losses)
        loss = f", loss {run.losses[-1]:.4f}" if done else ""
        line = f"{run.name:<24}{_bar(done / steps, width=16):<16}{done:5} of {_count(steps, 'step')}{loss}"
        print(line, end=end, file=sys.stderr, flush=True)


def _bar(share: float, width: int) -> str:
    whole, eighths = divmod(math.ceil(8 * width * share), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def report(runs: list[Run], steps: int, seconds: float) -> Iterator[str]:
    """The lines of the comparison, none of over 80 characters."""
    shared = min(len(run.losses) for run in runs)
    loops = {run.name: _milliseconds(run.loops) for run in runs}
    alone = {run.name: _milliseconds(run.alone) for run in runs}
    yield f"{'':<24}{'whole loop':>16}{'optimizer step alone':>24}{'loss after':>14}"
    yield f"{'':<24}{'ms':>8}{'speed':>8}{'ms':>14}{'speed':>10}{_count(shared, 'step'):>14}"
    for run in runs:
        line = f"{run.name:<24}"
        for times, first, second in ((loops, 8, 7), (alone, 14, 9)):
            line += f"{times[run.name]:{first},.1f}{times[DENSE] / times[run.name]:{second},.1f}x"
        yield f"{line}{run.loss_after(shared):14.4f}"
    yield "\nMilliseconds of the whole loop: lookup, backward pass and optimizer step"
    yield from _chart(loops)
    yield "\nMilliseconds of the optimizer step alone"
    yield from _chart(alone)
    yield "\nMegabytes of optimizer state and gradients"
    yield from _chart({run.name: run.nbytes / 1e6 for run in runs})
    late = [f"{run.name} ({len(run.losses)} of {_count(steps, 'step')})" for run in runs if len(run.losses) < steps]
    out = f"Out of time after {_count(seconds, 'second')}: {', '.join(late)}. " if late else ""
    yield "\n" + textwrap.fill(out + _NOTES, width=80)


_NOTES = f"""\
Times are medians. A loss is the mean over up to {RECENT} steps, each on a new batch. The losses of both SparseAdams
should agree, and so should those of DeferredAdam and torch.optim.Adam. DeferredAdam keeps another 4 bytes per row; its
step includes bringing the rows of the batch up to date."""


def _milliseconds(seconds: list[float]) -> float:
    """Of a usual step: the first one allocates the state, and may compile kernels."""
    return 1e3 * median(seconds[1:] or seconds)


def _count(number: float, what: str) -> str:
    """One second, two seconds."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {what}" if number == 1 else f"{shown} {what}s"


def _chart(values: dict[str, float]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name:<24}{_bar(value / max(values.values()), width=40)} {value:,.1f}"
