"""What suites share about contenders: their names, their gradients, and the check that they compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the usual name

from benchmarks.timing import Contender

ROWSTEP, TORCH, ADAM, ROOFLINE = "rowstep", "torch SparseAdam", "torch Adam (dense)", "roofline"


class DisagreementError(Exception):
    """Two optimizers that should compute the same do not: their times cannot be compared."""


def weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def give(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(weights(optimizer), gradients, strict=True):
        parameter.grad = gradient


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Per weight, of all tensors that the optimizer keeps."""
    kept = sum(value.nbytes for state in optimizer.state.values() for value in _tensors(state))
    return kept / sum(parameter.numel() for parameter in weights(optimizer))


def touch_state(optimizer: torch.optim.Optimizer) -> None:
    """Write to all moments: zeroed pages take memory, and time, only when first written."""
    for state in optimizer.state.values():
        for value in _tensors(state):
            value.add_(0)


def _tensors(state: dict[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def check_agreement(name: str, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for p, q in zip(weights(ours), weights(theirs), strict=True):
        check_close(f"{name}: weights", p, q)
        for key in ("exp_avg", "exp_avg_sq"):
            check_close(f"{name}: {key}", ours.state[p][key], theirs.state[q][key])


def check_close(what: str, ours: Tensor, theirs: Tensor, at_a_time: int = 1_000_000) -> None:
    # In parts: comparing two tables of 1.3 GB at once would need several more of that size.
    for start in range(0, len(ours), at_a_time):
        a, b = (tensor.detach()[start : start + at_a_time] for tensor in (ours, theirs))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-7):
            difference = (a - b).abs().max().item()
            raise DisagreementError(
                f"{what} differ from torch's by up to {difference:.2e}; their times cannot be compared"
            )


def stepper(name: str, optimizer: torch.optim.Optimizer, pool: Sequence[Sequence[Tensor]]) -> Contender:
    return Contender(name, lambda number: give(optimizer, pool[number % len(pool)]), optimizer.step)


def looper(
    name: str,
    optimizer: torch.optim.Optimizer,
    pool: Sequence[Sequence[Tensor]],
    *,
    sparse: bool = True,
    at_most: int | None = None,
) -> Contender:
    """The whole loop of tables without a model: lookups, a backward pass with the pool's gradients, and the step.

    A model's own time comes on top, for every optimizer the same. `sparse` is that of `nn.Embedding`.
    """
    turn, batch = itertools.cycle(pool), list(pool[0])

    def prepare(_number: int) -> None:
        batch[:] = next(turn)

    def run() -> None:
        optimizer.zero_grad()
        tables = zip(weights(optimizer), batch, strict=True)
        rows = [F.embedding(gradient._indices()[0], table, sparse=sparse) for table, gradient in tables]
        torch.autograd.backward(rows, [gradient._values() for gradient in batch])
        optimizer.step()

    return Contender(name, prepare, run, at_most)
