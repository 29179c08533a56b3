"""DeferredAdam and DeferredAdamW: torch.optim.Adam and AdamW, with the rows of tables taken when they are read."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from .. import _backends
from .._backends import Backend, Notes, Outcome, RowUpdate, admit, admit_state
from .._commit import is_averaged
from .._gradient import RowGradient, all_rows, nonzero_rows, outside_message, rows_of_first_dimension
from .._optimizer import RowOptimizer
from .._options import check_learning_rate, refuse_shared_weights
from .._plan import DenseStep, Group, Plan, RowStep, is_kept_as_a_table, refuse_outside
from .._schedule import check_betas
from .._state import State, set_count
from .._torch_internals import is_faked, plainly
from .._waiting import Waiting
from .deferral import Deferral, StaleRowsError
from .deferrals import Deferrals, flush_orphans, options_of, raise_maximum

# A step's lr and weight decay.
Rate = tuple[float | Tensor, float]

_WAYS_OUT = (
    "They were read before the last step, or in a way that cannot be seen (through an alias made earlier, a scripted "
    "module, a functorch transform). Run the backward pass before the next step, or call opt.catch_up(param, ids) or "
    "opt.flush(param) before such a read. DistributedDataParallel's gradients name rows that other ranks have read: "
    "wrap the model by rowstep.distributed.ddp, or pass allow_stale=True"
)


class DeferredAdam(RowOptimizer):
    """torch.optim.Adam, at the cost of the rows touched.

    The weights that a forward pass reads, and the flushed table, are those that torch.optim.Adam would have after the
    same steps with dense gradients. Rows without a gradient wait, and catch up in one update before they are read.
    Parameters with dense gradients step exactly as in torch. See ``docs/deferred.md``.

    A row that was up to date at step s and has waited k steps takes all of dense Adam's moves at once:

        p ← p - m · Σ wⱼ / (√v + eⱼ)         over j = 1 … k
        m ← β₁ᵏ · m
        v ← β₂ᵏ · v

        wⱼ = lrₜ · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · (β₁ / √β₂)ʲ         t = s + j
        eⱼ = ε · √(1 - β₂ᵗ) · β₂^(-j/2)

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; or a module, for its parameters.
        lr: learning rate, a number or a one-element Tensor. Any schedule works, even one that changes at every step.
        betas: decay rates β₁ and β₂ of the two moments; β₁ must be below √β₂.
        eps: ε, added to the bias-corrected √v. With sparse gradients it must be above 0.
        weight_decay: refused unless 0 or decoupled. L2 added to the gradient cannot be deferred.
        amsgrad: normalise by the largest second moment so far.
        foreach: how torch steps parameters with dense gradients.
        maximize: step up the gradient instead of down.
        capturable: refused if True.
        differentiable: refused if True.
        fused: as ``foreach``; by default fused where that is safe.
        decoupled_weight_decay: shrink the weights themselves, as ``DeferredAdamW`` does.
        allow_stale: if a gradient's rows were not up to date when they were read, let them catch up inside the step
            instead of raising ``StaleRowsError``. Those gradients belong to weights that lack the momentum (and
            weight decay) of the steps the row has waited, so the run is no longer dense Adam's, though close to it if
            rows recur often.
        second_moment: what tables keep of squared gradients: ``"element"`` one number per weight, ``"row"`` one per
            row, their mean. With ``"row"`` and ``betas=(0, beta2)``, no first moment is kept. The result is that of
            the same rule applied to every row at every step. See ``docs/memory.md``.
        state_dtype: the dtype of what tables keep per weight; by default the parameter's. 16 bits are rounded up or
            down at random, so that small changes are not lost. What is kept per row is at least float32.
        stochastic_rounding: round weights of 16 bits at random as well.
        seed: seed for stochastic rounding. The same seed gives the same numbers, for any number of threads.

    Examples:
        >>> import torch
        >>> from rowstep import DeferredAdam
        >>> def trained(make, sparse):
        ...     torch.manual_seed(0)
        ...     table = torch.nn.Embedding(50, 4, sparse=sparse, dtype=torch.float64)
        ...     optimizer = make(table.parameters())
        ...     for _ in range(30):
        ...         optimizer.zero_grad()
        ...         table(torch.randint(0, 50, (8,))).square().sum().backward()
        ...         optimizer.step()
        ...     return table.weight.detach()
        >>> dense = trained(torch.optim.Adam, sparse=False)
        >>> torch.allclose(trained(DeferredAdam, sparse=True), dense, rtol=0, atol=1e-13)
        True
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        allow_stale: bool = False,
        second_moment: str = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.allow_stale = allow_stale
        self._begin_deferrals()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "second_moment": second_moment,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)

    def _begin_deferrals(self) -> None:
        self._deferrals = Deferrals(weakref.ref(self))
        self._backend = _backends.in_plain_torch
        """What made the last step, and brings rows up to date that are read; to choose anew takes 2 µs."""

    def __del__(self) -> None:
        """A model may outlive its optimizer: whatever rows still wait then are brought up to date."""
        if not sys.is_finalizing():
            flush_orphans(vars(self).get("_deferrals", {}))

    _zero_allowed = True  # for lr and eps, as torch's Adam has it

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        super()._check_group(group, where)
        if group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            raise ValueError(
                f"Invalid weight_decay value: {group['weight_decay']}{where}; expected 0, because L2 added to the "
                "gradient cannot be deferred: both moments would depend on the weight. Use DeferredAdamW, which decays "
                "the weight itself"
            )
        beta1, beta2 = group["betas"]
        check_betas(float(beta1), float(beta2), amsgrad=group["amsgrad"], where=where)
        _check_decay(group, where)

    # Reading

    def catch_up(self, param: Tensor, ids: Tensor) -> None:
        """Bring some rows of ``param`` up to date, before a read that cannot be seen.

        Args:
            param: a parameter of this optimizer.
            ids: row numbers of any shape, or a boolean mask over all rows.

        Examples:
            >>> import torch
            >>> from rowstep import DeferredAdam
            >>> table = torch.nn.Embedding(10, 2, sparse=True)
            >>> optimizer = DeferredAdam(table.parameters())
            >>> alias = table.weight.data  # made before the step, so its reads are not seen
            >>> table(torch.tensor([1])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.catch_up(table.weight, torch.tensor([4, 7]))
            >>> vectors = alias[[4, 7]]
        """
        group = self._group_of(param)
        if is_faked(ids):
            return
        with self._lock:
            plainly(self._catch_up, param, ids, group)

    def _catch_up(self, param: Tensor, ids: Tensor, group: Group) -> None:
        self._finish_step()
        rows = _numbers_of(ids, param)
        deferral, state, backend = self._deferrals.get(param), self.state.get(param), self._backend
        if deferral is not None:
            deferral.refuse_writes()
        if deferral is not None and deferral.is_under(state, param.dtype, options_of(group)):
            outside = deferral.catch_up(rows, backend)
        else:
            outside = backend.first_outside(rows, _row_count(param))
            if outside is None and deferral is not None:
                self._deferrals.end(param, state, backend)
        if outside is not None:
            raise IndexError(f"id {outside} is outside the table; expected 0 <= id < {_row_count(param)}")

    def flush(self, param: Tensor | None = None) -> None:
        """Bring every row of ``param``, or of all parameters, up to date. Whatever was written to them is accepted.

        Args:
            param: a parameter of this optimizer; by default all of them.

        Examples:
            >>> import torch
            >>> from rowstep import DeferredAdamW
            >>> table = torch.nn.Embedding(10, 2, sparse=True)
            >>> optimizer = DeferredAdamW(table.parameters())
            >>> table(torch.tensor([1])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.flush()
            >>> type(table.weight)  # no row waits: a plain Parameter again
            <class 'torch.nn.parameter.Parameter'>
        """
        if param is not None:
            self._group_of(param)
        with self._lock:
            self._flush(list(self._deferrals) if param is None else [param])

    def _settle(self, params: Iterable[Tensor]) -> None:
        """Flush, unless somebody has written to a table behind our back."""
        params = list(params)
        for param in params:
            if param in self._deferrals:
                plainly(self._deferrals[param].refuse_writes)
        self._flush(params)

    def _flush(self, params: Sequence[Tensor]) -> None:
        self._finish_step()
        backend = _backends.chosen()
        for param in params:
            deferral = self._deferrals.going_on(param, self.state.get(param), self._find_group(param), backend)
            if deferral is not None:
                deferral.flush(backend)

    def _bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> bool:
        """Called before a waiting table is touched: by a lookup of ``ids``, ``plainly``, or as a whole if that is None.

        Invalid ids are left to the lookup itself, which has its own error message for them; then this returns False.
        """
        group = self._find_group(param)
        with self._lock:
            if ids is None or group is None:
                self._settle([param])
            elif not is_faked(ids):
                try:
                    self._catch_up(param, ids, group)
                except (IndexError, TypeError):
                    return False
        return True

    def _accept_writes(self, param: Tensor) -> None:
        """Called when a lookup has written to the rows that it has read, as one with ``max_norm`` does."""
        deferral = self._deferrals.get(param)
        if deferral is not None:
            deferral.accept_writes()

    # Stepping

    def _check_rate(self, group: Group, where: str) -> None:
        check_learning_rate(group["lr"], zero_allowed=True, where=where)

    def _check_again(self, group: Group, where: str) -> None:
        super()._check_again(group, where)
        _check_decay(group, where)  # for the lr of this step

    def _plans(self, backend: Backend) -> list[Plan]:
        plans = super()._plans(backend)
        # Those whose rows have not been waiting: something may have been done to their memory.
        begin = {id(step.param) for plan in plans for step in plan.rows if not isinstance(step.param, Waiting)}
        if begin:
            refuse_shared_weights(self.param_groups, begin)
        return plans

    def _plan_parameter(
        self, plan: Plan, param: Tensor, grad: Tensor, state: State, taken: int, backend: Backend
    ) -> None:
        deferral = self._deferrals.get(param)
        at = admit_state(param, state) if deferral is None else deferral.where(state)
        moment = state.get("exp_avg", grad)
        gradient = rows_of_first_dimension(grad, param.dtype, moment.dtype) if grad.is_sparse else None
        in_a_table = gradient is not None or is_kept_as_a_table(state, plan.group, param)
        if gradient is None and (in_a_table or (plan.group["stochastic_rounding"] and param.dtype.itemsize == 2)):
            gradient = all_rows(grad, tuple(param.shape[:1]))  # torch's Adam cannot take these
        if gradient is None and moment.dtype != grad.dtype:  # torch's Adam would find out in the middle of its step
            raise TypeError(f"the gradient has dtype {grad.dtype}; expected {moment.dtype}, the dtype of its state")
        if gradient is not None and float(plan.group["eps"]) == 0:
            raise ValueError(
                "eps is 0; expected a number above 0 for sparse gradients, because dense Adam would divide 0 by 0 in "
                "every row that has had no gradient yet"
            )
        count, notes = plan.count_after(param, taken), None
        if deferral is not None and deferral.lead == param.shape[:1]:
            deferral.refuse_writes()
            notes = deferral.notes_for(count)
            self._look_at(grad, gradient if grad.is_sparse else None, notes, deferral, backend)
        elif gradient is not None:
            refuse_outside(gradient, backend)
        deferral = self._deferrals.going_on(param, self.state.get(param), plan.group, backend, taken)
        if gradient is None:
            plan.dense.append(DenseStep(param, grad))
            return
        step = RowStep(param, gradient, plan.scalars(count, True, param, in_a_table=in_a_table), count)
        if deferral is not None:
            step.update = admit(param, state, gradient, at, step.scalars, notes, count)
        plan.rows.append(step)

    def _look_at(
        self, grad: Tensor, gradient: RowGradient | None, notes: Notes, deferral: Deferral, backend: Backend
    ) -> None:
        """Raise if the gradient names a row that is not in the table, or one that was stale when it was read."""
        if gradient is None and self.allow_stale:
            return
        gradient = gradient or nonzero_rows(grad)
        outside, stale = backend.look_at(gradient, notes, deferral.schedule.step)
        if outside is not None:
            raise IndexError(outside_message(outside, deferral.row_count))
        if stale and not self.allow_stale and not is_averaged(deferral.param):
            raise StaleRowsError(
                f"{stale} of the gradient's {len(gradient.rows)} rows were not up to date when they were read; "
                f"expected every row to be up to date. {_WAYS_OUT}"
            )

    def _begin_rows(self, step: RowStep, group: Group) -> RowUpdate:
        param, state = step.param, self.state[step.param]
        self._forget_strangers()
        has_history = "exp_avg" in state
        self._convert(step, group, step.gradient.lead)
        if has_history and step.scalars.kept.amsgrad:
            raise_maximum(state, float(group["betas"][1]))
        deferral = self._deferrals.begin(
            param, state, step.gradient.lead, step.count - 1, group, step.scalars.kept
        )  # fmt: skip
        at, notes = admit_state(param, state), deferral.notes_for(step.count)
        return admit(param, state, step.gradient, at, step.scalars, notes, step.count)

    def _prepare(self, updates: Sequence[RowUpdate], backend: Backend) -> None:
        for update in updates:
            deferral = self._deferrals[update.param]
            deferral.watch()  # before anything can wait
            # A gradient of all rows came dense: what it does not concern may wait still.
            names_all = len(update.gradient.rows) >= deferral.row_count
            if names_all or self.allow_stale or is_averaged(update.param):
                deferral.catch_up(update.gradient.rows, backend)

    def _forget_strangers(self) -> None:
        """Settle and let go of tables that are in no group any more, as one that was replaced by a longer one."""
        for param in [param for param in self._deferrals if self._find_group(param) is None]:
            self._deferrals.end(param, self.state.get(param), _backends.chosen())
            self._places.pop(param, None)

    def _counter(self, updates: Sequence[RowUpdate], group: Group, backend: Backend) -> Callable[[Outcome], None]:
        rate, self._backend = _rate(group), backend
        deferrals = [self._deferrals[update.param] for update in updates]

        def count(outcome: Outcome) -> None:
            for deferral, update in zip(deferrals, updates, strict=True):
                deferral.watch()  # a signal's handler may have flushed in the meantime
                self._count(deferral, update.steps, rate, backend)

        return count

    def _count(self, deferral: Deferral, count: int, rate: Rate, backend: Backend) -> None:
        """Note that the parameter has taken its ``count``-th step; a second call changes nothing more."""
        deferral.advance(count, *rate, backend)
        set_count(deferral.state, count)

    def _step_dense(self, steps: list[DenseStep], group: Group, backend: Backend) -> None:
        deferrals = [self._deferrals[step.param] for step in steps if step.param in self._deferrals]
        for deferral in deferrals:
            deferral.flush(backend)
        rate = _rate(group)

        def count() -> None:
            for deferral in deferrals:
                if int(deferral.state["step"]) > deferral.step:
                    deferral.all_stepped()
                    self._count(deferral, deferral.step + 1, rate, backend)

        super_step = super()._step_dense
        self._and_finish(lambda: super_step(steps, group, backend), count)

    def _operate(self, param: Tensor, change: Callable[[State], None]) -> None:
        self._group_of(param)
        with self._lock:
            self._settle([param])
            self._deferrals.drop(param)  # no row waits any more, and the next step begins another
            super()._operate(param, change)

    # Copies and checkpoints

    def state_dict(self) -> StateDict:
        """Flush, and return a state dict that torch.optim.Adam (or AdamW) and this class can load."""
        with self._lock:
            self._settle(self._deferrals)
            return super().state_dict()

    def _loaded(self, given: StateDict) -> None:
        backend = _backends.chosen()
        for param in list(self._deferrals):
            self._deferrals.end(param, self.state.get(param), backend)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._settle(self._deferrals)
            return super().__getstate__() | {"allow_stale": self.allow_stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "allow_stale" in state:  # a copy or an unpickled optimizer, not a loaded state dict
            self._begin_deferrals()


class DeferredAdamW(DeferredAdam):
    """torch.optim.AdamW, at the cost of the rows touched: ``DeferredAdam`` with decoupled weight decay.

    Weight decay applies to every row at every step, even to rows that are never touched, as in dense AdamW. At every
    step, dense AdamW first does

        p ← p · (1 - lr · weight_decay)

    and then Adam's update. A row that has waited takes all of it at once, as under ``DeferredAdam``.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; or a module, for its parameters.
        lr: learning rate; lr · weight_decay must be below 1.
        betas: decay rates of the two moments.
        eps: added to the bias-corrected √v.
        weight_decay: the share of a weight, times lr, that a step takes away.
        amsgrad: normalise by the largest second moment so far.
        maximize: step up the gradient instead of down.
        foreach: how torch steps parameters with dense gradients.
        capturable: refused if True.
        differentiable: refused if True.
        fused: as ``foreach``; by default fused where that is safe.
        decoupled_weight_decay: False makes it ``DeferredAdam``, which refuses a weight decay.
        allow_stale: let rows that were not up to date when they were read catch up inside the step.
        second_moment: ``"element"`` or ``"row"``.
        state_dtype: the dtype of what tables keep per weight.
        stochastic_rounding: round weights of 16 bits at random.
        seed: seed for stochastic rounding.

    Examples:
        >>> import torch
        >>> from rowstep import DeferredAdamW
        >>> table = torch.nn.Embedding(10, 2, sparse=True)
        >>> torch.nn.init.ones_(table.weight).shape
        torch.Size([10, 2])
        >>> optimizer = DeferredAdamW(table.parameters(), lr=0.1, weight_decay=0.5)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     table(torch.tensor([1])).sum().backward()
        ...     optimizer.step()
        >>> table.weight[9]  # never touched: 0.95 ** 3
        tensor([0.8574, 0.8574], grad_fn=<SelectBackward0>)
    """

    _own_when_loading = (*DeferredAdam._own_when_loading, "decoupled_weight_decay")  # torch's Adam saves it as False

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        allow_stale: bool = False,
        second_moment: str = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            allow_stale=allow_stale,
            second_moment=second_moment,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )


def _row_count(param: Tensor) -> int:
    return math.prod(param.shape[:1])


def _numbers_of(ids: Tensor, param: Tensor) -> Tensor:
    """Row numbers from ids of any shape, or from a mask over all rows."""
    if type(ids) is Tensor and ids.dtype is torch.int64 and ids.is_cpu and param.is_cpu:  # by far the most frequent
        return ids if ids.dim() == 1 and ids.is_contiguous() else ids.reshape(-1).contiguous()
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        found = f"has dtype {ids.dtype}" if isinstance(ids, Tensor) else f"is a {type(ids).__name__}"
        raise TypeError(f"ids {found}; expected an integer tensor or a boolean mask")
    numbers = ids.detach().reshape(-1)
    if numbers.dtype == torch.bool:
        if len(numbers) != _row_count(param):
            raise ValueError(f"the mask has {len(numbers)} entries; expected {_row_count(param)}, one per row")
        numbers = numbers.nonzero().view(-1)
    return numbers.to(device=param.device, dtype=torch.int64).contiguous()


def _rate(group: Group) -> Rate:
    """What a step is counted with, even if it is counted late: a schedule may have changed the group by then."""
    lr = group["lr"]
    return lr.clone() if isinstance(lr, Tensor) else lr, float(group["weight_decay"])


def _check_decay(group: Mapping[str, Any], where: str) -> None:
    # In the lr's own dtype, as the step will compute it.
    decay = group["lr"] * float(group["weight_decay"])
    if float(1 - decay) <= 0:
        raise ValueError(
            f"lr * weight_decay is {float(decay)}{where}; expected less than 1, so that weights keep their sign. "
            "Use a smaller lr or weight_decay"
        )
