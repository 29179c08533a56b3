"""DeferredAdam and DeferredAdamW: torch.optim.Adam and AdamW, with the rows of tables taken when they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict

from .. import _backends
from .._commit import is_averaged
from .._gradient import RowGradient, all_rows, nonzero_rows, rows_of_first_dimension
from .._ids import check_inside, numbers_of
from .._memory import is_in_file
from .._optimizer import RowOptimizer
from .._options import rate_of, refuse_shared_weights
from .._rule import Rule
from .._schedule import check_betas
from .._state import State, StateSpec, misfit
from .._table import Job, Table
from .._torch_internals import is_faked, without_torch_function
from .deferral import Deferral, StaleRowsError, begin, flush_orphans, raise_maximum

_WAYS_OUT = (
    "They were read before the last step, or in a way that cannot be seen (through an alias made earlier, a scripted "
    "module, a functorch transform). Run the backward pass before the next step, or call opt.catch_up(param, ids) or "
    "opt.flush(param) before such a read. DistributedDataParallel's gradients name rows that other ranks have read: "
    "wrap the model by rowstep.distributed.ddp, or pass allow_stale=True"
)


def _stale_message(stale: int, count: int) -> str:
    return (
        f"{stale} of the gradient's {count} rows were not up to date when they were read; expected every row to be up "
        f"to date. {_WAYS_OUT}"
    )


def _l2_message(weight_decay: float) -> str:
    return (
        f"weight_decay={weight_decay} adds L2 to a gradient that is taken row by row; expected 0, because L2 cannot be "
        "deferred: both moments would depend on the weight. Use weight_decay=0 for tables, in a group of their own; "
        "DeferredAdamW, which decays the weights themselves; or "
        f"SparseAdam(weight_decay={weight_decay}), which decays only the rows touched"
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
        params: parameters, named parameters or groups, as for any torch optimizer; or a module, for its
            ``named_parameters()``. Errors then name the parameter.
        lr: learning rate, a number or a one-element Tensor. Any schedule works, even one that changes at every step.
        betas: decay rates β₁ and β₂ of the two moments; β₁ must be below √β₂.
        eps: ε, added to the bias-corrected √v; above 0, or rows without a gradient would divide 0 by 0.
        weight_decay: L2 penalty added to the gradient, which has to be dense: a sparse one that meets it is refused,
            because L2 cannot be deferred. Give tables a group with 0, or use ``DeferredAdamW``.
        amsgrad: normalise by the largest second moment so far.
        foreach: use torch's foreach implementation for dense gradients.
        maximize: step up the gradient instead of down.
        capturable: refused if True.
        differentiable: refused if True.
        fused: use torch's fused kernel for dense gradients; by default where that is safe.
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
        stochastic_rounding: round weights of 16 bits at random as well, and with them their moments, unless those
            are wider.
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
        second_moment: Literal["element", "row"] = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.allow_stale = allow_stale
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay, "second_moment": second_moment,
            "state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding, "seed": seed,
            "foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __del__(self) -> None:
        """A model may outlive its optimizer: whatever rows still wait then are brought up to date."""
        if not sys.is_finalizing():
            flush_orphans(self._all_pending() if "_tables" in vars(self) else [])

    _zero_allowed = True  # as torch's Adam has it
    _defers = True

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        super()._check_group(group, where)
        beta1, beta2 = group["betas"]
        check_betas(float(beta1), float(beta2), amsgrad=group["amsgrad"], where=where)
        if group["decoupled_weight_decay"]:
            _check_decay(group["lr"], float(group["weight_decay"]), where)

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
        self._group_of(param)
        if is_faked(ids):
            return
        with self._lock:
            rows = without_torch_function(numbers_of, ids, param)
            pending = self._pending(param)
            if pending is not None:
                without_torch_function(pending.refuse_writes)
                if without_torch_function(pending.catch_up, rows):
                    return
        check_inside(rows, param)

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
            for pending in self._all_pending() if param is None else [self._pending(param)]:
                if pending is not None:
                    pending.flush()

    def _pending(self, param: Tensor) -> Deferral | None:
        """What the rows of this parameter wait for."""
        table = self._tables.get(id(param))
        return None if table is None else table.pending

    def _all_pending(self) -> list[Deferral]:
        return [table.pending for table in self._tables.values() if table.pending is not None]

    def _settle(self, all_pending: Iterable[Deferral]) -> None:
        """Flush, unless somebody has written to a table behind our back."""
        for pending in all_pending:
            without_torch_function(pending.refuse_writes)
        for pending in all_pending:
            pending.flush()

    def _end(self, pending: Deferral) -> None:
        """Bring every row up to date, under what it has waited under, and defer no more.

        If the state, or something in it, was cleared or replaced by hand, and the table has other rows now, none waits.
        """
        table = pending.table
        state = self.state.get(table.param, {})
        has_its_state = all(state.get(name) is slot for name, slot in table.slots.items())
        if has_its_state or table.param.shape[:1] == table.lead:
            pending.flush()
        self._drop(pending)

    def _drop(self, pending: Deferral) -> None:
        """Defer no more, whatever waits."""
        self._tables.pop(id(pending.table.param), None)
        pending.release()

    def _bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> bool:
        """Called before a waiting table is touched: by a lookup of ``ids``, or as a whole if that is None.

        A lookup calls this ``without_torch_function``. Invalid ids are left to the lookup itself, which has its own
        error message for them; then nothing happens, and this returns False.
        """
        with self._lock:
            table = self._tables.get(id(param))
            pending = None if table is None else table.pending
            if pending is None:
                return True
            if ids is None:
                self._settle([pending])
                return True
            if is_faked(ids):
                return True
            pending.refuse_writes()
            try:
                return bool(pending.catch_up(numbers_of(ids, param)))
            except TypeError:
                return False

    def _catch_up_announced(self, param: Tensor, rows: Tensor) -> None:
        pending = self._pending(param)
        if pending is not None:
            with self._bare_lock:
                pending.refuse_writes()
                pending.catch_up(rows)

    def _accept_writes(self, param: Tensor) -> None:
        """Called when a lookup has written to the rows that it has read, as one with ``max_norm`` does."""
        pending = self._pending(param)
        if pending is not None:
            pending.accept_writes()

    # Stepping

    def _check_rate(self, lr: Any, rule: Rule, where: str) -> None:
        if rule.is_decoupled:
            _check_decay(lr, rule.weight_decay, where)

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, rule: Rule) -> tuple[RowGradient | None, bool, bool]:
        dtype = getattr(state.get("exp_avg"), "dtype", grad.dtype)
        in_a_table = grad.is_sparse or rule.spec.holds_table_state(state, param)
        if in_a_table or rule.rounds_weights_of(param.dtype):  # torch's Adam cannot take these
            if rule.adds_decay:
                raise ValueError(_l2_message(rule.weight_decay))
            rows = rows_of_first_dimension(grad, param.dtype, dtype) if grad.is_sparse else all_rows(grad)
            return rows, True, in_a_table
        if dtype != grad.dtype:  # torch's Adam would find out in the middle of its step
            way_out = "Load the state again, opt.load_state_dict(opt.state_dict()), or create the optimizer anew"
            raise TypeError(
                f"the gradient has dtype {grad.dtype}; expected {dtype}, the dtype of its state. "
                + (way_out if grad.dtype == param.dtype else "Convert the gradient")
            )
        self._end_waiting(param, state)
        return None, True, False

    def _prepared(self, param: Tensor, state: State, spec: StateSpec) -> Table | None:
        self._end_waiting(param, state)
        return super()._prepared(param, state, spec)

    def _end_waiting(self, param: Tensor, state: State) -> None:
        """Bring a table up to date which the next step cannot leave waiting; raise if that step is going to fail."""
        pending = self._pending(param)
        if pending is not None:
            if reason := misfit(state, param):
                raise ValueError(reason)
            self._refuse_stale(pending)
            self._end(pending)

    def _prepare_waiting_rows(self, pending: Deferral, gradient: RowGradient) -> None:
        pending.refuse_writes()
        is_dense = not pending.table.param.grad.is_sparse  # type: ignore[union-attr]
        if is_dense:
            self._refuse_stale(pending)  # by the rows that are not 0; the others may wait still
        if is_dense or self.allow_stale or is_averaged(pending.table.param):
            pending.catch_up(gradient.rows)

    def _make_state(self, jobs: Sequence[Job]) -> None:
        # Something may have been done to their memory.
        waiting = [pending.table.param for pending in self._all_pending()]
        waiting += [job.param for job in jobs if job.gradient is not None]
        refuse_shared_weights(self.param_groups, set(map(id, waiting)))
        super()._make_state(jobs)
        for job in jobs:
            if job.gradient is None:
                continue
            begin(job.table, job.step.rule, job.step.count - 1, self._all_pending(), self._self)

    def _forget(self, table: Table) -> None:
        if table.pending is None:
            super()._forget(table)
        else:
            self._end(table.pending)

    def _flaw_of(self, job: Job) -> Exception:
        gradient, stale = job.gradient, job.table.pending.stale
        return _backends.outside(gradient) or StaleRowsError(_stale_message(stale(gradient.rows), gradient.count))

    def _stale_flaw(self, stale: int) -> Exception:
        return StaleRowsError(
            f"{stale} rows of an earlier step's gradient were not up to date when they were read, and did not take "
            f"it; expected every row to be up to date. {_WAYS_OUT}"
        )

    def _count(self, jobs: Sequence[Job]) -> None:
        all_pending: list[Deferral] = [job.table.pending for job in jobs]
        after = []
        for pending, job in zip(all_pending, jobs, strict=True):
            after.append(pending.schedule.advanced(job.step.rule.lr, job.step.rule.weight_decay, pending.table.kernels))
            if job.spec.amsgrad and not pending.has_waiting_rows:
                raise_maximum(job.table.state, job.step.rule.betas[1])
        for pending, schedule in zip(all_pending, after, strict=True):
            pending.count(schedule)

    def _after_launches(self, jobs: Sequence[Job], skipped: int) -> None:
        for job in jobs:  # of tables at work twice: right after the step, and when that has ended
            if job.table.pending.awaits_step:
                job.table.pending.accept_writes()
            if job.table.ahead is None or job.table.ahead.is_idle:
                job.table.pending.sweep()

    def _refuse_stale(self, pending: Deferral) -> None:
        """Raise if the gradient of a table that will not go on waiting names rows that were stale when they were read.

        Only if it still is the table whose rows have waited.
        """
        param, grad = pending.table.param, pending.table.param.grad
        if self.allow_stale or grad is None or param.shape[:1] != pending.table.lead:
            return
        pending.refuse_writes()
        rows = (rows_of_first_dimension(grad) if grad.is_sparse else nonzero_rows(grad)).rows
        rows = rows[(rows >= 0) & (rows < pending.table.row_count)]
        stale = 0 if is_averaged(param) else pending.stale(rows)
        if stale:
            raise StaleRowsError(_stale_message(stale, len(rows)))

    def _operate(self, param: Tensor, change: Callable[[State], None]) -> None:
        with self._lock:
            pending = self._pending(param)
            if pending is not None:
                self._settle([pending])
                self._drop(pending)  # no row waits any more, and the next step begins another
            super()._operate(param, change)

    # Copies and checkpoints

    def state_dict(self) -> StateDict:
        """Flush, and return a state dict that torch.optim.Adam (or AdamW) and this class can load."""
        with self._lock:
            self._settle(self._all_pending())
            return super().state_dict()

    def _write_to_files(self) -> None:
        self._settle([each for each in self._all_pending() if without_torch_function(is_in_file, each.table.param)])

    def _loaded(self, given: StateDict) -> None:
        for pending in self._all_pending():
            self._end(pending)
        super()._loaded(given)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._settle(self._all_pending())
            return super().__getstate__() | {"allow_stale": self.allow_stale}


class DeferredAdamW(DeferredAdam):
    """torch.optim.AdamW, at the cost of the rows touched: ``DeferredAdam`` with decoupled weight decay.

    Weight decay applies to every row at every step, even to rows that are never touched, as in dense AdamW. At every
    step, dense AdamW first does

        p ← p · (1 - lr · weight_decay)

    and then Adam's update. A row that has waited takes all of it at once, as under ``DeferredAdam``.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; or a module, for its
            ``named_parameters()``. Errors then name the parameter.
        lr: learning rate; lr · weight_decay must be below 1.
        betas: decay rates of the two moments.
        eps: added to the bias-corrected √v.
        weight_decay: the share of a weight, times lr, that a step takes away.
        amsgrad: normalise by the largest second moment so far.
        maximize: step up the gradient instead of down.
        foreach: use torch's foreach implementation for dense gradients.
        capturable: refused if True.
        differentiable: refused if True.
        fused: use torch's fused kernel for dense gradients; by default where that is safe.
        decoupled_weight_decay: False makes it ``DeferredAdam``, which refuses a weight decay of tables.
        allow_stale: let rows that were not up to date when they were read catch up inside the step.
        second_moment: ``"element"`` or ``"row"``.
        state_dtype: the dtype of what tables keep per weight.
        stochastic_rounding: round weights of 16 bits, and their moments of 16 bits, at random.
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
        second_moment: Literal["element", "row"] = "element",
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=decoupled_weight_decay,
            allow_stale=allow_stale, second_moment=second_moment, state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding, seed=seed,
        )  # fmt: skip


def _check_decay(lr: Any, weight_decay: float, where: str) -> None:
    if weight_decay == 0:
        return
    # In the lr's own dtype, as the step will compute it.
    decay = rate_of(lr) * weight_decay
    if float(1 - decay) <= 0:
        raise ValueError(
            f"lr * weight_decay is {float(decay)}{where}; expected less than 1, so that weights keep their sign. "
            "Use a smaller lr or weight_decay"
        )
