"""SparseAdam: what it adds to torch.optim.SparseAdam, and which numbers go into each update. The arithmetic is in the
backends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from . import _dense
from ._backends import Backend
from ._gradient import RowGradient, all_rows, nonzero_rows
from ._optimizer import Group, RowOptimizer, Rows, Work
from ._options import CHOICES
from ._row_steps import RowSteps, ensure_slot
from ._rule import row_rule
from ._state import State, ensure_moments


class SparseAdam(RowOptimizer):
    r"""Adam for models with sparse gradients: one optimizer for the tables and for everything else.

    A parameter with a sparse gradient steps exactly as under :class:`torch.optim.SparseAdam`: only the rows that the
    gradient names move, in the parameter and in both moments. A parameter with a dense gradient steps exactly as
    under :class:`torch.optim.Adam`. One with no gradient is left alone. State dicts pass both ways between this class
    and both of torch's.

    Args:
        params: parameters, named parameters, or dicts that define groups, as for any torch optimizer.
        lr: learning rate, a number or a one-element Tensor.
        betas: decay rates of the two moments.
        eps: added to the uncorrected :math:`\sqrt{v}` of a sparse gradient (as torch.optim.SparseAdam does) and to
            the bias-corrected one of a dense gradient (as torch.optim.Adam does).
        maximize: step up the gradient instead of down.
        weight_decay: L2 penalty folded into the gradient. Of a table, it acts on the rows touched in this step only.
        decoupled_weight_decay: shrink the weights themselves, as AdamW does; again, of a table the touched rows only.
        amsgrad: normalise by the largest second moment so far.
        force_sparse: treat a dense gradient as one that names the rows (along the first dimension) which hold a
            non-zero.
        bias_correction: ``"global"`` corrects by the parameter's step count, as torch does. ``"row"`` counts each row's
            own steps, so a row first seen late moves by lr, and not by up to :math:`1/\sqrt{1-\beta_2}` of what its
            history would allow.
        nonfinite: what to do with a row whose summed gradient is not finite. ``"propagate"`` steps it, as torch does;
            ``"skip"`` leaves the row untouched and counts it in :attr:`skipped_rows`; ``"raise"`` raises a
            FloatingPointError before anything is written. Of a dense gradient, a row is a slice along the first
            dimension.

    Moments are kept in the parameter's dtype. For 16-bit parameters the arithmetic runs in float32.
    """

    skipped_rows: int
    """How many row updates ``nonfinite="skip"`` has left out so far."""

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

    def _collect(self, group_index: int, group: Group, backend: Backend) -> Work:
        for name in ("bias_correction", "nonfinite"):  # a group can be edited after it was checked
            if group[name] not in CHOICES[name]:
                self._check_group(group, f" in group {group_index}")
        return super()._collect(group_index, group, backend)

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Rows | None:
        if grad.is_sparse:
            return super()._as_rows(param, grad, state, group)
        if group["force_sparse"]:
            return Rows(param, nonzero_rows(grad))
        if group["bias_correction"] == "row" and self._row_steps.are_counted(param, state):
            return Rows(param, all_rows(grad, tuple(state["row_step"].shape)), as_dense=True)
        moment = state.get("exp_avg", param)
        if grad.dtype != param.dtype or moment.dtype != param.dtype:  # torch's Adam wants one dtype for all
            return Rows(param, all_rows(grad, tuple(param.shape[:1])), as_dense=True)
        return None

    def _check_gradient(self, param: Tensor, grad: Tensor, item: Rows | None, group: Group, backend: Backend) -> None:
        if item is not None and group["bias_correction"] == "row":
            state = self.state.get(param, {})
            if self._row_steps.are_counted(param, state):
                _check_row_counts(item.gradient, state["row_step"])
        if group["nonfinite"] == "raise" and (
            backend.has_nonfinite(item.gradient) if item is not None else not bool(grad.isfinite().all())
        ):
            raise FloatingPointError("the gradient has a row that is not finite, and nonfinite='raise' was asked for")

    def _step_rows(self, item: Rows, group: Group, backend: Backend) -> None:
        param, gradient, as_dense = item
        state = self.state[param]
        ensure_moments(state, param, amsgrad=group["amsgrad"])
        per_row = group["bias_correction"] == "row"
        if per_row:
            if gradient.is_empty:
                ensure_slot(state, param)
            else:
                self._row_steps.begin(param, state, gradient.lead)
        step = state["step"] = int(state["step"]) + 1
        if gradient.is_empty:
            return
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
            corrected_eps=as_dense,
            skip_nonfinite=group["nonfinite"] == "skip",
        )
        self.skipped_rows += backend.update(param, state, gradient, rule)

    def _step_dense(self, items: list[tuple[Tensor, Tensor]], group: Group, backend: Backend) -> None:
        if group["bias_correction"] == "row":
            for param, _ in items:
                ensure_slot(self.state[param], param)
        untouched = []
        if group["nonfinite"] == "skip":
            for param, grad in items:
                rows = _dense.nonfinite_rows(grad)
                if len(rows):
                    ensure_moments(self.state[param], param, amsgrad=group["amsgrad"])
                    untouched.append(_dense.Untouched(param, self.state[param], rows))
                    self.skipped_rows += len(rows)
        super()._step_dense(items, group, backend)
        for rows_before in untouched:
            rows_before.restore()

    def allocate_state(self) -> None:
        super().allocate_state()
        for group in self.param_groups:
            if group["bias_correction"] == "row":
                for param in group["params"]:
                    if param.requires_grad:
                        ensure_slot(self.state[param], param)

    def _loaded(self, given: StateDict) -> None:
        # torch casts every loaded state but `step` to the parameter's dtype, and bfloat16 cannot count.
        saved_ids = [number for group in given["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved_ids, params, strict=True):
            counts = given["state"].get(number, {}).get("row_step")
            if counts is not None:
                self.state[param]["row_step"] = counts.to(device=param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"skipped_rows": self.skipped_rows, "_row_steps": RowSteps()}


def _check_row_counts(gradient: RowGradient, counts: Tensor) -> None:
    if tuple(counts.shape) != gradient.lead:
        raise ValueError(
            f"the gradient's rows run over dimensions {gradient.lead}, but bias_correction='row' has counted rows "
            f"over {tuple(counts.shape)}; expected gradients of one sparse_dim"
        )
