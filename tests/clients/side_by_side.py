"""Run a program with torch's optimizer and with ours, and compare what both had after every step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

STATE = ("step", "exp_avg", "exp_avg_sq")


class Seen:
    """What a run had after its steps: every loss, and all weights and state after every ``every``-th step.

    A look at the weights of DeferredAdam brings all rows up to date. With every > 1 they also wait in between.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.losses: list[float] = []
        self.tensors: dict[int, dict[str, Tensor]] = {}

    def after_step(self, loss: Tensor | float, model: nn.Module, optimizer: Any) -> None:
        """To be called by the program after each step; ``optimizer`` may also be a list or a mapping of them."""
        self.losses.append(float(loss))
        if len(self.losses) % self.every == 0:
            self.tensors[len(self.losses)] = contents(model, optimizer)


class Following(Seen):
    """A run that goes on with another run's weights after each step.

    So both compute their gradients from the same numbers, and what is promised for one step holds for each of them.
    """

    def __init__(self, leader: Seen) -> None:
        super().__init__()
        self.leader = leader

    def after_step(self, loss: Tensor | float, model: nn.Module, optimizer: Any) -> None:
        super().after_step(loss, model, optimizer)
        for name, param in model.named_parameters():
            param.data.copy_(self.leader.tensors[len(self.losses)][name])


Train = Callable[[Any, bool, Seen], None]
"""A program: it gets what makes its optimizer, whether its tables have sparse gradients, and whom to show each step."""

REPORT: list[str] = []
"""A line for each run, shown in the end."""


def line(program: str, run: Seen, apart: float, bits: str = "") -> str:
    when = "every step" if run.every == 1 else f"every {run.every}th"
    return f"{program:<40} {len(run.losses):>4} steps, compared after {when:<10}  largest difference {apart:.0e}{bits}"


def assert_same_run(
    program: str,
    train: Train,
    theirs: Any,
    ours: Any,
    *,
    theirs_sparse: bool = True,
    ours_sparse: bool = True,
    every: int = 1,
) -> str:
    """Train in float64 with both: the same losses, weights and state, up to rounding. Returns a line of the report."""
    runs = [Seen(every), Seen(every)]
    for run, make, sparse in zip(runs, (theirs, ours), (theirs_sparse, ours_sparse), strict=True):
        torch.manual_seed(0)
        train(make, sparse, run)
    REPORT.append(line(program, runs[0], difference(*runs, tolerance=1e-11)))
    return REPORT[-1]


def assert_same_as_adam(program: str, train: Train, ours: Any, theirs: Any = torch.optim.Adam) -> list[str]:
    """A deferred optimizer is as torch's with dense gradients, also if rows wait between the looks at them."""
    return [assert_same_run(program, train, theirs, ours, theirs_sparse=False, every=every) for every in (1, 7)]


def assert_same_bits(program: str, train: Train, theirs: Any, ours: Any, tables: Container[str]) -> str:
    """Train in float32. From the same weights, the moments of ``tables`` get the same bits at every step."""
    leader = Seen()
    follower = Following(leader)
    for run, make in ((leader, theirs), (follower, ours)):
        torch.manual_seed(0)
        train(make, True, run)
    worst = difference(leader, follower, tolerance=1e-6, exact=tables)
    REPORT.append(line(program, leader, worst, ", moments to the bit"))
    return REPORT[-1]


def difference(theirs: Seen, ours: Seen, *, tolerance: float, exact: Container[str] = ()) -> float:
    """The largest difference between two runs, in units of the largest number of each tensor."""
    assert theirs.losses, "the program showed no step"
    assert len(ours.losses) == len(theirs.losses)
    assert sum(theirs.losses[-3:]) < sum(theirs.losses[:3]), "the program has learned nothing"
    worst = 0.0
    for step, losses in enumerate(zip(theirs.losses, ours.losses, strict=True), start=1):
        pairs = {"loss": tuple(map(torch.tensor, losses))}
        if step in theirs.tensors:
            assert ours.tensors[step].keys() == theirs.tensors[step].keys()
            pairs |= {name: (tensor, ours.tensors[step][name]) for name, tensor in theirs.tensors[step].items()}
        for name, (one, other) in pairs.items():
            key, _, param = name.rpartition(" of ")
            if key.startswith("exp_avg") and param in exact:
                assert torch.equal(one, other), f"{name} is not bit-identical after step {step}"
            apart = relative(one, other)
            assert apart <= tolerance, f"{name} differs by {apart:.1e} of its largest entry after step {step}"
            worst = max(worst, apart)
    return worst


def relative(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    assert one.isfinite().all()
    size, apart = (float(each.abs().max()) if one.numel() else 0.0 for each in (one, one - other))
    return apart / size if size else apart


def contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all weights, and of the state that torch's Adam and SparseAdam have too."""
    if isinstance(optimizer, Mapping):
        optimizer = list(optimizer.values())
    whole = optimizer if isinstance(optimizer, list) else [optimizer]
    optimizers = [part for one in whole for part in getattr(one, "parts", [one])]
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()  # before its state: a row that was waiting has old moments too
        for state in (one.state[param] for one in optimizers if param in one.state):
            found |= {f"{key} of {name}": torch.as_tensor(state[key]).double().clone() for key in STATE}
    return found
