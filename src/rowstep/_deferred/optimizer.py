"""DeferredAdam and DeferredAdamW: torch.optim.Adam and AdamW, with the rows of tables taken when they are read."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT, StateDict
from torch.utils._python_dispatch import _disable_current_modes

from .. import _backends
from .._backends import Backend, Outcome, admit, admit_state, reference
from .._gradient import by_first_dimension, outside_message, rows_of_first_dimension
from .._optimizer import Group, RowOptimizer, Rows
from .._options import check_learning_rate
from .._rule import row_rule
from .._schedule import check_betas
from .._state import State, compute_dtype, count_tensor, ensure_moments, lasting, set_count
from .attach import attach, reads_rows, tables_of
from .table import Options, StaleRowsError, Table, is_only_traced

# A step's lr and weight decay.
Rate = tuple[float | Tensor, float]

_WAYS_OUT = (
    "read them through an nn.Embedding or nn.EmbeddingBag that is attached to this optimizer (give it the model, or "
    "call opt.attach(module)), or call opt.catch_up(param, ids) before you read them; "
    "with opt.up_to_date(param) the whole table can be read"
)


class DeferredAdam(RowOptimizer):
    r"""torch.optim.Adam, at the cost of the rows touched.

    The weights that a forward pass reads, and the flushed table, are those that :class:`torch.optim.Adam` would have
    after the same steps with dense gradients. Rows without a gradient wait, and catch up in one update before they are
    read. Parameters with dense gradients step exactly as in torch. See ``docs/deferred.md``.

    Args:
        params: a module, whose Embedding and EmbeddingBag children are attached; or parameters or groups, as for any
            torch optimizer. In that case, call :meth:`attach` with the modules that read them.
        lr: learning rate, a number or a one-element Tensor. Any schedule works, even one that changes at every step.
        betas: decay rates of the two moments; beta1 must be below sqrt(beta2).
        eps: added to the bias-corrected :math:`\sqrt{v}`.
        amsgrad: normalise by the largest second moment so far.
        maximize: step up the gradient instead of down.
        allow_stale: if a gradient's rows were not up to date when they were read, let them catch up inside the step
            instead of raising :class:`StaleRowsError`. Those gradients belong to weights that lack the momentum (and
            weight decay) of the steps the row has waited, so the run is no longer dense Adam's, though close to it if
            rows recur often.
        weight_decay: refused unless 0 or decoupled. L2 added to the gradient cannot be deferred.
        decoupled_weight_decay: shrink the weights themselves, as :class:`DeferredAdamW` does.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        allow_stale: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        options = {"amsgrad": amsgrad, "maximize": maximize} | decay
        self._construct(params, {"lr": lr, "betas": betas, "eps": eps} | options, allow_stale)

    def _construct(self, params: ParamsT | nn.Module, defaults: dict[str, Any], allow_stale: bool) -> None:
        self.allow_stale = allow_stale
        self._attached: list[nn.Module] = []
        self._begin_tables()
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        if isinstance(params, nn.Module):
            self._attach_all(params)

    def _begin_tables(self) -> None:
        self._tables: dict[Tensor, Table] = {}
        self._kept_current: Counter[Tensor] = Counter()
        """How many ``up_to_date`` blocks want a parameter current at all times."""
        # A model may outlive its optimizer: whatever rows still wait then are brought up to date.
        weakref.finalize(self, _flush_orphans, self._tables).atexit = False

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        super()._check_group(group, where)
        if group["weight_decay"] != 0 and not group["decoupled_weight_decay"]:
            raise ValueError(
                f"Invalid weight_decay value: {group['weight_decay']}{where}; L2 folded into the gradient cannot be "
                "deferred, because both moments then depend on the weight; use DeferredAdamW, which decays the weight "
                "itself as AdamW does"
            )
        beta1, beta2 = group["betas"]
        check_betas(float(beta1), float(beta2), amsgrad=group["amsgrad"], where=where)
        _check_decay(group, where)

    # Reading

    def attach(self, module: nn.Module) -> None:
        """Bring rows up to date before each lookup of the Embedding and EmbeddingBag modules in ``module``."""
        if not self._attach_all(module):
            raise ValueError(
                f"{type(module).__name__} has no Embedding or EmbeddingBag whose weight this optimizer has; "
                "for other reads call opt.catch_up(param, ids)"
            )

    def _attach_all(self, module: nn.Module) -> bool:
        owned = {param for group in self.param_groups for param in group["params"]}
        found = False
        for child in module.modules():
            if reads_rows(child) and not owned.isdisjoint(tables_of(child)):
                found = True
                attach(child, self)
                if not any(child is other for other in self._attached):
                    self._attached.append(child)
        return found

    @torch.no_grad()
    def catch_up(self, param: Tensor, ids: Tensor) -> None:
        """Bring the rows ``ids`` of ``param`` up to date, before a read that does not go through an attached module."""
        self._group_of(param)
        if is_only_traced(ids):
            return
        with self._lock:
            self._finish_step()
            backend = _backends.chosen()
            row_count = math.prod(param.shape[:1])
            rows = _numbers_of(ids, row_count).to(device=param.device, dtype=torch.int64).contiguous()
            outside = backend.first_outside(rows, row_count)
            if outside is not None:
                raise IndexError(outside_message(outside, row_count).replace("the gradient has index", "ids has"))
            table = self._table_of(param, backend)
            if table is not None:
                table.catch_up(rows, backend)

    @torch.no_grad()
    def flush(self, param: Tensor | None = None) -> None:
        """Bring every row of ``param``, or of all parameters, up to date."""
        if param is not None:
            self._group_of(param)
        with self._lock:
            self._finish_step()
            backend = _backends.chosen()
            for each in list(self._tables) if param is None else [param]:
                table = self._table_of(each, backend)
                if table is not None:
                    table.flush(backend)

    @contextlib.contextmanager
    def up_to_date(self, param: Tensor) -> Iterator[Tensor]:
        """Keep every row of ``param`` up to date inside the block, even after a step: for reads of a whole table."""
        with self._lock:  # no step of another thread in between
            self.flush(param)
            self._kept_current[param] += 1
        try:
            yield param
        finally:
            with self._lock:
                self._kept_current[param] -= 1

    def bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> None:
        """Called by attached modules before they read: like :meth:`catch_up` or :meth:`flush`.

        Invalid ids are left to the lookup itself, which has its own error message for them.
        """
        if param not in self._tables:
            return
        if ids is None:
            self.flush(param)
        else:
            with contextlib.suppress(IndexError, TypeError):
                self.catch_up(param, ids)

    # Stepping

    def _check_rate(self, group: Group, where: str) -> None:
        check_learning_rate(group["lr"], zero_allowed=True, where=where)

    def _check_again(self, group: Group, where: str) -> None:
        super()._check_again(group, where)
        _check_decay(group, where)  # for the lr of this step

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, group: Group) -> Rows | None:
        if not grad.is_sparse:
            return None
        dtype = compute_dtype(param.dtype, state["exp_avg"].dtype if "exp_avg" in state else param.dtype, grad.dtype)
        return Rows(param, rows_of_first_dimension(grad, dtype))

    def _check_gradient(self, param: Tensor, grad: Tensor, item: Rows | None, group: Group, backend: Backend) -> None:
        moment = self.state.get(param, {}).get("exp_avg", grad)
        if item is None and moment.dtype != grad.dtype:  # torch's Adam would find out in the middle of its step
            raise TypeError(f"the gradient has dtype {grad.dtype}; expected that of its state, {moment.dtype}")
        waiting = self._tables.get(param)
        if waiting is not None and not self.allow_stale and waiting.lead == param.shape[:1]:
            _check_up_to_date(waiting, grad, item, backend)
        table = self._table_of(param, backend)
        if table is not None and int(table.state["step"]) != table.step:
            # Somebody has set the count: what waits ends with the old one, and this step goes on from the new.
            table.flush(backend)
            del self._tables[param]

    def _step_rows(self, item: Rows, group: Group, backend: Backend) -> None:
        param, gradient = item.param, item.gradient
        table = self._tables.get(param) or self._make_table(param, gradient.lead)  # the first half has looked at it
        if self.allow_stale:
            table.catch_up(gradient.rows, backend)
        step, rate = table.step + 1, _rate(group)
        operands = item.operands
        if operands is None:
            at = admit_state(param, table.state)
            operands = admit(param, table.state, gradient, at, amsgrad=group["amsgrad"], counted=False)

        def update(outcome: Outcome) -> None:
            rule = row_rule(
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                step=step,
                maximize=group["maximize"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=True,
                amsgrad=group["amsgrad"],
                per_row=False,
                as_dense=True,
                skip_nonfinite=False,
            )
            backend.update(operands, rule, outcome)

        def count(outcome: Outcome) -> None:
            self._count(table, step, gradient.rows, rate, backend)

        self._whole_or_not_at_all(update, count, is_empty=gradient.is_empty)

    def _count(self, table: Table, step: int, rows: Tensor | None, rate: Rate, backend: Backend) -> None:
        """Note that the parameter has taken its ``step``-th step; a second call changes nothing more."""
        table.advance(step, rows, *rate, backend)
        set_count(table.state, step)
        if self._kept_current[table.param]:
            table.flush(backend)

    def _step_dense(self, items: list[tuple[Tensor, Tensor]], group: Group, backend: Backend) -> None:
        tables = [self._tables[param] for param, _ in items if param in self._tables]
        for table in tables:
            table.flush(backend)
        rate = _rate(group)

        def count() -> None:
            for table in tables:
                if int(table.state["step"]) > table.step:
                    self._count(table, table.step + 1, None, rate, backend)

        self._unfinished = count
        try:
            super()._step_dense(items, group, backend)
            count()
        except BaseException:
            count()
            self._unfinished = None
            raise
        self._unfinished = None

    def _make_table(self, param: Tensor, lead: tuple[int, ...]) -> Table:
        """Begin to defer: every row is up to date now, with the steps that the parameter has taken so far."""
        group, state = self._group_of(param), self.state[param]
        with lasting():
            _ensure_maximum(state, param, group)
            if not isinstance(state["step"], Tensor):
                state["step"] = count_tensor(state["step"])
            table = self._tables[param] = Table(param, state, lead, _options(group), int(state["step"]))
        return table

    def _table_of(self, param: Tensor, backend: Backend) -> Table | None:
        """The table of this parameter, if rows may wait under the state, the options and the dtype it has now."""
        table = self._tables.get(param)
        if table is None:
            return None
        if not table.is_of(self.state.get(param)):
            # The state, or something in it, was cleared or replaced by hand. What waits, waits under the old one; of a
            # table that has other rows now, nothing does.
            if param.shape[:1] == table.lead:
                table.flush(backend)
        elif (
            table.is_full
            or table.dtype != param.dtype
            or (group := self._find_group(param)) is None
            or table.options != _options(group)
        ):
            table.flush(backend)
        else:
            return table
        del self._tables[param]
        return None

    def _operate(self, param: Tensor, change: Callable[[State], None]) -> None:
        self._group_of(param)
        with self._lock:
            self.flush(param)
            self._tables.pop(param, None)  # no row waits any more, and the next step begins another
            super()._operate(param, change)

    # Copies and checkpoints

    def state_dict(self) -> StateDict:
        """Flush, and return a state dict that torch.optim.Adam (or AdamW) and this class can load."""
        with self._lock:
            self.flush()
            return super().state_dict()

    def _loaded(self, given: StateDict) -> None:
        backend = _backends.chosen()
        for param in list(self._tables):
            self._table_of(param, backend)  # what waits under the state from before is settled, whatever was loaded
        self._tables.clear()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self.flush()
            return super().__getstate__() | {"allow_stale": self.allow_stale, "_attached": self._attached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_attached" in state:  # a copy or an unpickled optimizer, not a loaded state dict
            self._begin_tables()
            for module in self._attached:
                attach(module, self)


class DeferredAdamW(DeferredAdam):
    r"""torch.optim.AdamW, at the cost of the rows touched: :class:`DeferredAdam` with decoupled weight decay.

    Weight decay applies to every row at every step, even to rows that are never touched, as in dense AdamW.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        allow_stale: bool = False,
        decoupled_weight_decay: bool = True,
    ) -> None:
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        options = {"amsgrad": amsgrad, "maximize": maximize}
        self._construct(params, {"lr": lr, "betas": betas, "eps": eps} | decay | options, allow_stale)


@torch.no_grad()
def _flush_orphans(tables: Mapping[Tensor, Table]) -> None:
    """Bring up to date what a dropped optimizer leaves behind.

    Garbage collection calls this, in the middle of anything: of a compilation, of a launch, of a trace. So it waits for
    no lock and compiles nothing, and takes the reference, in plain torch operations.
    """
    with _disable_current_modes():
        for table in tables.values():
            with contextlib.suppress(ValueError):  # the table was replaced by another: nothing waits in that one
                table.flush(reference)


def _check_up_to_date(table: Table, grad: Tensor, item: Rows | None, backend: Backend) -> None:
    rows = item.gradient.rows if item is not None else by_first_dimension(grad).ne(0).any(dim=1).nonzero().view(-1)
    stale = table.count_stale(rows, backend)
    if stale:
        raise StaleRowsError(
            f"{stale} of the gradient's {len(rows)} rows were not up to date when they were read; {_WAYS_OUT}"
        )


def _ensure_maximum(state: State, param: Tensor, group: Group) -> None:
    """Moments for this parameter; with amsgrad, the maximum is what it will be at the next step even without gradients.

    Of rows that wait it must not change any more, and it would if amsgrad had been off while the moments grew.
    """
    has_history = "exp_avg" in state
    ensure_moments(state, param, amsgrad=group["amsgrad"])
    if group["amsgrad"] and has_history:
        largest = state["max_exp_avg_sq"]
        torch.maximum(largest, state["exp_avg_sq"] * group["betas"][1], out=largest)


def _numbers_of(ids: Tensor, row_count: int) -> Tensor:
    """Row numbers from ids of any shape, or from a mask over all rows."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids are {found}; expected a tensor of integers, or a mask of booleans")
    ids = ids.detach().reshape(-1)
    if ids.dtype != torch.bool:
        return ids
    if len(ids) != row_count:
        raise ValueError(f"the mask has {len(ids)} entries; expected one for each of the {row_count} rows")
    return ids.nonzero().view(-1)


def _options(group: Group) -> Options:
    beta1, beta2 = group["betas"]
    return (float(beta1), float(beta2)), group["eps"], group["amsgrad"]


def _rate(group: Group) -> Rate:
    """What a step is counted with, even if it is counted late: a schedule may have changed the group by then."""
    lr = group["lr"]
    return lr.clone() if isinstance(lr, Tensor) else lr, group["weight_decay"]


def _check_decay(group: Mapping[str, Any], where: str) -> None:
    decay = float(group["lr"]) * group["weight_decay"]
    if decay >= 1:
        raise ValueError(
            f"lr * weight_decay is {decay}{where}; deferred steps need it below 1, so that a weight is not negated"
        )
