"""One of rowstep's optimizers and the one of torch that computes the same, on the same weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam

SPARSE, DEFERRED = "SparseAdam", "DeferredAdam"
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 1e-6  # a thousandth of a step; weights below 1 are rounded to 6e-8
# In a long training rows have waited before they are read again; a table that is new would have nothing to catch up.
WAITED_STEPS = 100


class DisagreementError(Exception):
    """The two do not compute the same: their times cannot be compared."""


@dataclass(frozen=True)
class Size:
    rows: int
    dim: int
    ids: int  # per step

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.dim}, {self.ids:,} ids"


class Pair:
    ours: SparseAdam | DeferredAdam
    theirs: torch.optim.Optimizer

    def __init__(self, name: str, size: Size) -> None:
        self.name, self.size, self._random = name, size, torch.Generator().manual_seed(0)
        start = torch.randn(size.rows, size.dim, generator=self._random).mul_(0.1)
        self._table, self._other_table = nn.Parameter(start), nn.Parameter(start.clone())
        # Sums of such numbers are exact in any order, so duplicate ids cannot make the two differ.
        self._slopes = torch.randint(-64, 65, (size.ids, size.dim), generator=self._random) / 64
        if name == SPARSE:
            self.ours, self.theirs = SparseAdam([self._table]), torch.optim.SparseAdam([self._other_table])
        else:
            self.ours, self.theirs = DeferredAdam([self._table]), torch.optim.Adam([self._other_table], fused=True)

    def prepare(self) -> None:
        """Give both the gradient of the next batch."""
        self._other_table.grad = None  # a dense one is as large as the table: not two at once
        self._ids = self._next_ids()
        self._table.grad = gradient = torch.sparse_coo_tensor(
            self._ids.unsqueeze(0), self._slopes, self._table.shape, check_invariants=False
        )
        self._other_table.grad = gradient if self.name == SPARSE else gradient.to_dense()

    def step(self) -> None:
        """As training has it: DeferredAdam brings rows up to date before they are read."""
        if isinstance(self.ours, DeferredAdam):
            self.ours.catch_up(self._table, self._ids)
        self.ours.step()

    def other_step(self) -> None:
        self.theirs.step()

    def check(self) -> None:
        """Raise DisagreementError unless a few steps lead both to the same weights."""
        for _ in range(CHECKED_STEPS):
            self.prepare()
            self.step()
            self.other_step()
        if isinstance(self.ours, DeferredAdam):
            self.ours.flush()
        worst = (self._table.detach() - self._other_table.detach()).abs_().max().item()
        if not worst <= LARGEST_DIFFERENCE:  # nor if it is NaN
            about = f"{self.name}, {self.size}: weights differ from torch's by up to {worst:.2e}"
            raise DisagreementError(f"{about}; their times cannot be compared")

    def warm_up(self) -> None:
        """Write to all moments, because zeroed pages take time when first written; and let rows wait."""
        for state in (self.ours.state[self._table], self.theirs.state[self._other_table]):
            state["exp_avg"].add_(0)
            state["exp_avg_sq"].add_(0)
        for _ in range(WAITED_STEPS if self.name == DEFERRED else 0):
            self.prepare()
            self.step()

    def _next_ids(self) -> Tensor:
        """Ids that follow Zipf's law, the most frequent first: their logarithms are uniform."""
        draws = torch.rand(self.size.ids, generator=self._random, dtype=torch.float64)
        return (self.size.rows**draws).long() - 1
