"""What is kept per parameter: one description, by which state is made, checked and converted.

    step                one for the table   an int after a sparse step, a float Tensor after a dense one
    exp_avg             one per element     the parameter's dtype, or state_dtype
    exp_avg_sq          one per element     the same
    exp_avg_sq_row      one per row         the parameter's, but at least float32; second_moment="row"
    max_exp_avg_sq      one per element     as exp_avg_sq; with amsgrad
    row_step            one per row         int64, the steps of each row; with bias_correction="row"

Rows run over the first dimension of a parameter. ``step`` follows the class being replaced: torch.optim.SparseAdam
keeps an int, torch.optim.Adam a Tensor. Either is taken, so checkpoints of both load, and both load ours. Past 2^24
float32 cannot count, and the Tensor becomes float64.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._memory import address_of, has_memory, lost_memory, overlaps_itself, zeros, zeros_like

State = dict[str, Any]

FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""What parameters, moments and gradients may be made of."""
FLOATS_IN_WORDS = "a 16-, 32- or 64-bit floating-point dtype"

LARGEST_COUNT = 1 << 53
"""Above this, counts are not exact in the float64 that a bias correction is computed in."""

_LARGEST_FLOAT32 = 1 << 24


class Slot(NamedTuple):
    """One thing that is kept for every row of a parameter."""

    name: str
    is_per_row: bool
    """One number for each row; otherwise one for each element."""
    is_count: bool
    option: tuple[str, Any] | None
    """The option of a group, and its value, with which the slot exists; None if that is not all it takes."""


SLOTS = {
    name: Slot(name, *rest)
    for name, *rest in (
        ("exp_avg", False, False, None),
        ("exp_avg_sq", False, False, None),
        ("exp_avg_sq_row", True, False, None),
        ("max_exp_avg_sq", False, False, ("amsgrad", True)),
        ("row_step", True, True, ("bias_correction", "row")),
    )
}
"""In the order of the equations: m, v or r, u and, per row, the t of its own."""

ELEMENTWISE = tuple(slot.name for slot in SLOTS.values() if not slot.is_per_row)
MOMENTS = tuple(slot.name for slot in SLOTS.values() if not slot.is_count)
"""What changes at every step of dense Adam, also where a row has no gradient."""


class StateSpec:
    """What the options of a group make a parameter keep. The same options give the same object."""

    def __init__(
        self, second: str, has_momentum: bool, amsgrad: bool, is_counted: bool, dtype: torch.dtype | None, rounds: bool
    ) -> None:
        self.second, self.has_momentum, self.amsgrad, self.is_counted = second, has_momentum, amsgrad, is_counted
        self.dtype = dtype
        """The dtype of numbers per element; None stands for the parameter's own."""
        self.is_by_row = second == "row"
        self.is_rounded = rounds if dtype is None else dtype.itemsize == 2
        """Whether moments of 16 bits are rounded at random: if those were asked for, or if the weights are."""
        there = {
            "exp_avg": has_momentum, "exp_avg_sq": not self.is_by_row, "exp_avg_sq_row": self.is_by_row,
            "max_exp_avg_sq": amsgrad, "row_step": is_counted,
        }  # fmt: skip
        self.slots = tuple(slot for slot in SLOTS.values() if there[slot.name])
        self.names = tuple(slot.name for slot in self.slots)

    @staticmethod
    def under(group: Mapping[str, Any], *, in_a_table: bool = True) -> StateSpec:
        """What the options of a group ask for. A parameter that is no table is kept as torch keeps it."""
        amsgrad, is_counted = bool(group["amsgrad"]), group.get("bias_correction") == "row"
        rounds = bool(group["stochastic_rounding"])
        if not in_a_table:
            return _state_spec("element", True, amsgrad, is_counted, None, rounds)
        second = group["second_moment"]
        has_momentum = second == "element" or float(group["betas"][0]) != 0
        return _state_spec(second, has_momentum, amsgrad, is_counted, group["state_dtype"], rounds)

    def rounds_moments_of(self, *dtypes: torch.dtype) -> bool:
        """Whether moments are rounded at random that are kept in these dtypes."""
        return self.is_rounded and any(dtype.itemsize == 2 for dtype in dtypes)

    def is_met_by(self, state: State) -> bool:
        """Whether this state has every slot, as it is to be kept, and no other second moment."""
        for name in self.names:
            if name not in state:
                return False
        is_cast = self.dtype is None or all(
            state[slot.name].dtype == self.dtype for slot in self.slots if not slot.is_per_row
        )
        return is_cast and not any(name in state for name in _others(self))

    def holds_table_state(self, state: State, param: Tensor) -> bool:
        """Whether this state is one that torch's Adam cannot step, because it has been a table's."""
        if "exp_avg_sq_row" in state:
            return True
        is_another = self.dtype not in (None, param.dtype)
        return is_another and getattr(state.get("exp_avg"), "dtype", None) == self.dtype

    def made_of(
        self, state: State, param: Tensor, make: Callable[..., Tensor] | None = None
    ) -> tuple[State, list[str]]:
        """Every slot, from what this state has: as it is, converted, or new; and what that loses, in words.

        ``make(name, shape, dtype)`` makes new ones of zeros, if they do not belong into memory.

        All of it is made before the caller changes anything: memory may run out.
        """
        made: State = {"step": state.get("step", 0)}
        lost = []
        for slot in self.slots:
            there = state.get(slot.name)
            dtype = None if slot.is_per_row else self.dtype
            if there is None:
                made[slot.name] = self._new(slot, state, param, make)
                if slot.name == "exp_avg_sq_row" and "exp_avg_sq" in state:
                    lost.append("'exp_avg_sq' reduced to its mean over each row")
            elif dtype in (None, there.dtype):
                made[slot.name] = there
            else:
                made[slot.name] = zeros_like(there, dtype).copy_(there)
                lost.append(f"{slot.name!r} rounded to {dtype}")
        if "exp_avg" in state and not self.has_momentum:
            lost.append("'exp_avg' dropped, because beta1 is 0")
        return made, lost if int(made["step"]) else []

    def _new(self, slot: Slot, state: State, param: Tensor, make: Callable[..., Tensor] | None) -> Tensor:
        """A slot for a state that does not have it."""
        rows = tuple(param.shape[:1])
        if slot.name == "row_step" and int(state.get("step", 0)) and param.numel():
            # Rows that have history, of a loaded state or of dense steps, have taken every step so far.
            second = state["exp_avg_sq_row"] if "exp_avg_sq_row" in state else state["exp_avg_sq"]
            seen: Tensor = second.reshape(*rows, -1).ne(0).any(dim=-1)
            return seen.to(torch.int64) * int(state["step"])
        if slot.name == "exp_avg_sq_row" and "exp_avg_sq" in state and param.numel():
            table: Tensor = state["exp_avg_sq"].reshape(*rows, -1)
            return table.mean(dim=-1, dtype=compute_dtype(param.dtype))
        if slot.is_per_row:
            dtype = torch.int64 if slot.is_count else compute_dtype(param.dtype)
        else:  # amsgrad's maximum may be made beside a second moment of another dtype than the weights'
            dtype = self.dtype or state.get("exp_avg_sq", param).dtype
        if make is not None:
            return make(slot.name, rows if slot.is_per_row else param.shape, dtype)
        return zeros(rows, dtype, param.device) if slot.is_per_row else zeros_like(param, dtype)

    def install(self, state: State, made: State) -> None:
        """Make what ``made_of`` has made the state, and drop second moments and first ones that are not kept."""
        for name in _others(self):
            state.pop(name, None)
        state.update(made)


_state_spec = functools.cache(StateSpec)


@functools.cache
def _others(spec: StateSpec) -> tuple[str, ...]:
    """Moments that are not beside those of this spec. amsgrad's maximum may stay, as it does in torch."""
    return tuple(name for name in MOMENTS if name not in spec.names and name != "max_exp_avg_sq")


def row_moment_flaw(state: State, spec: StateSpec) -> str | None:
    """Why there cannot be one second moment per row where one per element is to be kept, or None."""
    if spec.is_by_row or "exp_avg_sq_row" not in state:
        return None
    return (
        "its state has 'exp_avg_sq_row', a second moment per row; expected 'exp_avg_sq', because second_moment is "
        "'element'. Create the optimizer with second_moment='row', or clear the state to start over"
    )


def row_slots(state: State) -> list[str]:
    """The names of what this state holds for each row of its parameter."""
    return [name for name in SLOTS if isinstance(slot := state.get(name), Tensor) and slot.dim()]


def misfit(state: State, param: Tensor) -> str | None:
    """Why this state cannot belong to this parameter, or None."""
    if reason := missing(state):
        return f"its state {reason}. Load a complete state, or clear the state to start over"
    if "step" in state and (reason := miscount(state["step"])):
        return reason
    if param.is_meta:
        return (
            "the parameter is on the meta device, where nothing has numbers; expected one with data. Create the "
            "optimizer once the model has memory and weights: model.to_empty(device='cpu') makes new parameters"
        )
    if param.is_cpu and not has_memory(param):
        return lost_memory("the parameter", param)
    if overlaps_itself(param):
        return (
            f"the parameter has strides {param.stride()}, so elements may share memory; expected separate memory for "
            "each element. Use .contiguous()"
        )
    owners = {address_of(param): "the weights"}
    for name in SLOTS:
        if name not in state:
            continue
        slot = state[name]
        if reason := slot_flaw(name, slot, param):
            return f"its state {name!r} is {described(slot)}; expected {reason}"
        if slot.is_cpu and not has_memory(slot):
            return lost_memory(f"its state {name!r}", slot)
        address = address_of(slot)
        if address is not None and (owner := owners.setdefault(address, name)) != name:
            return f"its state {name!r} shares memory with {owner}; expected memory of its own"
    return None


def slot_flaw(name: str, slot: object, param: Tensor, *, is_loaded: bool = False) -> str | None:
    """What a slot of this parameter should be and this is not, or None.

    One that is about to be loaded may be on another device, and counts may have gone through a floating-point dtype.
    """
    kind = SLOTS[name]
    if not isinstance(slot, Tensor) or slot.layout != torch.strided:
        return "a dense tensor"
    if slot.is_meta and not param.is_meta:
        return "a tensor with data"
    shape = param.shape[:1] if kind.is_per_row else param.shape
    if slot.shape != shape:
        return f"shape {tuple(shape)}, for a parameter of shape {tuple(param.shape)}"
    if not is_loaded and slot.device != param.device:
        return f"the parameter's device, {param.device}"
    if overlaps_itself(slot):
        return "separate memory for each element"
    if kind.is_count:
        return _counts_flaw(slot) if is_loaded else None if slot.dtype == torch.int64 else "a dense tensor of int64"
    return None if slot.dtype in FLOATS else FLOATS_IN_WORDS


# The integers that torch computes with. It counts in floating point too; FLOATS are those it can compare with others.
_WHOLE_NUMBERS = frozenset([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])


def _counts_flaw(counts: Tensor) -> str | None:
    if counts.dtype not in _WHOLE_NUMBERS | FLOATS:
        return "a dense tensor of int64"
    # torch's classes cast counts to the parameter's dtype, which has every whole number up to some bound only.
    bound = int(largest_count(counts.dtype)) if counts.is_floating_point() else LARGEST_COUNT
    whole = counts.to(torch.int64)  # what is not finite becomes something else; and int32 cannot compare with 2^53
    if not bool(((whole >= 0) & (whole < bound) & (whole == counts)).all()):
        return f"integers in [0, {bound}), which this dtype represents exactly"
    return None


def missing(state: State) -> str | None:
    """Which slot is there without another that it needs, in words, or None."""
    there = [name for name in MOMENTS if name in state]
    if not there:
        return None
    for other in (*(("exp_avg_sq_row",) if "exp_avg_sq_row" in state else ("exp_avg", "exp_avg_sq")), "step"):
        if other not in state:
            return f"has {there[0]!r} but no {other!r}; expected both"
    return None


def described(value: object) -> str:
    """What was found, for messages: of a tensor its shape, dtype and device, of anything else its beginning."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    layout = "" if value.layout == torch.strided else f"{value.layout} "
    return f"{tuple(value.shape)} {layout}{value.dtype} on {value.device}"


# Counting steps


def steps_taken(state: State) -> int:
    """How many steps a parameter with this state has taken; raise if that is no number of steps."""
    step = state.get("step", 0)
    if type(step) is int and 0 <= step < LARGEST_COUNT:  # by far the most frequent
        return step
    if reason := miscount(step):
        raise ValueError(reason)
    return int(step)


def miscount(step: object) -> str | None:
    """Why this is no count of steps, or None. What lies on another device is not waited for."""
    number: object = step
    if isinstance(step, Tensor) and step.numel() == 1 and step.layout == torch.strided and not step.is_meta:
        if not step.is_cpu:
            return None
        number = step.item() if has_memory(step) else None
    if isinstance(number, bool):  # a kind of int to Python
        number = None
    if isinstance(number, (int, float)) and 0 <= number < LARGEST_COUNT and number == int(number):
        return None
    found = number if isinstance(number, (int, float)) else step
    return f"its state 'step' is {described(found)}; expected an integer step count in [0, 2^53)"


def counting(state: State, count: int) -> tuple[Any, ...]:
    """A function that writes a Tensor ``step`` anew, and its arguments; in place while its dtype can hold the count."""
    step = state["step"]
    if isinstance(step, Tensor) and (
        (step.dtype is torch.float32 and count <= _LARGEST_FLOAT32)
        or (step.is_floating_point() and count <= largest_count(step.dtype))
    ):
        return step.fill_, count
    return state.__setitem__, "step", count_tensor(count)


_CPU = torch.device("cpu")


def count_tensor(count: float, device: torch.device = _CPU) -> Tensor:
    """A ``step`` as torch.optim.Adam keeps it, and from 2^24 on in the dtype that can go on counting."""
    dtype = torch.float32 if count < largest_count(torch.float32) else torch.float64
    return torch.tensor(float(count), dtype=dtype, device=device)


def largest_count(dtype: torch.dtype) -> float:
    """The largest count that this dtype can reach by adding 1."""
    return 2 / torch.finfo(dtype).eps


@functools.cache
def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype the arithmetic runs in: the widest of what takes part, and never less than float32.

    16-bit duplicates summed in 16 bits lose everything beyond 256 equal addends (bfloat16) or overflow (float16),
    and the default eps rounds to 0 in float16, so that a first step with an explicit zero would divide 0 by 0.
    """
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest
