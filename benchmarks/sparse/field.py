"""Who takes part in the timing of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.contenders import ADAM, ROOFLINE, ROWSTEP, TORCH, check_agreement, give, stepper, weights
from benchmarks.sparse import roofline
from benchmarks.timing import Contender, nothing
from rowstep import SparseAdam

DENSE_BYTES = 6e9  # dense Adam's weights, gradient and moments together: above this it is left out
DENSE_ROUNDS = 5  # it takes 4 to 100 times as long as a sparse step, and hardly varies


class Field:
    """All contenders of one case. rowstep and torch step through the same gradients from the same weights."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.gradients = cases.gradients(case)
        self.ours = SparseAdam(cases.parameters(case))
        self.theirs = torch.optim.SparseAdam(cases.parameters(case))
        self.left_out: dict[str, str] = {}
        self.dense = self._dense_adam()

    def check(self, steps: int = 3) -> None:
        for gradients in self.gradients[:steps]:
            for optimizer in (self.ours, self.theirs):
                give(optimizer, gradients)
                optimizer.step()
        check_agreement(self.case.name, self.ours, self.theirs)

    def contenders(self, threads: int) -> list[Contender]:
        lineup = [stepper(ROWSTEP, self.ours, self.gradients), stepper(TORCH, self.theirs, self.gradients)]
        lineup.append(self._roofline(threads))
        if self.dense is not None:
            lineup.append(Contender(ADAM, nothing, self.dense.step, at_most=DENSE_ROUNDS))
        return lineup

    def state_bytes_per_weight(self) -> float:
        kept = [value for state in self.ours.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept) / self.case.weights

    def _dense_adam(self) -> torch.optim.Adam | None:
        size = 16 * self.case.weights
        if size > DENSE_BYTES:
            self.left_out[ADAM] = f"would need {size / 1e9:.1f} GB"
            return None
        optimizer = torch.optim.Adam(cases.parameters(self.case), fused=True)
        # Its time does not depend on the gradient, so that one serves for all rounds.
        give(optimizer, [gradient.to_dense() for gradient in self.gradients[0]])
        return optimizer

    def _roofline(self, threads: int) -> Contender:
        state = [(p, *(self.ours.state[p][key] for key in ("exp_avg", "exp_avg_sq"))) for p in weights(self.ours)]
        pool = [
            [roofline.traffic(gradient, tables, threads) for gradient, tables in zip(batch, state, strict=True)]
            for batch in self.gradients
        ]
        batch = pool[0]

        def prepare(number: int) -> None:
            nonlocal batch
            batch = pool[number % len(pool)]

        def run() -> None:
            for table in batch:
                table.move()

        return Contender(ROOFLINE, prepare, run)
