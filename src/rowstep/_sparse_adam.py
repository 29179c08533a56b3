"""SparseAdam: what it adds to torch.optim.SparseAdam, and which numbers go into each update. The arithmetic is in the
backends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from . import _dense
from ._backends import Addresses, Backend, Operands, Outcome, admit, admit_counts, admit_state
from ._gradient import all_rows, nonzero_rows
from ._loading import row_counts
from ._optimizer import Group, RowOptimizer, Rows
from ._row_steps import RowSteps, ensure_slot
from ._rule import row_rule
from ._state import MOMENTS, State, ensure_moments


class SparseAdam(RowOptimizer):
    r"""Adam for models with sparse gradients: one optimizer for embedding tables and everything else.

    A parameter with a sparse gradient steps exactly as under :class:`torch.optim.SparseAdam`: only the rows that the
    gradient names change, in the parameter and in both moments. A parameter with a dense gradient steps exactly as
    under :class:`torch.optim.Adam`. A parameter without a gradient is left alone. State dicts load both ways between
    this class and both of torch's.

    Args:
        params: parameters, named parameters, or dicts that define groups, as for any torch optimizer.
        lr: learning rate, a number or a one-element Tensor.
        betas: decay rates of the two moments.
        eps: added to the uncorrected :math:`\sqrt{v}` of a sparse gradient (as torch.optim.SparseAdam does) and to
            the bias-corrected one of a dense gradient (as torch.optim.Adam does).
        maximize: step up the gradient instead of down.
        weight_decay: L2 penalty added to the gradient. In a table, it applies only to touched rows.
        decoupled_weight_decay: shrink the weights themselves, as AdamW does. In a table, only touched rows shrink.
        amsgrad: normalise by the largest second moment so far.
        force_sparse: treat only the rows of a dense gradient (along the first dimension) that hold a non-zero as
            touched.
        bias_correction: ``"global"`` corrects by the parameter's step count, as torch does. ``"row"`` counts each row's
            own steps, so a row first seen late moves by lr. Global correction leaves its :math:`\sqrt{v}` too small by
            a factor of up to :math:`1/\sqrt{1-\beta_2}`.
        nonfinite: what to do with a row whose summed gradient is not finite. ``"propagate"`` steps it, as torch does;
            ``"skip"`` leaves the row unchanged and counts it in :attr:`skipped_rows`; ``"raise"`` raises
            FloatingPointError before anything is written. In a dense gradient, a row is a slice along the first
            dimension.

    Moments are kept in the parameter's dtype. For 16-bit parameters the arithmetic runs in float32.
    """

    skipped_rows: int
    """How many row updates ``nonfinite="skip"`` has skipped so far."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        amsgrad: bool = False,
        force_sparse: bool = False,
        bias_correction: str = "global",
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "amsgrad": amsgrad,
            "force_sparse": force_sparse,
            "bias_correction": bias_correction,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)
        self.skipped_rows = 0
        self._row_steps = RowSteps()

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Rows | None:
        if grad.is_sparse:
            return super()._as_rows(param, grad, state, group)
        if group["force_sparse"]:
            return Rows(param, nonzero_rows(grad))
        if group["bias_correction"] == "row" and self._row_steps.takes_rows(param, state):
            lead = tuple(state["row_step"].shape if "row_step" in state else param.shape[:1])
            return Rows(param, all_rows(grad, lead), as_dense=True)
        dtypes = {state[key].dtype for key in MOMENTS if key in state}
        if dtypes | {grad.dtype} != {param.dtype}:  # torch's Adam wants one dtype for all
            return Rows(param, all_rows(grad, tuple(param.shape[:1])), as_dense=True)
        return None

    def _operands(self, item: Rows, state: State, at: Addresses | None, group: Group) -> Operands | None:
        if group["bias_correction"] == "row":
            if not self._row_steps.are_counted(item.param, state):
                return None
            admit_counts(state, item.gradient.lead)
        return super()._operands(item, state, at, group)

    def _check_gradient(self, param: Tensor, grad: Tensor, item: Rows | None, group: Group, backend: Backend) -> None:
        if group["nonfinite"] == "raise" and (
            backend.has_nonfinite(item.gradient) if item is not None else not bool(grad.isfinite().all())
        ):
            raise FloatingPointError("the gradient has a row that is not finite, and nonfinite='raise' was asked for")

    def _step_rows(self, item: Rows, group: Group, backend: Backend) -> None:
        gradient, state = item.gradient, self.state[item.param]
        per_row = group["bias_correction"] == "row"
        if item.operands is None:
            ensure_moments(state, item.param, amsgrad=group["amsgrad"])
            if per_row and not gradient.is_empty:
                self._row_steps.begin(item.param, state, gradient.lead)
            elif per_row:
                ensure_slot(state, item.param)
            counted = per_row and not gradient.is_empty
            at = admit_state(item.param, state)
            item.operands = admit(item.param, state, gradient, at, amsgrad=group["amsgrad"], counted=counted)
        operands = item.operands
        step, skips, skipped_before = int(state["step"]) + 1, group["nonfinite"] == "skip", self.skipped_rows

        def update(outcome: Outcome) -> None:
            rule = row_rule(
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                step=step,
                maximize=group["maximize"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=group["amsgrad"],
                per_row=per_row,
                as_dense=item.as_dense,
                skip_nonfinite=skips,
            )
            backend.update(operands, rule, outcome)

        def count(outcome: Outcome) -> None:
            skipped = outcome.skipped if skips else 0
            state["step"], self.skipped_rows = step, skipped_before + skipped

        self._whole_or_not_at_all(update, count, is_empty=gradient.is_empty)

    def _step_dense(self, items: list[tuple[Tensor, Tensor]], group: Group, backend: Backend) -> None:
        if group["bias_correction"] == "row":
            for param, _ in items:
                ensure_slot(self.state[param], param)
        if group["nonfinite"] != "skip":
            super()._step_dense(items, group, backend)
            return
        untouched = []
        for param, grad in items:
            rows = _dense.nonfinite_rows(grad)
            if len(rows):
                ensure_moments(self.state[param], param, amsgrad=group["amsgrad"])
                untouched.append(_dense.Untouched(param, self.state[param], rows))
        try:
            super()._step_dense(items, group, backend)
            for rows_before in untouched:
                rows_before.restore()
        except BaseException:
            for rows_before in untouched:
                rows_before.restore()
            raise
        self.skipped_rows += sum(rows_before.count for rows_before in untouched)

    def _steps_of_rows(self, param: Tensor, state: State) -> Tensor | None:
        is_by_row = self._group_of(param)["bias_correction"] == "row" and "row_step" in state
        return self._row_steps.before_new_rows(param, state) if is_by_row else None

    def allocate_state(self) -> None:
        super().allocate_state()
        for group in self.param_groups:
            if group["bias_correction"] == "row":
                for param in group["params"]:
                    if param.requires_grad:
                        ensure_slot(self.state[param], param)

    def _loaded(self, given: StateDict) -> None:
        for param, counts in row_counts(given, self._all_params()):
            self.state[param]["row_step"] = counts

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"skipped_rows": self.skipped_rows, "_row_steps": RowSteps()}
