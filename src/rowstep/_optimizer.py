"""The loop of a step, which every optimizer of this library takes in the same way.

A step goes over the gradients of all groups. A dense one is torch's Adam's; a sparse one is a job for the table that it
belongs to, which is prepared at its first step and whenever it has changed. Everything is checked before anything is
written, so an error changes nothing. Then the steps are counted, and then they are made, all tables of a kind in one
launch. If an interrupt comes after counting and before the rows move, the step stays counted, as if these tables had
had no gradient in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from . import _ahead, _backends, _dense, _fork, _part
from ._gradient import RowGradient, check_gradient, outside_message
from ._launches import Launches, add
from ._options import check_layouts, check_learning_rate, rate_of, refuse_idle_rounding
from ._rule import Rule
from ._state import LARGEST_COUNT, State, StateSpec, misfit, row_moment_flaw, steps_taken
from ._state_files import make_absolute, without_files
from ._stateful import Group, StatefulOptimizer
from ._table import Job, Table
from ._torch_internals import optimizer_step
from ._waiting import Waiting, bring_all_up_to_date, keeper_of, release

# A parameter, the rule and the number of its group.
_Work = tuple[Tensor, Rule, int]


class RowOptimizer(StatefulOptimizer):
    """An Adam that takes sparse gradients row by row.

    Subclasses say which gradients are taken as rows, in ``_as_rows``, and how steps are counted, in ``_count``.
    """

    _zero_allowed = False
    """Whether lr may be 0."""

    _defers = False
    """Whether rows wait for the steps in which they have no gradient."""

    def __init__(self, params: ParamsT | nn.Module, defaults: dict[str, Any]) -> None:
        check_learning_rate(defaults, zero_allowed=self._zero_allowed)
        self._check_group(defaults, "")
        make_absolute(defaults)
        self._is_complete, self._options = False, _options_of(defaults)
        self._begin()
        # With their names, so that errors can say which table they are about.
        try:
            super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)
            check_layouts(self.param_groups, type(self).__name__)
            self._is_complete = True
            _fork.note(self)
            self._look_for_shards()
        except BaseException:
            self._files.release()  # a traceback may keep this object
            raise

    def _begin(self) -> None:
        super()._begin()
        self._rules: dict[int, tuple[tuple[Any, ...], Rule, Group]] = {}
        """By the id of a group: everything in it, as the objects that they were, its rule, and the group itself, so
        that no other group can have its id."""
        self._reports: dict[int, Any] = {}
        """By the id of a parameter on a GPU: what kernels have found wrong, to be read later."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the same checks as the constructor. A refused group is not added.

        Args:
            param_group: its ``params``, and options that differ from the optimizer's own.
        """
        super().add_param_group(param_group)
        try:
            where = f" in group {len(self.param_groups) - 1}"
            check_learning_rate(self.param_groups[-1], where)
            self._check_group(self.param_groups[-1], where)
            refuse_idle_rounding(self.param_groups[-1], where)
            if self._is_complete:  # the constructor looks at all groups together, to name every parameter it refuses
                check_layouts(self.param_groups, type(self).__name__)
            if self.param_groups[-1].get("state_dir") is not None:
                make_absolute(self.param_groups[-1])
                self._files.take_up(self, self.param_groups[-1], len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_complete:
            self._look_for_shards()

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
                if isinstance(param, Waiting) and keeper_of(param) is not self:
                    bring_all_up_to_date([param])
        for peers in self._peers:
            peers.before_step()
        with self._lock:
            work: list[_Work] = []
            for at, group in enumerate(self.param_groups):
                known, rule, _ = self._rules.get(id(group), _NO_RULE)
                if len(known) != len(group) or not all(map(operator.is_, known, group.values())):
                    rule = self._rule_anew(group, rule, f" in group {at}")
                for param in group["params"]:
                    if param.grad is not None:
                        work.append((param, rule, at))
            if len(self._rules) > len(self.param_groups):  # one was dropped or replaced
                self._forget_unlisted()
            if work:
                work = self._step_each(work)
        while work:  # on what is listed twice
            with self._lock:
                work = self._step_each(work)
        return None  # the decorator calls the closure and returns its loss

    def _step_each(self, work: list[_Work]) -> list[_Work]:
        """Step each of these parameters once; return the work on those that are listed again."""
        jobs: list[Job] = []
        launches: Launches = {}
        new, dense, again, seen = [], [], [], set()
        for each in work:
            param, rule, at = each
            if id(param) in seen:
                again.append(each)
                continue
            seen.add(id(param))
            try:
                job = self._job_of(param, rule)
                if job.gradient is None:
                    dense.append((param, at))
                else:
                    jobs.append(job)
                if job.table is None:
                    new.append(job)
                elif job.gradient is not None:
                    add(job, launches)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as flaw:
                raise self._named(flaw, param) from flaw
        for launch in launches.values():
            flawed = launch.first_flawed()
            if flawed is not None:
                late = None if flawed.table.report is None else self._late_flaw(flawed.table)
                raise self._named(late or self._flaw_of(flawed), flawed.param)
        if dense:
            _dense.refuse_capture(dense[0][0])
        # Everything has been checked. What is new is made, all is counted, and then the rows move.
        if new:
            self._make_state(new)
            for job in new:
                if job.gradient is not None:
                    add(job, launches)
            for launch in launches.values():
                launch.first_flawed()  # tells the kernels of all jobs; each was checked by itself
        threads = torch.get_num_threads()
        for launch in launches.values():
            launch.reserve(threads)
        self._count(jobs)
        if self._files.of:
            self._files.write_counts(self.state, [job.param for job in jobs])
        skipped = 0
        for launch in launches.values():
            skipped += launch.step()
        if skipped or self._defers:
            self._after_launches(jobs, skipped)
        if dense:
            self._step_dense(dense)
            if self._files.of:
                self._files.write_counts(self.state, [param for param, _ in dense])
        return again

    def _job_of(self, param: Tensor, rule: Rule) -> Job:
        """What this parameter has to do. Raise if it cannot."""
        grad: Any = param.grad
        state, spec = self.state.get(param, _NO_STATE), rule.spec
        table: Any = self._tables.get(id(param))
        is_ready = table is not None and table.spec is spec and table.fits(state, rule)
        gradient, as_dense = table.rows_of(grad) if is_ready else None, self._defers
        if gradient is None:
            gradient, as_dense, in_a_table = self._as_rows(param, check_gradient(param), state, rule)
            if not in_a_table and spec is not rule.dense_spec:
                spec = rule.dense_spec
                is_ready = table is not None and table.spec is spec and table.fits(state, rule)
            if not is_ready:
                table = self._prepared(param, state, spec)
        step = state.get("step", 0) if table is None or table.pending is None else table.pending.step
        count = (step if type(step) is int and 0 <= step < LARGEST_COUNT else steps_taken(state)) + 1
        if gradient is not None:
            if self._defers and table is not None and table.pending is None:
                table = None  # rows begin to wait
            if table is None:
                if flaw := _backends.outside(gradient):
                    raise flaw
            elif table.pending is not None:
                self._prepare_waiting_rows(table.pending, gradient)
        return Job(param, table, spec, gradient, rule.step(count, as_dense))

    def _rule_anew(self, group: Group, rule: Rule | None, where: str) -> Rule:
        """The rule of a group of which something is another object: the same rule, if that is only its lr.

        Raise if somebody has edited its options so that they cannot be honoured any more.
        """
        try:
            lr, options = group["lr"], self._options(group)
        except KeyError as missing:
            raise ValueError(f"{missing} is missing{where}; expected every option of the constructor") from None
        check_learning_rate(group, where, may_wait=False)
        if rule is None or not rule.is_fixed or not all(map(operator.is_, rule.options, options)):
            self._check_group(group, where)
            rule = Rule(group, options)
        self._check_rate(lr, rule, where)
        rule.set_rate(rate_of(lr))
        self._rules[id(group)] = tuple(group.values()) if rule.is_fixed and type(lr) is float else (), rule, group
        return rule

    def _check_rate(self, lr: Any, rule: Rule, where: str) -> None:
        """Raise if no step can be taken with this lr, which is one."""

    def _as_rows(self, param: Tensor, grad: Tensor, state: State, rule: Rule) -> tuple[RowGradient | None, bool, bool]:
        """The gradient as rows, or None if it is for torch's dense Adam; whether it came dense and names every row, so
        that eps goes where torch.optim.Adam has it; and whether the parameter is kept as a table.
        """
        raise NotImplementedError

    def _prepared(self, param: Tensor, state: State, spec: StateSpec) -> Table | None:
        """The table of this parameter, prepared anew; None if that takes other state.

        Raise if the state is not this parameter's.
        """
        if reason := misfit(state, param) or row_moment_flaw(state, spec):
            raise ValueError(reason)
        if not spec.is_met_by(state):
            return None
        return self._table_of(param, state, spec)

    def _table_of(self, param: Tensor, state: State, spec: StateSpec) -> Table:
        """The table of this parameter, made anew. What kernels have found in the one before is not lost."""
        kernels = _backends.kernels_for(param)
        self._tables[id(param)] = table = Table(param, state, spec, kernels)
        if kernels is not None and kernels.reports_late:  # even if they cannot take it as it lies now
            table.report = self._reports.setdefault(id(param), kernels.Report())
            table.report.move_to(param.device)
        elif table.kernels is not None:
            table.ahead, table.keeper = _ahead.of(param), self._self
            if table.ahead is not None:
                table.ahead.keep([param, *table.slots.values()])
                if self._lock is self._bare_lock:
                    self._lock = _ahead.WaitingLock(self._bare_lock, self._self)
            tables = self._tables.values() if self._lock is not self._bare_lock else ()
            sharing = [other for other in tables if other.memory == table.memory]
            for other in sharing if len(sharing) > 1 else ():  # a step of one moves rows of the others
                if other.ahead is not None:
                    other.ahead.read_late()
                    other.ahead = None
        return table

    def _prepare_waiting_rows(self, pending: Any, gradient: RowGradient) -> None:
        """Called before a gradient steps a table whose rows may wait: raise if it was made of stale ones."""

    def _make_state(self, jobs: Sequence[Job]) -> None:
        """Make the state that these jobs lack, all of it or, if memory runs out, none; and prepare their tables."""
        self._forget_unlisted()
        with self._files.all_or_none():
            made = [self._files.make(job.param, self.state.get(job.param, _NO_STATE), job.spec) for job in jobs]
        for job, (slots, lost) in zip(jobs, made, strict=True):
            state, spec = self.state[job.param], job.spec
            spec.install(state, slots)
            job.table = self._table_of(job.param, state, spec)
            if lost:
                self._warn_of_loss(job.param, spec, lost)
        _dense.warn_of_dense_tables([job.param for job in jobs if job.gradient is None], self._name_of)

    def _forget_unlisted(self) -> None:
        """Let go of groups that are not there any more, and of tables that are in none."""
        groups, params = set(map(id, self.param_groups)), set(map(id, self._all_params()))
        for key in self._rules.keys() - groups:
            del self._rules[key]
        for key in self._tables.keys() - params:
            self._forget(self._tables[key])

    def _forget(self, table: Table) -> None:
        """Let go of a table that is in no group any more."""
        self._tables.pop(id(table.param))

    def _flaw_of(self, job: Job) -> Exception:
        """What is wrong with a job that the kernels have refused."""
        return _backends.outside(job.gradient) or RuntimeError("the kernels have refused the gradient")

    def _late_flaw(self, table: Table) -> Exception | None:
        """What kernels on a GPU have found wrong with a table's gradient in an earlier step: said once."""
        outside, stale = table.report.taken()
        if outside is not None:
            return IndexError(f"in an earlier step {outside_message(outside, table.row_count)}. {_LEFT_OUT}")
        return self._stale_flaw(stale) if stale else None

    def _stale_flaw(self, stale: int) -> Exception | None:
        """What to say of rows that were not up to date in an earlier step."""
        return None

    def _raise_late_flaws(self) -> None:
        for table in self._tables.values():
            if table.report is not None:
                table.report.wait()
                if flaw := self._late_flaw(table):
                    raise self._named(flaw, table.param)

    def _count(self, jobs: Sequence[Job]) -> None:
        """Count these steps, which will be made right after."""
        raise NotImplementedError

    def _after_launches(self, jobs: Sequence[Job], skipped: int) -> None:
        """Called when the rows of these jobs have been stepped, if some were skipped as non-finite or if rows wait."""

    # A table that is at work, of a HostEmbedding; the deferred optimizers have more to do for it

    def _bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> bool:
        with self._lock:  # and so the work has ended
            if ids is None:
                slots = [slot for slot in self.state.get(param, _NO_STATE).values() if isinstance(slot, Tensor)]
                release([param, *slots], self._self)
        return True

    def _accept_writes(self, param: Tensor) -> None:
        pass

    def _catch_up_announced(self, param: Tensor, rows: Tensor) -> None:
        """Called before these rows are read, while others may be stepped."""

    def _step_dense(self, params: Sequence[tuple[Tensor, int]]) -> None:
        """Step these parameters, which come with the number of their group, as torch.optim.Adam does."""
        for at, group in enumerate(self.param_groups):
            items = [(param, check_gradient(param), self.state[param]) for param, of in params if of == at]
            _dense.update_all(items, group)
            for _, _, state in items if group.get("bias_correction") == "row" else ():
                state["row_step"] += 1

    def _named(self, flaw: Exception, param: Tensor) -> Exception:
        """The same error, with the name of the parameter in front."""
        return type(flaw)(f"{self._name_of(param)}: {flaw}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_copy = "_lock" not in self.__dict__  # or an unpickled optimizer, not a loaded state dict
        if is_copy:
            self._begin()
        super().__setstate__(state)
        if is_copy:  # its state is in memory; and the dicts of a shallow one are the original's
            self.defaults, *self.param_groups = map(without_files, (self.defaults, *self.param_groups))
            _fork.note(self)
        self._options = _options_of(self.defaults)
        self._peers = _part.peers_of(self._all_params())


_NO_STATE: State = {}
_NO_RULE: Any = (), None, None

_LEFT_OUT = (
    "The table did not move in that step, which was counted. On a GPU a step does not wait to look at its ids: this is "
    "raised by the next one"
)


def _options_of(defaults: Mapping[str, Any]) -> Callable[[Group], tuple[Any, ...]]:
    """A function that reads all options of a group but its lr, which may be another at every step."""
    return operator.itemgetter(*(name for name in defaults if name != "lr"))
