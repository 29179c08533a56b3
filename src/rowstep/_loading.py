"""Validate a state dict before any of it is loaded.

A state dict comes from a file, from another version or from a program that edited it. Whatever is wrong with it, it is
refused as a whole, with the reason, before anything of the optimizer has changed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ._memory import address_of, has_memory, lost_memory
from ._state import MOMENTS, SLOTS, State, described, miscount, missing, slot_flaw


def check_structure(state_dict: Any) -> None:
    """Raise unless this has the form of an optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"the state dict is {_kind(state_dict)}; expected a dict with 'state' and 'param_groups'")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; expected 'state' and 'param_groups'")
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError(f"'state' is {_kind(states)}; expected a dict with one dict per parameter")
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"'param_groups' is {_kind(groups)}; expected a list of dicts")
    for index, group in enumerate(groups):
        _check_numbers(group, index)


def _check_numbers(group: Mapping[str, Any], index: int) -> None:
    numbers, names = group.get("params"), group.get("param_names")
    if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, (int, str)) for number in numbers):
        raise ValueError(f"group {index} has params {reprlib.repr(numbers)}; expected a list of parameter numbers")
    if "param_names" in group and (not isinstance(names, (list, tuple)) or len(names) != len(numbers)):
        raise ValueError(f"group {index} has param_names {reprlib.repr(names)}; expected one name per parameter")


def check_states(state_dict: StateDict, params: Sequence[Tensor]) -> None:
    """Raise unless every state of a well-formed state dict can be that of the parameter it will be loaded for."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for number, param in _param_of_each_number(state_dict, params).items():
        state = state_dict["state"].get(number, {})
        if reason := _flaw(state, param):
            raise ValueError(f"the loaded state of parameter {number}: {reason}")
        weights[f"the weights of parameter {number}"] = param
        moments |= {f"{key!r} of parameter {number}": state[key] for key in MOMENTS if key in state}
    _refuse_shared_memory(weights, moments)


_SLOT_OF_OPTION = [(*slot.option, slot.name) for slot in reversed(SLOTS.values()) if slot.option is not None]


def check_slots(own: Mapping[str, Any], loaded: Mapping[str, Any], states: Sequence[State], where: str) -> None:
    """Raise if the options ``loaded``, which replace ``own``, need state that the loaded states do not have.

    torch.distributed.checkpoint restores the options of a group as they were saved, but of the state only what the
    optimizer it loads into has slots for. Slots follow the options, so an optimizer that was made with others comes out
    with options whose state stayed in the file. torch's Adam then fails at its next step; here the slot would quietly
    begin anew.
    """
    for option, value, slot in _SLOT_OF_OPTION:
        if option not in own or own[option] == value or loaded.get(option) != value:
            continue
        has_history = [state for state in states if any(name in state for name in MOMENTS) and state.get("step") != 0]
        if has_history and not any(slot in state for state in has_history):
            raise ValueError(
                f"{option}={value!r} was saved{where}, but no loaded state has {slot!r}; expected it beside the "
                "moments. A checkpoint loads only into existing state: create the optimizer with "
                f"{option}={value!r} before you load"
            )


def separate_counts(states: Sequence[State]) -> None:
    """Give a loaded ``step`` memory of its own where it shares some: it is counted up in place.

    All else stays the tensor that was loaded, as in torch: a state dict that is loaded twice, or into two optimizers,
    is one state for both.
    """
    taken = {state[name].data_ptr() for state in states for name in MOMENTS if name in state}
    for state in states:
        step = state.get("step")
        if isinstance(step, Tensor):
            if step.data_ptr() in taken or step.untyped_storage().nbytes() > step.nbytes:
                state["step"] = step = step.clone()
            taken.add(step.data_ptr())


def uncast_slots(
    state_dict: StateDict, params: Sequence[tuple[Tensor, Mapping[str, Any]]]
) -> Iterator[tuple[Tensor, State]]:
    """For each parameter, which comes with its group, the loaded slots that are not to be of its dtype.

    torch casts every loaded state but ``step`` to the parameter's dtype: bfloat16 cannot count, and moments of 16 bits
    would take twice the memory. What was saved in another dtype than the options ask for stays as it was saved until
    the next step, which makes it fit.
    """
    for number, (param, group) in zip(_numbers(state_dict), params, strict=True):
        state, asked_for = state_dict["state"].get(number, {}), group.get("state_dtype")
        slots = {}
        for name, slot in SLOTS.items():
            if name in state and slot.is_count:
                slots[name] = state[name].to(param.device, torch.int64, copy=True)
            elif name in state and (slot.is_per_row or asked_for not in (None, param.dtype)):
                slots[name] = state[name].to(param.device)
        yield param, slots


def _param_of_each_number(state_dict: StateDict, params: Sequence[Tensor]) -> dict[Any, Tensor]:
    """A parameter may be listed twice, but a number stands for one. If there are more or fewer, torch complains."""
    found: dict[Any, Tensor] = {}
    for number, param in zip(_numbers(state_dict), params, strict=False):
        if found.setdefault(number, param) is not param:
            raise ValueError(
                f"the loaded groups list parameter {number!r} twice; expected a different number for each parameter"
            )
    return found


def _numbers(state_dict: StateDict) -> list[Any]:
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _flaw(state: State, param: Tensor) -> str | None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided and value.is_cpu and not has_memory(value):
            return lost_memory(repr(key), value)
    if reason := missing(state):
        return f"it {reason}"
    for name in SLOTS:
        if name in state and (reason := slot_flaw(name, state[name], param, is_loaded=True)):
            return f"{name!r} is {described(state[name])}; expected {reason}"
    return miscount(state["step"]) if "step" in state else None


def _refuse_shared_memory(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Raise if a moment begins where other moments or weights do. Weights may share memory: parameters may be tied."""
    owners = {address: name for name, param in weights.items() if (address := address_of(param)) is not None}
    for name, tensor in moments.items():
        address = address_of(tensor)
        if address is not None and (owner := owners.setdefault(address, name)) != name:
            raise ValueError(f"the loaded state: {owner} and {name} share memory; expected separate memory for each")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
