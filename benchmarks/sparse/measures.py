"""What is timed inside this process: single steps, a table with more rows, whole training loops, dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import ADAM, ROWSTEP, TORCH, check_agreement, give, stepper, weights
from benchmarks.sparse.field import Field
from benchmarks.timing import Contender, Measurement, measure, nothing, threads
from rowstep import SparseAdam

Maker: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def steps(case: Case, counts: Sequence[int], repeats: int) -> Iterator[tuple[Measurement, float]]:
    """One measurement per thread count, each with rowstep's bytes of state per weight."""
    field = Field(case)
    for count in counts:
        with threads(count):
            field.check()
            measured = measure("step", case.name, case.about, field.contenders(count), repeats, field.left_out)
        yield measured, field.state_bytes_per_weight()


def scaling(few: Case, many: Case, counts: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """rowstep alone, with the same ids and width in tables of different length; contenders are called by their case."""
    lineup = [stepper(case.name, SparseAdam(cases.parameters(case)), cases.gradients(case)) for case in (few, many)]
    about = f"{cases.short(few.rows)} and {cases.short(many.rows)} rows, {few.ids:,} ids x {few.dim}"
    for count in counts:
        with threads(count):
            yield measure("scaling", "scaling", about, lineup, repeats)


def loop(case: Case, count: int, repeats: int) -> Measurement:
    """Lookup, a small loss, backward and step."""
    lineup = [_trainer(ROWSTEP, SparseAdam, case), _trainer(TORCH, torch.optim.SparseAdam, case)]
    with threads(count):
        return measure("loop", case.name, case.about, lineup, repeats)


def dense(rows: int, count: int, repeats: int) -> Iterator[Measurement]:
    """Parameters with dense gradients, which rowstep steps like Adam."""
    models: list[tuple[str, Callable[[], nn.Module]]] = [
        (f"{cases.short(rows)} x 64", lambda: nn.Embedding(rows, 64)),
        ("256-512-512-10 network", lambda: nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 10))),
    ]
    for about, model in models:
        ours = _with_dense_gradients(model, SparseAdam)
        theirs = _with_dense_gradients(model, lambda parameters: torch.optim.Adam(parameters, fused=True))
        with threads(count):
            for optimizer in (ours, theirs) * 3:
                optimizer.step()
            check_agreement(about, ours, theirs)
            lineup = [Contender(ROWSTEP, nothing, ours.step), Contender(ADAM, nothing, theirs.step)]
            yield measure("dense", about, f"{about}, dense gradients", lineup, repeats)


def _trainer(name: str, maker: Maker, case: Case) -> Contender:
    table = nn.Embedding(case.rows, case.dim, sparse=True, _weight=cases.parameters(case)[0].detach())
    optimizer = maker(table.parameters())
    pool = [batch[0] for batch in cases.batches_of_ids(case)]
    ids = pool[0]

    def prepare(number: int) -> None:
        nonlocal ids
        ids = pool[number % len(pool)]

    def run() -> None:
        optimizer.zero_grad()
        table(ids).square().mean().backward()
        optimizer.step()

    return Contender(name, prepare, run)


def _with_dense_gradients(model: Callable[[], nn.Module], maker: Maker) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    optimizer = maker(model().parameters())
    give(optimizer, [torch.randn_like(parameter) for parameter in weights(optimizer)])
    return optimizer
