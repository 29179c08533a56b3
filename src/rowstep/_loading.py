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
from ._rules.adam import SLOTS
from ._state import (
    FLOATS,
    LARGEST_COUNT,
    MOMENTS,
    OF_MOMENTS,
    State,
    described,
    largest_count,
    miscount,
    missing,
    moment_flaw,
)


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
        moments |= {f"{key!r} of parameter {number}": state[key] for key in OF_MOMENTS if key in state}
    _refuse_shared_memory(weights, moments)


_SLOT_OF_OPTION = [(*slot.option, slot.name) for slot in reversed(SLOTS) if slot.option is not None]


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
        has_history = [
            state for state in states if any(name in state for name in OF_MOMENTS) and state.get("step") != 0
        ]
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
    taken = {state[name].data_ptr() for state in states for name in OF_MOMENTS if name in state}
    for state in states:
        step = state.get("step")
        if isinstance(step, Tensor):
            if step.data_ptr() in taken or step.untyped_storage().nbytes() > step.nbytes:
                state["step"] = step = step.clone()
            taken.add(step.data_ptr())


def tidied(state: State) -> State:
    """A state without the empty dicts that torch makes of what a flattened state dict lacks."""
    return {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}


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
        for slot in SLOTS:
            if slot.name not in state:
                continue
            loaded = state[slot.name]
            if slot.dtype == "int64":
                slots[slot.name] = loaded.to(param.device, torch.int64, copy=True)
            elif slot.dtype == "wide" or (slot.dtype == "state" and asked_for not in (None, param.dtype)):
                slots[slot.name] = loaded.to(param.device)
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
    for key in MOMENTS:
        if key in state and (reason := _moment_flaw(state[key], param)):
            return f"{key!r} is {described(state[key])}; expected {reason}"
    if "exp_avg_sq_row" in state and (reason := _row_moment_flaw(state["exp_avg_sq_row"], param)):
        return f"'exp_avg_sq_row' is {described(state['exp_avg_sq_row'])}; expected {reason}"
    if "row_step" in state and (reason := _counts_flaw(state["row_step"], param)):
        return f"'row_step' is {described(state['row_step'])}; expected {reason}"
    return miscount(state["step"]) if "step" in state else None


def _moment_flaw(moment: object, param: Tensor) -> str | None:
    if isinstance(moment, Tensor) and moment.is_meta and not param.is_meta:
        return "a tensor with data"
    if isinstance(moment, Tensor) and moment.shape != param.shape:
        return f"the parameter's shape, {tuple(param.shape)}"
    return moment_flaw(moment)


def _row_moment_flaw(moment: object, param: Tensor) -> str | None:
    """What is wrong with a second moment per row, or None."""
    if isinstance(moment, Tensor) and moment.is_meta and not param.is_meta:
        return "a tensor with data"
    if isinstance(moment, Tensor) and moment.shape != (shape := param.shape[: moment.dim()]):
        return f"shape {tuple(shape)}, for a parameter of shape {tuple(param.shape)}"
    return moment_flaw(moment)


# The integers that torch computes with. It counts in floating point too; FLOATS are those it can compare with others.
_WHOLE_NUMBERS = frozenset([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])


def _counts_flaw(counts: object, param: Tensor) -> str | None:
    if not isinstance(counts, Tensor) or counts.layout != torch.strided or counts.is_meta:
        return "a dense tensor"
    if counts.shape != param.shape[: counts.dim()]:
        return f"the leading dimensions of {tuple(param.shape)}"
    if counts.dtype not in _WHOLE_NUMBERS | FLOATS:
        return "a dense tensor of int64"
    # torch's classes cast counts to the parameter's dtype, which has every whole number up to some bound only.
    bound = int(largest_count(counts.dtype)) if counts.is_floating_point() else LARGEST_COUNT
    whole = counts.to(torch.int64)  # what is not finite becomes something else; and int32 cannot compare with 2^53
    if not bool(((whole >= 0) & (whole < bound) & (whole == counts)).all()):
        return f"integers in [0, {bound}), which this dtype represents exactly"
    return None


def _refuse_shared_memory(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Raise if a moment begins where other moments or weights do. Weights may share memory: parameters may be tied."""
    owners = {address: name for name, param in weights.items() if (address := address_of(param)) is not None}
    for name, tensor in moments.items():
        address = address_of(tensor)
        if address is not None and (owner := owners.setdefault(address, name)) != name:
            raise ValueError(f"the loaded state: {owner} and {name} share memory; expected separate memory for each")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
