"""What an optimizer keeps between steps: made, saved and loaded, and changed row by row."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from . import _part, _surgery
from ._commit import is_averaged_table
from ._loading import check_slots, check_states, check_structure, separate_counts, uncast_slots
from ._options import HOW_TORCH_STEPS, check_group, check_learning_rate, parameter_name
from ._state import State, StateSpec, count_tensor, misfit, row_moment_flaw
from ._state_files import StateFiles
from ._surgery import Init
from ._table import Table
from ._torch_internals import without_torch_function
from ._warnings import warn

Group = dict[str, Any]


class StatefulOptimizer(Optimizer):
    """An optimizer whose state has rows. How it steps, ``RowOptimizer`` says."""

    _own_when_loading: tuple[str, ...] = (*HOW_TORCH_STEPS, "second_moment")
    """Options that a loaded state dict does not change."""

    def _begin(self) -> None:
        # One thread at a time: a step, a catch-up and a flush write to the same rows. Re-entrant, because a signal
        # handler that saves a checkpoint may run in the middle of a step, in the same thread.
        self._lock: Any = threading.RLock()
        self._bare_lock = self._lock
        """The same, or what it is when a table is at work on which one need not wait."""
        self._process = os.getpid()
        self._self: weakref.ref[Any] = weakref.ref(self)
        self._files = StateFiles()
        self._tables: dict[int, Table] = {}
        """By the id of their parameter, which they hold: a Tensor's own hash is a call into Python."""
        self._peers: list[_part.Peers] = []
        """The ranks that share tables with this one."""

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise if these options cannot be honoured; ``where`` names the group."""
        check_group(group, where)

    # Rows

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
        self._group_of(param)
        self._operate(param, lambda state: _surgery.grow(param, state, rows, init))

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
        rows = _surgery.named_rows(param, mask_or_ids)
        self._operate(param, lambda state: _surgery.keep(param, state, rows))

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
        rows = _surgery.named_rows(param, order)
        if len(rows) != _surgery.row_count(param):
            raise ValueError(f"order has {len(rows)} entries; expected {len(param)}, with each row once")
        self._operate(param, lambda state: _surgery.keep(param, state, rows))

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
        rows = _surgery.named_rows(param, ids)
        self._operate(param, lambda state: _surgery.reset(state, rows))

    def _operate(self, param: Tensor, change: Callable[[State], None]) -> None:
        """Change the rows of a parameter of this optimizer and of its state."""
        with self._lock:
            state = self.state.get(param, {})
            if reason := misfit(state, param):
                raise ValueError(reason)
            change(state)
            self._tables.pop(id(param), None)

    def _group_of(self, param: Tensor) -> Group:
        _surgery.require_tensor(param, "a parameter of this optimizer")
        for group in self.param_groups:
            for other in group["params"]:
                if other is param:
                    return group
        raise ValueError(
            f"the parameter of shape {tuple(param.shape)} does not belong to this optimizer; "
            "expected one from its param_groups"
        )

    def _name_of(self, param: Tensor) -> str:
        """How messages call a parameter."""
        for at, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    return parameter_name(group, at, index)
        return "a parameter"

    def _warn_of_loss(self, param: Tensor, spec: StateSpec, lost: list[str]) -> None:
        """Say what was lost when the state of a parameter was made to fit its group's options."""
        warn(
            f"{self._name_of(param)}: optimizer state converted to second_moment={spec.second!r} and "
            f"state_dtype={spec.dtype}: {'; '.join(lost)}"
        )

    # Checkpoints

    def allocate_state(self) -> None:
        """Allocate the state of every parameter now instead of at its first step, so that checkpoints can load into it.

        Optimizers of sharded tables do this when they are created.
        """
        with self._lock:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.requires_grad:
                        state, of_tables = self.state[param], StateSpec.under(group)
                        is_known = _part.part_of(param) is not None or is_averaged_table(param)
                        is_table = is_known or of_tables.holds_table_state(state, param)
                        spec = of_tables if is_table else StateSpec.under(group, in_a_table=False)
                        # A Tensor whatever the gradients will be: torch's checkpoints read either kind into a Tensor,
                        # but only an int into an int.
                        state.setdefault("step", count_tensor(0))
                        with self._files.all_or_none():
                            made, lost = self._files.make(param, state, spec)
                        spec.install(state, made)
                        if lost:
                            self._warn_of_loss(param, spec, lost)

    def _look_for_shards(self) -> None:
        """Note the ranks that share tables with this one, and make the state that checkpoints load into."""
        self._peers = _part.peers_of(self._all_params())
        if any(_part.part_of(param) is not None for param in self._all_params()):
            self.allocate_state()

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> StateDict:
        """Same as torch's. The state of a sharded table is returned as DTensors over the same memory."""
        with self._lock:
            self._raise_late_flaws()
            state_dict = super().state_dict()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):  # a hook may add some
            if saved.get("fused") and any(map(_part.is_spread_part, group["params"])):
                # Torch's other kernels refuse moments of another shape. This one does not look, and would step a plain
                # model with rows under the wrong ids. Nothing of ours loads the option.
                saved["fused"] = None
        return _part.for_each_param(state_dict, self._all_params(), _part.as_global_state)

    def _raise_late_flaws(self) -> None:
        """Wait for tables on a GPU, and raise if a step has found something wrong there."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class or of the torch classes that it replaces.

        ``second_moment`` and options missing from the saved groups (in torch's, all of our own) keep this optimizer's
        values. A state that cannot be loaded raises, and nothing changes.

        Args:
            state_dict: what ``state_dict()`` has returned.
        """
        if folders := [group["state_dir"] for group in self.param_groups if group.get("state_dir") is not None]:
            raise ValueError(
                f"the state is in the files of {folders[0]!r}, which the constructor takes up; expected no state dict. "
                "Load it into an optimizer without state_dir"
            )
        given: StateDict = {}
        own_groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

        def check(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
            check_structure(state_dict)
            given.update(_part.for_each_param(state_dict, self._all_params(), _part.as_local_state))
            given["param_groups"] = [self._with_own(index, group) for index, group in enumerate(given["param_groups"])]
            without_torch_function(check_states, given, self._all_params())
            for index, (own, new) in enumerate(zip(own_groups, given["param_groups"], strict=False)):
                where = f" in group {index} of the loaded state"
                check_learning_rate(own | new, where)
                self._check_group(own | new, where)
                states = {number: given["state"].get(number, {}) for number in new["params"]}
                check_slots(own, new, list(states.values()), where)
                for number, state in states.items():
                    if reason := row_moment_flaw(state, StateSpec.under(own | new)):
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
            self._look_for_shards()  # what was not in there has to be there for the next checkpoint

        # Our check runs after the users' own pre-hooks, and our completion before their post-hooks.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(complete, prepend=True)
        with self._lock:
            before = {"state": self.state, "param_groups": self.param_groups}
            try:
                super().load_state_dict(state_dict)
            except BaseException:
                self.__dict__.update(before)
                raise
            finally:
                last.remove()
                first.remove()

    def _write_to_files(self) -> None:
        """Write what belongs into files and is not there yet: before they are synced, and when the process ends."""
        self._files.write_counts(self.state)

    def _with_own(self, index: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """A loaded group with the options that stay this optimizer's own."""
        own = self.param_groups[index] if index < len(self.param_groups) else {}
        return dict(loaded) | {key: own[key] for key in self._own_when_loading if key in own}

    def _loaded(self, given: StateDict) -> None:
        """Called when a state has been loaded, before the users' own hooks."""
        self._tables.clear()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return super().__getstate__() | {"_is_complete": True}
