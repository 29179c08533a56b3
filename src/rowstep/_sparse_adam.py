"""SparseAdam: what it adds to torch.optim.SparseAdam, and which numbers go into each update. The arithmetic is in the
backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._backends import Addresses, Backend, Outcome, RowUpdate, admit, admit_counts, admit_state
from ._gradient import RowGradient, all_rows, nonzero_rows, row_gradient
from ._optimizer import RowOptimizer
from ._plan import DenseStep, Group, Plan, RowStep, is_kept_as_a_table, refuse_outside
from ._rules.adam import kept_under
from ._state import MOMENTS, State, ensure_moments, ensure_row_steps, has_moments


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
        params: parameters, named parameters, or dicts that define groups, as for any torch optimizer.
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
            ``"skip"`` leaves the row unchanged and counts it in ``skipped_rows``; ``"raise"`` raises
            FloatingPointError before anything is written. A dense gradient steps as in torch.
        second_moment: what tables keep of squared gradients: ``"element"`` one number per weight, ``"row"`` one per
            row, their mean. With ``"row"`` and ``betas=(0, beta2)``, no first moment is kept either. See
            ``docs/memory.md``.
        state_dtype: the dtype of what tables keep per weight; by default the parameter's. 16 bits are rounded up or
            down at random, so that small changes are not lost. What is kept per row is at least float32.
        stochastic_rounding: round weights of 16 bits at random as well.
        seed: seed for stochastic rounding. The same seed gives the same numbers, for any number of threads.
        foreach: how torch steps parameters with dense gradients.
        fused: likewise; by default fused where that is safe.
        capturable: refused if True.
        differentiable: refused if True.

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
        second_moment: str = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
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
            "second_moment": second_moment,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults)
        self.skipped_rows = 0

    def _plan_parameter(
        self, plan: Plan, param: Tensor, grad: Tensor, state: State, taken: int, backend: Backend
    ) -> None:
        group, at = plan.group, admit_state(param, state)
        gradient, as_dense = self._rows_of(param, grad, state, group)
        if gradient is None:
            plan.dense.append(DenseStep(param, grad))
        else:
            refuse_outside(gradient, backend)
            plan.rows.append(self._row_step(plan, param, gradient, as_dense, state, at, taken))
            if group["nonfinite"] == "raise" and backend.has_nonfinite(gradient):
                raise FloatingPointError(
                    "the gradient has a non-finite row; expected finite values, because nonfinite='raise' is set"
                )

    def _row_step(
        self,
        plan: Plan,
        param: Tensor,
        gradient: RowGradient,
        as_dense: bool,
        state: State,
        at: Addresses | None,
        taken: int,
    ) -> RowStep:
        count = plan.count_after(param, taken)
        in_a_table = not as_dense or is_kept_as_a_table(state, plan.group, param)
        step = RowStep(param, gradient, plan.scalars(count, as_dense, param, in_a_table=in_a_table), count)
        if step.scalars.per_row and "row_step" in state:
            admit_counts(state, gradient.lead)
        if has_moments(state, step.scalars.kept) and (not step.scalars.per_row or "row_step" in state):
            step.update = admit(param, state, gradient, at, step.scalars, None, count)
        return step

    def _rows_of(self, param: Tensor, grad: Tensor, state: State, group: Group) -> tuple[RowGradient | None, bool]:
        """The gradient as rows, or None if it is for torch's dense Adam; and whether it came dense and names every row.

        Then eps goes where torch.optim.Adam has it.
        """
        if grad.is_sparse:
            return row_gradient(grad, param.shape), False
        if group["force_sparse"]:
            return nonzero_rows(grad), False
        if "exp_avg_sq_row" in state:
            return all_rows(grad, tuple(state["exp_avg_sq_row"].shape)), True
        dtypes = {state[key].dtype for key in MOMENTS if key in state}
        is_rounded = group["stochastic_rounding"] and param.dtype.itemsize == 2
        if dtypes | {grad.dtype} != {param.dtype} or is_rounded:  # torch's Adam wants one dtype for all
            return all_rows(grad, tuple(param.shape[:1])), True
        return None, False

    def _begin_rows(self, step: RowStep, group: Group) -> RowUpdate:
        param, gradient, state = step.param, step.gradient, self.state[step.param]
        self._convert(step, group, gradient.lead)
        if step.scalars.per_row:
            ensure_row_steps(state, gradient.lead)
        at = admit_state(param, state)
        return admit(param, state, gradient, at, step.scalars, None, step.count)

    def _counter(self, updates: Sequence[RowUpdate], group: Group, backend: Backend) -> Callable[[Outcome], None]:
        skips, skipped_before = group["nonfinite"] == "skip", self.skipped_rows

        def count(outcome: Outcome) -> None:
            for update in updates:
                update.state["step"] = update.steps
            self.skipped_rows = skipped_before + (outcome.skipped if skips else 0)

        return count

    def _step_dense(self, steps: list[DenseStep], group: Group, backend: Backend) -> None:
        step_all = super()._step_dense
        if group["bias_correction"] != "row":
            step_all(steps, group, backend)
            return
        counts = []
        for step in steps:
            state = self.state[step.param]
            ensure_moments(state, step.param, kept_under(group, in_a_table=False))
            ensure_row_steps(state, tuple(step.param.shape[:1]))
            counts.append((state, int(state["step"]), state["row_step"] + 1))

        def count() -> None:
            for state, before, after in counts:
                if int(state["step"]) > before:
                    state["row_step"].copy_(after)

        self._and_finish(lambda: step_all(steps, group, backend), count)

    def allocate_state(self) -> None:
        """Allocate the state of every parameter now instead of at its first step, so that checkpoints can load into it.

        Optimizers of sharded tables do this when they are created.
        """
        super().allocate_state()
        for group in self.param_groups:
            if group["bias_correction"] == "row":
                for param in group["params"]:
                    if param.requires_grad:
                        ensure_row_steps(self.state[param], tuple(param.shape[:1]))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"skipped_rows": self.skipped_rows}
