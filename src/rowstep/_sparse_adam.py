"""SparseAdam: options, groups, and one update per parameter. The arithmetic is in the backends.

A step has two halves. The first looks at every gradient of every group and raises if one cannot be taken; the second
writes. So an error leaves every tensor as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from . import _backends, _dense
from ._gradient import RowGradient, all_rows, nonzero_rows, outside_message, row_gradient
from ._options import check_group, check_layouts, check_learning_rate, parameter_name
from ._rule import row_rule
from ._state import State, ensure_moments, ensure_row_steps, misfit


class _Rows(NamedTuple):
    """A parameter whose gradient is taken row by row."""

    param: Tensor
    gradient: RowGradient
    as_dense: bool
    """The gradient came dense and names every row: eps goes where torch.optim.Adam has it."""


class _Work(NamedTuple):
    """What one group has to do in this step."""

    rows: list[_Rows]
    dense: list[tuple[Tensor, Tensor]]


class SparseAdam(Optimizer):
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
        check_learning_rate(lr, zero_allowed=False)
        check_group(defaults)
        self._is_complete = False
        super().__init__(params, defaults)
        check_layouts(self.param_groups, type(self).__name__)
        self._is_complete = True
        self.skipped_rows = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, under the same checks as the constructor's; a group that is refused is not added."""
        super().add_param_group(param_group)
        try:
            where = f" in group {len(self.param_groups) - 1}"
            check_learning_rate(self.param_groups[-1]["lr"], zero_allowed=True, where=where)
            check_group(self.param_groups[-1], where)
            if self._is_complete:  # the constructor looks at all groups together, to name every parameter it refuses
                check_layouts(self.param_groups, type(self).__name__)
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one step; return what ``closure`` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        backend = _backends.chosen()
        work = [self._collect(index, group, backend) for index, group in enumerate(self.param_groups)]
        for group, (rows, dense) in zip(self.param_groups, work, strict=True):
            for item in rows:
                self._step_rows(item, group, backend)
            if dense:
                self._step_dense(dense, group)
        return loss

    def _collect(self, group_index: int, group: dict[str, Any], backend: _backends.Backend) -> _Work:
        """What this group has to do. Writes nothing, and raises if some gradient cannot be taken."""
        work = _Work([], [])
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            try:
                state = self.state.get(param, {})
                _check_fit(param, grad, state)
                item = _as_rows(param, grad, state, group)
                if item is None:
                    work.dense.append((param, grad))
                else:
                    _check_rows(item.gradient, state, backend)
                    work.rows.append(item)
                if group["nonfinite"] == "raise":
                    _check_finite(grad, item, backend)
            except (ArithmeticError, LookupError, TypeError, ValueError) as flaw:
                raise type(flaw)(f"{parameter_name(group, group_index, index)}: {flaw}") from flaw
        return work

    def _step_rows(self, item: _Rows, group: dict[str, Any], backend: _backends.Backend) -> None:
        param, gradient, as_dense = item
        state = self.state[param]
        ensure_moments(state, param, amsgrad=group["amsgrad"])
        per_row = group["bias_correction"] == "row" and not gradient.is_empty
        if per_row:
            ensure_row_steps(state, gradient.lead)
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

    def _step_dense(self, items: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        untouched = []
        if group["nonfinite"] == "skip":
            for param, grad in items:
                rows = _dense.nonfinite_rows(grad)
                if len(rows):
                    ensure_moments(self.state[param], param, amsgrad=group["amsgrad"])
                    untouched.append(_dense.Untouched(param, self.state[param], rows))
                    self.skipped_rows += len(rows)
        _dense.update_all([(param, grad, self.state[param]) for param, grad in items], group)
        for rows_before in untouched:
            rows_before.restore()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class, of torch.optim.SparseAdam or of torch.optim.Adam.

        What the saved groups do not say (all of our own options, in torch's) stays as this optimizer has it.
        """
        given: StateDict = {}
        own_groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

        def check(optimizer: Optimizer, state_dict: StateDict) -> None:
            given.update(state_dict)
            for index, (own, new) in enumerate(zip(own_groups, given["param_groups"], strict=False)):
                check_group(own | new, f" in group {index} of the loaded state")

        def complete(optimizer: Optimizer) -> None:
            for own, group in zip(own_groups, self.param_groups, strict=True):
                for key, value in own.items():
                    group.setdefault(key, value)
            self._keep_dtype("row_step", given)

        # Ours is the last look at what will be loaded, and the first at what was: users' hooks see it finished.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(complete, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def _keep_dtype(self, key: str, given: StateDict) -> None:
        """Undo torch's cast of a loaded integer state to the parameter's dtype, which bfloat16 cannot count in."""
        saved_ids = [number for group in given["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved_ids, params, strict=True):
            value = given["state"].get(number, {}).get(key)
            if value is not None:
                self.state[param][key] = value.to(device=param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"skipped_rows": self.skipped_rows, "_is_complete": True}


def _as_rows(param: Tensor, grad: Tensor, state: State, group: dict[str, Any]) -> _Rows | None:
    """The gradient as rows, or None if it is one for torch's dense Adam."""
    if grad.is_sparse:
        return _Rows(param, row_gradient(grad, param.shape), as_dense=False)
    if group["force_sparse"]:
        return _Rows(param, nonzero_rows(grad), as_dense=False)
    if group["bias_correction"] == "row" and "row_step" in state:
        return _Rows(param, all_rows(grad, tuple(state["row_step"].shape)), as_dense=True)
    moment = state.get("exp_avg", param)
    if grad.dtype != param.dtype or moment.dtype != param.dtype:  # torch's Adam wants one dtype for all
        return _Rows(param, all_rows(grad, tuple(param.shape[:1])), as_dense=True)
    return None


def _check_fit(param: Tensor, grad: Tensor, state: State) -> None:
    if grad.layout not in (torch.sparse_coo, torch.strided):
        raise TypeError(f"the gradient's layout is {grad.layout}; expected torch.sparse_coo or torch.strided")
    if grad.shape != param.shape:
        raise ValueError(f"the gradient has shape {tuple(grad.shape)}; expected the parameter's, {tuple(param.shape)}")
    if not grad.is_floating_point():
        raise TypeError(f"the gradient has dtype {grad.dtype}; expected a floating-point type")
    if grad.device != param.device:
        raise ValueError(f"the gradient is on {grad.device}; expected the parameter's device, {param.device}")
    if reason := misfit(state, param):
        raise ValueError(reason)


def _check_rows(gradient: RowGradient, state: State, backend: _backends.Backend) -> None:
    outside = backend.first_outside(gradient)
    if outside is not None:
        raise IndexError(outside_message(outside, gradient.row_count))
    counts = state.get("row_step")
    if counts is not None and tuple(counts.shape) != gradient.lead:
        raise ValueError(
            f"the gradient's rows run over dimensions {gradient.lead}, but bias_correction='row' has counted rows "
            f"over {tuple(counts.shape)}; expected gradients of one sparse_dim"
        )


def _check_finite(grad: Tensor, item: _Rows | None, backend: _backends.Backend) -> None:
    if backend.has_nonfinite(item.gradient) if item is not None else not bool(grad.isfinite().all()):
        raise FloatingPointError("the gradient has a row that is not finite, and nonfinite='raise' was asked for")
