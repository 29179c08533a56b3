"""SparseAdam: its options, which gradients it takes as rows, and how it counts steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ._gradient import RowGradient, all_rows, nonzero_rows, row_gradient
from ._optimizer import RowOptimizer
from ._rule import Rule
from ._state import ELEMENTWISE, State
from ._table import Job


class SparseAdam(RowOptimizer):
    """Adam for models with sparse gradients: one optimizer for embedding tables and everything else.

    A parameter with a sparse gradient steps exactly as under torch.optim.SparseAdam: only the rows that the gradient
    names change, in the parameter and in both moments. A parameter with a dense gradient steps exactly as under
    torch.optim.Adam. A parameter without a gradient is left alone. State dicts load both ways between this class and
    both of torch's.

    For the summed gradient g of a row, at the parameter's step t:

        m ← m + (1 - β₁)(g - m)
        v ← v + (1 - β₂)(g² - v)
        p ← p - lr · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)

    Moments are kept in the parameter's dtype, unless ``state_dtype`` says otherwise. For 16-bit parameters the
    arithmetic runs in float32. ``second_moment`` and ``state_dtype`` concern tables: parameters whose gradients are
    sparse, or made so by ``force_sparse``. What is kept for other parameters is as in torch.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; or a module, for its
            ``named_parameters()``. Errors then name the parameter.
        lr: learning rate, a number or a one-element Tensor.
        betas: decay rates β₁ and β₂ of the two moments.
        eps: ε, added to the uncorrected √v of a sparse gradient (as torch.optim.SparseAdam does) and to the
            bias-corrected one of a dense gradient (as torch.optim.Adam does).
        maximize: step up the gradient instead of down.
        weight_decay: L2 penalty added to the gradient. In a table, it applies only to touched rows.
        decoupled_weight_decay: shrink the weights themselves, as AdamW does. In a table, only touched rows shrink.
        amsgrad: normalise by the largest second moment so far.
        force_sparse: treat only the rows of a dense gradient (along the first dimension) that hold a non-zero as
            touched.
        bias_correction: ``"global"`` corrects by the parameter's step count, as torch does. ``"row"`` counts each row's
            own steps, so a row first seen late moves by lr. Global correction moves such a row by up to
            (1 - β₁) / √(1 - β₂) times lr. A dense gradient is a step of every row, corrected as in torch.
        nonfinite: what to do with a row whose summed gradient is not finite. ``"propagate"`` steps it, as torch does;
            ``"skip"`` leaves the row unchanged and counts it in ``skipped_rows``. A dense gradient steps as in torch.
            To raise instead, clip with ``error_if_nonfinite=True``.
        second_moment: what tables keep of squared gradients: ``"element"`` one number per weight, ``"row"`` one per
            row, their mean. With ``"row"`` and ``betas=(0, beta2)``, no first moment is kept either. See
            ``docs/memory.md``.
        state_dtype: the dtype of what tables keep per weight; by default the parameter's. 16 bits are rounded up or
            down at random, so that small changes are not lost. What is kept per row is at least float32.
        stochastic_rounding: round weights of 16 bits at random as well, and with them their moments, unless those
            are wider.
        seed: seed for stochastic rounding. The same seed gives the same numbers, for any number of threads.
        foreach: use torch's foreach implementation for dense gradients.
        fused: use torch's fused kernel for dense gradients; by default where that is safe.
        capturable: refused if True.
        differentiable: refused if True.
        state_dir: a folder for the state, each part of it in a file of its own, which may be larger than memory. What
            an earlier run has left there is taken up. See ``docs/files.md``.

    Examples:
        >>> import torch
        >>> from rowstep import SparseAdam
        >>> table, top = torch.nn.Embedding(1000, 8, sparse=True), torch.nn.Linear(8, 1)
        >>> optimizer = SparseAdam([*table.parameters(), *top.parameters()], lr=0.01)
        >>> before = table.weight.detach().clone()
        >>> top(table(torch.tensor([3, 5, 3]))).sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(1).nonzero().flatten()  # only these rows have moved
        tensor([3, 5])
    """

    _own_when_loading = (*RowOptimizer._own_when_loading, "state_dir")

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        amsgrad: bool = False,
        force_sparse: bool = False,
        bias_correction: Literal["global", "row"] = "global",
        nonfinite: Literal["propagate", "skip"] = "propagate",
        second_moment: Literal["element", "row"] = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "maximize": maximize, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "amsgrad": amsgrad, "force_sparse": force_sparse,
            "bias_correction": bias_correction, "nonfinite": nonfinite, "second_moment": second_moment,
            "state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding, "seed": seed,
            "foreach": foreach, "fused": fused, "capturable": capturable, "differentiable": differentiable,
            "state_dir": state_dir,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._skipped = 0

    @property
    def skipped_rows(self) -> int:
        """How many row updates ``nonfinite="skip"`` has skipped so far. To read it is to wait for tables at work."""
        with self._lock:
            on_gpus: int = sum(report.skipped_rows for report in self._reports.values())
            return self._skipped + on_gpus

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, rule: Rule) -> tuple[RowGradient | None, bool, bool]:
        if grad.is_sparse:
            gradient = row_gradient(grad, grad.shape)
            if len(gradient.lead) != 1 and (rule.spec.is_counted or rule.spec.is_by_row):
                raise ValueError(
                    f"the gradient has sparse_dim {len(gradient.lead)}; expected 1, because something is kept for each "
                    "row of the first dimension. Use bias_correction='global' and second_moment='element'"
                )
            return gradient, False, True
        if rule.forces_sparse:
            return nonzero_rows(grad), False, True
        in_a_table = rule.spec.holds_table_state(state, param)
        dtypes = {grad.dtype, *(getattr(state.get(name), "dtype", param.dtype) for name in ELEMENTWISE)}
        is_rounded = rule.rounds_weights_of(param.dtype)
        if in_a_table or dtypes != {param.dtype} or is_rounded:  # torch's Adam wants one dtype for all
            return all_rows(grad), True, in_a_table
        return None, True, False

    def _count(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.table.state["step"] = job.step.count

    def _after_launches(self, jobs: Sequence[Job], skipped: int) -> None:
        self._skipped += skipped

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_skipped": self.skipped_rows}
