"""What every optimizer of this library does the same way: checks, the two halves of a step, dense gradients, loading.

A step first plans what to do with every gradient of every group, and raises if one cannot be taken. Only then it
applies the plans, so an error leaves every tensor as it was. An interrupt can strike later too: then each parameter has
taken its step whole or not at all, and the next step goes on from there.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from . import _backends, _dense, _part, _rows
from ._backends import Backend, Batch, Outcome, RowUpdate
from ._convert import convert, row_moment_flaw
from ._loading import (
    check_slots,
    check_states,
    check_structure,
    separate_counts,
    tidied,
    uncast_slots,
)
from ._options import (
    HOW_TORCH_STEPS,
    check_group,
    check_is_number,
    check_layouts,
    check_learning_rate,
    parameter_name,
    refuse_idle_rounding,
)
from ._plan import DenseStep, Group, Plan, RowStep, checked_gradient, steps_taken
from ._rows import Init
from ._rules.adam import kept_under
from ._state import State, allocate, ensure_moments, misfit
from ._torch_internals import optimizer_step, plainly
from ._waiting import take_over


class RowOptimizer(Optimizer):
    """An Adam that takes sparse gradients row by row.

    Subclasses say how, in ``_plan_parameter``, ``_begin_rows``, ``_counter`` and ``_step_dense``.
    """

    _zero_allowed = False
    """Whether lr and eps may be 0."""

    _own_when_loading: tuple[str, ...] = HOW_TORCH_STEPS
    """Options that a loaded state dict does not change."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        check_learning_rate(defaults["lr"], zero_allowed=self._zero_allowed)
        self._check_group(defaults, "")
        self._is_complete, self._options = False, tuple(defaults)
        self._begin()
        super().__init__(params, defaults)
        check_layouts(self.param_groups, type(self).__name__)
        self._is_complete = True
        self._allocate_for_shards()

    def _begin(self) -> None:
        # One thread at a time: a step, a catch-up and a flush write to the same rows. Re-entrant, because a signal
        # handler that saves a checkpoint may run in the middle of a step, in the same thread.
        self._lock = threading.RLock()
        self._unfinished: Callable[[], None] | None = None
        self._checked: dict[int, Sequence[Any]] = {}
        """Of each group, the options that were last found to be good, as the objects that they were."""
        self._places: dict[Tensor, tuple[int, int]] = {}
        """In which group parameters were found, and where in it: a search takes long where there are many."""

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise if these options cannot be honoured; ``where`` names the group."""
        check_group(group, where, zero_eps_allowed=self._zero_allowed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the same checks as the constructor. A refused group is not added.

        Args:
            param_group: its ``params``, and options that differ from the optimizer's own.
        """
        super().add_param_group(param_group)
        try:
            where = f" in group {len(self.param_groups) - 1}"
            check_learning_rate(self.param_groups[-1]["lr"], zero_allowed=True, where=where)
            self._check_group(self.param_groups[-1], where)
            refuse_idle_rounding(self.param_groups[-1], where)
            if self._is_complete:  # the constructor looks at all groups together, to name every parameter it refuses
                check_layouts(self.param_groups, type(self).__name__)
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_complete:
            self._allocate_for_shards()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @optimizer_step
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one step. Return the result of ``closure``, if given.

        Every gradient, option and state is checked before anything is written: an error changes nothing.

        Args:
            closure: computes the loss and its gradients anew, and returns the loss.

        Returns:
            What ``closure`` returns, or None.
        """
        # Before the lock: two optimizers in two threads that take over from each other would wait for each other.
        for group in self.param_groups:
            for param in group["params"]:
                take_over(param, self)
        for peers in _part.peers_of(self._all_params()):
            peers.before_step()
        with self._lock:
            self._finish_step()
            backend = _backends.chosen()
            plans = plainly(self._plans, backend)
            for plan in plans:
                plainly(self._apply_rows, plan, backend)
                if plan.dense:
                    self._step_dense(plan.dense, plan.group, backend)
        return None  # the decorator calls the closure and returns its loss

    def _plans(self, backend: Backend) -> list[Plan]:
        return [self._plan(index, group, backend) for index, group in enumerate(self.param_groups)]

    def _plan(self, group_index: int, group: Group, backend: Backend) -> Plan:
        """What this group has to do. Writes nothing, and raises if some option or gradient cannot be taken."""
        self._check_again(group, f" in group {group_index}")
        plan = Plan(group)
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            try:
                state = self.state.get(param, {})
                if reason := row_moment_flaw(state, group["second_moment"]):
                    raise ValueError(reason)
                self._plan_parameter(plan, param, checked_gradient(param, grad), state, steps_taken(state), backend)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as flaw:
                raise type(flaw)(f"{parameter_name(group, group_index, index)}: {flaw}") from flaw
        return plan

    def _apply_rows(self, plan: Plan, backend: Backend) -> None:
        """Take the planned row steps: all tables of a kind in one launch."""
        updates = [step.update or self._begin_rows(step, plan.group) for step in plan.rows]
        self._prepare(updates, backend)
        for batch in backend.batches(updates):
            self._whole_or_not_at_all(batch, self._counter(batch.updates, plan.group, backend))

    def _plan_parameter(
        self, plan: Plan, param: Tensor, grad: Tensor, state: State, taken: int, backend: Backend
    ) -> None:
        """Add a row step or a dense step to the plan, or raise; ``taken`` are the parameter's steps so far."""
        raise NotImplementedError

    def _begin_rows(self, step: RowStep, group: Group) -> RowUpdate:
        """Make the state that a row step lacks."""
        raise NotImplementedError

    def _prepare(self, updates: Sequence[RowUpdate], backend: Backend) -> None:
        """Called before these rows are looked at and stepped."""

    def _convert(self, step: RowStep, group: Group, lead: tuple[int, ...]) -> None:
        """Create the state of a table, or convert it to what the options keep, with a warning."""
        kept = step.scalars.kept
        words = convert(self.state[step.param], step.param, kept, lead)
        if words:
            index = next(index for index, param in enumerate(group["params"]) if param is step.param)
            at = next(at for at, other in enumerate(self.param_groups) if other is group)
            warnings.warn(
                f"{parameter_name(group, at, index)}: optimizer state converted to second_moment={kept.second!r} and "
                f"state_dtype={kept.dtype}: {'; '.join(words)}",
                stacklevel=8,
            )

    def _counter(self, updates: Sequence[RowUpdate], group: Group, backend: Backend) -> Callable[[Outcome], None]:
        """A function that counts these steps once they are made. It may be called twice, and writes the same."""
        raise NotImplementedError

    def _whole_or_not_at_all(self, batch: Batch, count: Callable[[Outcome], None]) -> None:
        """Update rows, and count the steps.

        Whatever interrupts it: a step that was made is counted, and one that was not is not.
        """
        outcome = Outcome()

        def finish() -> None:
            if outcome.is_complete:
                count(outcome)

        self._and_finish(lambda: batch.update(outcome), finish)

    def _and_finish(self, work: Callable[[], object], finish: Callable[[], None]) -> None:
        """Do some work and finish it, also if it is interrupted; ``finish`` may be called twice."""
        self._unfinished = finish
        try:
            work()
            finish()
        except BaseException:
            finish()
            self._unfinished = None
            raise
        self._unfinished = None

    def _finish_step(self) -> None:
        """Finish a step that was interrupted once more while it was being finished, or by a signal's handler."""
        if self._unfinished is not None:
            plainly(self._unfinished)
            self._unfinished = None

    def _check_again(self, group: Group, where: str) -> None:
        """Raise if somebody has edited this group so that it cannot be honoured any more."""
        try:
            _, *values = map(group.__getitem__, self._options)  # lr comes first
        except KeyError as missing:
            raise ValueError(f"{missing} is missing{where}; expected every option of the constructor") from None
        self._check_rate(group, where)
        known = self._checked.get(id(group), ())
        if len(known) == len(values) and all(map(operator.is_, values, known)):
            return
        self._check_group(group, where)
        # What may change inside, a list or a Tensor, is looked at every time.
        is_fixed = type(group["betas"]) is tuple and not any(isinstance(v, Tensor) for v in (*group["betas"], *values))
        self._checked[id(group)] = values if is_fixed else ()

    def _check_rate(self, group: Group, where: str) -> None:
        """Raise if a step cannot be taken with this lr."""
        check_is_number(group["lr"], where)

    def _step_dense(self, steps: list[DenseStep], group: Group, backend: Backend) -> None:
        for step in steps:
            ensure_moments(self.state[step.param], step.param, kept_under(group, in_a_table=False))
        _dense.update_all([(step.param, step.grad, self.state[step.param]) for step in steps], group)

    @torch.no_grad()
    def grow(self, param: Tensor, rows: int, init: Init = torch.nn.init.normal_) -> None:
        """Append rows to ``param``. The parameter stays the same object; new rows have the state of rows never seen.

        Args:
            param: a parameter of this optimizer.
            rows: how many to append.
            init: their weights, or a function that fills or returns them.

        Examples:
            >>> import torch
            >>> from rowstep import SparseAdam
            >>> table = torch.nn.Embedding(3, 2, sparse=True)
            >>> optimizer = SparseAdam(table.parameters())
            >>> optimizer.grow(table.weight, 2, init=torch.zeros(2, 2))
            >>> table.weight.shape, table.weight[4]
            (torch.Size([5, 2]), tensor([0., 0.], grad_fn=<SelectBackward0>))
        """
        self._operate(param, lambda state: _rows.grow(param, state, rows, init))

    @torch.no_grad()
    def keep_rows(self, param: Tensor, mask_or_ids: Tensor) -> None:
        """Keep only some rows of ``param``, with their weights and state, and drop the others.

        Args:
            param: a parameter of this optimizer.
            mask_or_ids: a boolean mask over all rows, or distinct row numbers in the order to keep them in.

        Examples:
            >>> import torch
            >>> from rowstep import SparseAdam
            >>> table = torch.nn.Embedding(5, 2, sparse=True)
            >>> optimizer = SparseAdam(table.parameters())
            >>> optimizer.keep_rows(table.weight, torch.tensor([4, 0]))
            >>> table.weight.shape
            torch.Size([2, 2])
        """
        self._group_of(param)
        rows = _rows.named_rows(param, mask_or_ids)
        self._operate(param, lambda state: _rows.keep(param, state, rows))

    @torch.no_grad()
    def permute_rows(self, param: Tensor, order: Tensor) -> None:
        """Reorder the rows of ``param`` and of its state: the new row i is the old row ``order[i]``.

        Args:
            param: a parameter of this optimizer.
            order: every row number once.

        Examples:
            >>> import torch
            >>> from rowstep import SparseAdam
            >>> table = torch.nn.Embedding(3, 2, sparse=True)
            >>> optimizer = SparseAdam(table.parameters())
            >>> last = table.weight[2].detach().clone()
            >>> optimizer.permute_rows(table.weight, torch.tensor([2, 0, 1]))
            >>> torch.equal(table.weight[0], last)
            True
        """
        self._group_of(param)
        if isinstance(order, Tensor) and order.dtype == torch.bool:
            raise ValueError("order is boolean; expected integer row numbers. To drop rows, use keep_rows")
        rows = _rows.named_rows(param, order)
        if len(rows) != _rows.row_count(param):
            raise ValueError(f"order has {len(rows)} entries; expected {len(param)}, with each row once")
        self._operate(param, lambda state: _rows.keep(param, state, rows))

    @torch.no_grad()
    def reset_rows(self, param: Tensor, ids: Tensor) -> None:
        """Reset the optimizer state of some rows of ``param``: moments and counts become 0. Weights stay.

        Args:
            param: a parameter of this optimizer.
            ids: a boolean mask over all rows, or distinct row numbers.

        Examples:
            >>> import torch
            >>> from rowstep import SparseAdam
            >>> table = torch.nn.Embedding(3, 2, sparse=True)
            >>> optimizer = SparseAdam(table.parameters())
            >>> table(torch.tensor([0, 1])).sum().backward()
            >>> optimizer.step()
            >>> optimizer.reset_rows(table.weight, torch.tensor([1]))
            >>> optimizer.state[table.weight]["exp_avg"][:, 0]
            tensor([0.1000, 0.0000, 0.0000])
        """
        self._group_of(param)
        rows = _rows.named_rows(param, ids)
        self._operate(param, lambda state: _rows.reset(state, rows))

    def _operate(self, param: Tensor, change: Callable[[State], None]) -> None:
        """Change the rows of a parameter and of its state."""
        self._group_of(param)
        with self._lock:
            self._finish_step()
            state = self.state.get(param, {})
            if reason := misfit(state, param):
                raise ValueError(reason)
            change(state)

    def _group_of(self, param: Tensor) -> Group:
        if not isinstance(param, Tensor):
            raise TypeError(f"param is a {type(param).__name__}; expected a parameter of this optimizer")
        group = self._find_group(param)
        if group is None:
            raise ValueError(
                f"the parameter of shape {tuple(param.shape)} does not belong to this optimizer; "
                "expected one from its param_groups"
            )
        return group

    def _find_group(self, param: Tensor) -> Group | None:
        # Programs edit the groups, so the place where it was last is only where to look first.
        groups = self.param_groups
        at, index = self._places.get(param, (0, 0))
        if at < len(groups) and index < len(params := groups[at]["params"]) and params[index] is param:
            return groups[at]
        for at, group in enumerate(groups):
            for index, other in enumerate(group["params"]):
                if param is other:
                    self._places[param] = at, index
                    return group
        return None

    def allocate_state(self) -> None:
        """Allocate the state of every parameter now instead of at its first step, so that checkpoints can load into it.

        Optimizers of sharded tables do this when they are created.
        """
        with self._lock:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.requires_grad:
                        is_table = _part.part_of(param) is not None
                        allocate(self.state[param], param, kept_under(group, in_a_table=is_table))

    def _allocate_for_shards(self) -> None:
        if any(_part.part_of(param) is not None for param in self._all_params()):
            self.allocate_state()

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> StateDict:
        """Same as torch's. The state of a sharded table is returned as DTensors over the same memory."""
        with self._lock:
            self._finish_step()
            state_dict = super().state_dict()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):  # a hook may add some
            if saved.get("fused") and any(map(_part.is_spread_part, group["params"])):
                # Torch's other kernels refuse moments of another shape. This one does not look, and would step a plain
                # model with rows under the wrong ids. Nothing of ours loads the option.
                saved["fused"] = None
        return _part.for_each_param(state_dict, self._all_params(), _part.as_global_state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class or of the torch classes that it replaces.

        Options missing from the saved groups (in torch's, all of our own) keep this optimizer's values. A state that
        cannot be loaded raises, and nothing changes.

        Args:
            state_dict: what ``state_dict()`` has returned.
        """
        given: StateDict = {}
        own_groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

        def check(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
            check_structure(state_dict)
            given.update(_part.for_each_param(state_dict, self._all_params(), _local_state))
            given["param_groups"] = [self._with_own(index, group) for index, group in enumerate(given["param_groups"])]
            plainly(check_states, given, self._all_params())
            for index, (own, new) in enumerate(zip(own_groups, given["param_groups"], strict=False)):
                where = f" in group {index} of the loaded state"
                check_learning_rate((own | new)["lr"], zero_allowed=True, where=where)
                self._check_group(own | new, where)
                states = {number: given["state"].get(number, {}) for number in new["params"]}
                check_slots(own, new, list(states.values()), where)
                for number, state in states.items():
                    if reason := row_moment_flaw(state, (own | new)["second_moment"]):
                        raise ValueError(f"the loaded state of parameter {number}: {reason}")
            return given

        def complete(optimizer: Optimizer) -> None:
            for own, group in zip(own_groups, self.param_groups, strict=True):
                for key, value in own.items():
                    group.setdefault(key, value)
            separate_counts([self.state[param] for param in self._all_params() if param in self.state])
            groups = [group for group in self.param_groups for _ in group["params"]]
            for param, slots in uncast_slots(given, list(zip(self._all_params(), groups, strict=True))):
                if slots:
                    self.state[param].update(slots)
            self._loaded(given)
            self._allocate_for_shards()  # what was not in there has to be there for the next checkpoint

        # Our check runs after the users' own pre-hooks, and our completion before their post-hooks.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(complete, prepend=True)
        with self._lock:
            self._finish_step()
            before = {"state": self.state, "param_groups": self.param_groups}
            try:
                super().load_state_dict(state_dict)
            except BaseException:
                self.__dict__.update(before)
                raise
            finally:
                last.remove()
                first.remove()

    def _with_own(self, index: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """A loaded group with the options that stay this optimizer's own."""
        own = self.param_groups[index] if index < len(self.param_groups) else {}
        return dict(loaded) | {key: own[key] for key in self._own_when_loading if key in own}

    def _loaded(self, given: StateDict) -> None:
        """Called when a state has been loaded, before the users' own hooks."""

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._finish_step()
            return super().__getstate__() | {"_is_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_lock" not in self.__dict__:  # a copy or an unpickled optimizer, not a loaded state dict
            self._begin()
        super().__setstate__(state)
        self._options = tuple(self.defaults)


def _local_state(state: State, param: Tensor) -> State:
    return _part.as_local_state(tidied(state), param)
