"""The state of parameters in files: for each of its slots a safetensors file of ``rowstep.storage``, and for its steps.

The next optimizer over the same folder takes them up. Numbers are where a step writes them, so nothing is copied; the
count of steps is written when files are synced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._state import SLOTS, State, StateSpec, misfit, steps_taken


class StateFiles:
    """The files of one optimizer."""

    def __init__(self) -> None:
        # By the id of a parameter: its state, and the file's count of its steps.
        self._counts: dict[int, tuple[State, Tensor]] = {}

    def take_up(self, optimizer: Any, group: Mapping[str, Any], at: int) -> None:
        """Make what the files of a group have the state of its parameters."""
        from . import storage  # which needs Linux

        found = []
        specs = [StateSpec.under(group), StateSpec.under(group, in_a_table=False)]
        for index, param in enumerate(group["params"]):
            path = _path(group, at, index)
            there = [name for name in (*SLOTS, "step") if os.path.exists(path(name))]
            if not there:
                continue
            if "step" not in there:
                raise ValueError(f"{path('step')} is missing; expected it beside {path(there[0])}. Delete what is left")
            state: State = {name: storage.open(path(name), name, writable=True) for name in there}
            if not param.dim():
                state = {name: slot[0] for name, slot in state.items()}
            count, state["step"] = state["step"], int(state["step"])
            if reason := misfit(state, param):
                raise ValueError(f"{path('step')} and the files beside it are not this parameter's: {reason}")
            if not any(spec.is_met_by(state) for spec in specs):
                kept = ", ".join(f"{name} of {state[name].dtype}" for name in there if name != "step")
                raise ValueError(f"{path('step')} lies beside {kept}; expected what the options of the group ask for")
            found.append((param, state, count))
        for param, state, count in found:  # now that all of them fit
            optimizer.state[param] = state
            self._counts[id(param)] = state, count

    def maker(self, optimizer: Any, param: Tensor) -> Callable[..., Tensor] | None:
        """What makes new slots of a parameter in files; None if those belong into memory."""
        for at, group in enumerate(optimizer.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param and group.get("state_dir") is not None:
                    return functools.partial(_create, _path(group, at, index))
        return None

    def count(self, optimizer: Any, param: Tensor) -> None:
        """Count the steps of a parameter in a file, from the next sync on, if its state is in files."""
        make = None if id(param) in self._counts else self.maker(optimizer, param)
        if make is not None:
            self._counts[id(param)] = optimizer.state[param], make("step", (1,), torch.int64)

    def write_counts(self) -> None:
        for state, count in self._counts.values():
            if int(count) != steps_taken(state):  # what is written counts as changed until it is synced
                count.fill_(steps_taken(state))


def _path(group: Mapping[str, Any], at: int, index: int) -> Callable[[str], str]:
    names, place = group.get("param_names"), f"{at}.{index}"
    name = names[index].replace(os.sep, "_") if names else place
    return lambda slot: os.path.join(group["state_dir"], f"{name}.{slot}.safetensors")


def _create(path: Callable[[str], str], name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    from . import storage

    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    rows, *dim = shape or (1,)
    return storage.create(path(name), rows, dim, dtype, key=name).view(tuple(shape))
