"""What is kept per parameter, by the description that the rule gives of its slots: allocation, checks, counts.

    step                one for the table   an int after a sparse step, a float Tensor after a dense one
    exp_avg             one per element     the parameter's dtype, or state_dtype
    exp_avg_sq          one per element     the same
    exp_avg_sq_row      one per row         the parameter's, but at least float32; second_moment="row"
    max_exp_avg_sq      one per element     as exp_avg_sq; with amsgrad
    row_step            one per row         int64, the steps of each row; with bias_correction="row"

``step`` follows the class being replaced: torch.optim.SparseAdam keeps an int, torch.optim.Adam a Tensor. Either is
taken, so checkpoints of both load, and both load ours. Past 2^24 float32 cannot count, and the Tensor becomes float64.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._memory import has_memory, lost_memory, overlaps_itself
from ._rules.adam import AS_TORCH, SLOTS, Kept, Slot

State = dict[str, Any]

MOMENTS = tuple(slot.name for slot in SLOTS if slot.per == "element")
BY_ROW = tuple(slot.name for slot in SLOTS if slot.per in ("row", "element"))
DECAYING = tuple(slot.name for slot in SLOTS if slot.name in BY_ROW and slot.dtype != "int64")
"""What of a row changes at every step of dense Adam, also at one without a gradient for the row."""
OF_MOMENTS = tuple(slot.name for slot in SLOTS if slot.dtype not in ("count", "int64"))

FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""What parameters, moments and gradients may be made of."""
FLOATS_IN_WORDS = "a 16-, 32- or 64-bit floating-point dtype"

LARGEST_COUNT = 1 << 53
"""Above this, counts are not exact in the float64 that a bias correction is computed in."""

_LARGEST_FLOAT32 = 1 << 24

# Smaller moments gain nothing: one huge page is 2 MiB, and the kernel gives none to less.
_HUGE_FROM_BYTES = 8 << 20


def zeros_like(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros with a tensor's shape and strides, and its dtype unless told otherwise, as ``zeros`` makes them."""
    dtype = dtype or like.dtype
    if not like.is_cpu or like.numel() * dtype.itemsize < _HUGE_FROM_BYTES:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    # Strides as preserve_format gives them: the parameter's own if it is dense, else contiguous.
    strides = torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()
    return zeros(like.shape, dtype, like.device).as_strided(like.shape, strides)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on huge pages where the system has them.

    A step reads rows at random, so with 4 KiB pages nearly every row costs a TLB miss. Measured at 10M x 32 with
    16,384 ids, one thread: 1.74 ms on huge pages, 2.98 ms without. Fresh anonymous memory is also zero without
    being written, which makes the first step of a large table cheap.
    """
    byte_count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or byte_count < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"cannot allocate {byte_count} bytes of state, {tuple(shape)} {dtype} ({error}); expected memory for two "
            "or three times the parameter. Free some memory, use a smaller table, or keep less (state_dtype, "
            "second_moment)"
        ) from error
    with contextlib.suppress(OSError):  # a hint, and some systems are built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@functools.cache
def slots_in(kept: Kept) -> tuple[Slot, ...]:
    """The slots of the moments that are kept."""
    return tuple(slot for slot in SLOTS if slot.is_in(kept))


@functools.cache
def _names_in(kept: Kept) -> tuple[str, ...]:
    return tuple(slot.name for slot in slots_in(kept))


def has_moments(state: State, kept: Kept) -> bool:
    """Whether this state has every moment that is to be kept, as it is to be kept, and no other of a table's."""
    if kept is AS_TORCH:  # by far the most frequent
        return "exp_avg" in state and "exp_avg_sq" in state and "exp_avg_sq_row" not in state
    for name in _names_in(kept):  # `all` takes twice as long
        if name not in state:
            return False
    if kept.second == "element" and kept.dtype is None:
        return "exp_avg_sq_row" not in state
    return not misplaced(state, kept)


def misplaced(state: State, kept: Kept) -> list[str]:
    """The moments in this state that are not to be kept, or not in this dtype. amsgrad's maximum may stay."""
    names = _names_in(kept)
    others = [name for name in OF_MOMENTS if name in state and name not in names and name != "max_exp_avg_sq"]
    if kept.dtype is not None:
        others += [name for name in names if name in MOMENTS and name in state and state[name].dtype != kept.dtype]
    return others


def ensure_moments(state: State, param: Tensor, kept: Kept, lead: tuple[int, ...] | None = None) -> None:
    """Create what this parameter's state does not have yet: all of it, or nothing if memory runs out.

    ``lead`` are the dimensions that rows run over, where that is known: by default, the first.
    """
    if all(name in state for name in _names_in(kept)):
        return
    new: State = {"step": state.get("step", 0)}
    for slot in slots_in(kept):
        if slot.name not in state:
            new[slot.name] = new_slot(slot, param, kept, tuple(param.shape[:1]) if lead is None else lead)
    state.update(new)


def new_slot(slot: Slot, param: Tensor, kept: Kept, lead: tuple[int, ...]) -> Tensor:
    """Zeros for a slot of this parameter, whose rows run over the dimensions ``lead``."""
    if slot.per == "element":
        return zeros_like(param, kept.dtype)
    return zeros(lead, compute_dtype(param.dtype), param.device)


def allocate(state: State, param: Tensor, kept: Kept) -> None:
    """Create the state that a first step would, with a count of 0.

    The count is a Tensor whatever the gradients will be: torch's checkpoints read either kind into a Tensor, but only
    an int into an int.
    """
    state.setdefault("step", torch.zeros((), dtype=torch.float32))
    ensure_moments(state, param, kept)


def ensure_row_steps(state: State, lead: tuple[int, ...]) -> None:
    """Create the per-row counts: for rows that have history (a loaded state, dense steps), the steps taken so far."""
    if "row_step" in state:
        return
    second, count = second_moment(state), int(state["step"])
    if count == 0 or second.numel() == 0:  # nothing to look for: of 10M x 64 the search takes 1.0 s and 0.6 GB
        state["row_step"] = torch.zeros(lead, dtype=torch.int64, device=second.device)
    else:
        state["row_step"] = second.reshape(*lead, -1).ne(0).any(dim=-1).to(torch.int64) * count


def second_moment(state: State) -> Tensor:
    """The second moment, per element or per row."""
    second: Tensor = state["exp_avg_sq_row"] if "exp_avg_sq_row" in state else state["exp_avg_sq"]
    return second


def row_slots(state: State) -> list[str]:
    """The names of what this state holds for each row of its parameter."""
    return [name for name in BY_ROW if isinstance(slot := state.get(name), Tensor) and slot.dim()]


def misfit(state: State, param: Tensor) -> str | None:
    """Why this state cannot belong to this parameter, or None."""
    return incomplete(state) or slot_misfit(state, param)


def incomplete(state: State) -> str | None:
    """Why this is not all of a state, or has no count of steps, or None."""
    if not ("exp_avg" in state and "exp_avg_sq" in state and "step" in state) and (reason := missing(state)):
        return f"its state {reason}. Load a complete state, or clear the state to start over"
    return miscount(state["step"]) if "step" in state else None


def slot_misfit(state: State, param: Tensor) -> str | None:
    """Why these moments and counts of rows cannot belong to this parameter, or None."""
    shape, device = param.shape, param.device
    if param.is_cpu and not has_memory(param):
        return lost_memory("the parameter", param)
    if overlaps_itself(param):
        return (
            f"the parameter has strides {param.stride()}, so elements may share memory; expected separate memory for "
            "each element. Use .contiguous()"
        )
    owners = {param.data_ptr(): "the weights"} if param.is_cpu else {}
    for key in MOMENTS:
        if key in state:
            moment = state[key]
            if not isinstance(moment, Tensor) or moment.shape != shape or moment.device != device:
                return (
                    f"its state {key!r} is {described(moment)}; expected the shape and device of the parameter, "
                    f"which is {described(param)}"
                )
            if reason := moment_flaw(moment):
                return f"its state {key!r} is {described(moment)}; expected {reason}"
            if moment.is_cpu and not has_memory(moment):
                return lost_memory(f"its state {key!r}", moment)
            if owners and moment.numel() and (owner := owners.setdefault(moment.data_ptr(), repr(key))) != repr(key):
                return f"its state {key!r} shares memory with {owner}; expected memory of its own"
    for key in ("exp_avg_sq_row", "row_step"):
        if key in state and (reason := by_row_flaw(state[key], param)):
            return f"its state {key!r} is {described(state[key])}; expected {reason}"
    if "exp_avg_sq_row" in state:
        row = state["exp_avg_sq_row"]
        if row.dtype not in FLOATS:
            return f"its state 'exp_avg_sq_row' is {described(row)}; expected {FLOATS_IN_WORDS}"
        if owners and row.numel() and (owner := owners.setdefault(row.data_ptr(), "itself")) != "itself":
            return f"its state 'exp_avg_sq_row' shares memory with {owner}; expected memory of its own"
    if "row_step" in state and state["row_step"].dtype != torch.int64:
        return f"its state 'row_step' is {described(state['row_step'])}; expected a dense tensor of int64"
    return None


def by_row_flaw(slot: object, param: Tensor) -> str | None:
    """What a slot with a number for each row should be and this is not, or None."""
    shape = param.shape
    if not isinstance(slot, Tensor) or slot.shape != shape[: slot.dim()] or slot.device != param.device:
        return f"the leading dimensions and device of the parameter, which is {described(param)}"
    if slot.layout != torch.strided:
        return "a dense tensor"
    if slot.is_cpu and (not has_memory(slot) or overlaps_itself(slot)):
        return "separate memory for each element"
    return None


def missing(state: State) -> str | None:
    """Which slot is there without another that it needs, in words, or None."""
    there = [name for name in OF_MOMENTS if name in state]
    if not there:
        return None
    for other in (*(("exp_avg_sq_row",) if "exp_avg_sq_row" in state else ("exp_avg", "exp_avg_sq")), "step"):
        if other not in state:
            return f"has {there[0]!r} but no {other!r}; expected both"
    return None


def moment_flaw(moment: object) -> str | None:
    """What a moment should be and this is not, or None."""
    if not isinstance(moment, Tensor) or moment.layout != torch.strided:
        return "a dense tensor"
    if moment.dtype not in FLOATS:
        return FLOATS_IN_WORDS
    return "separate memory for each element" if overlaps_itself(moment) else None


def described(value: object) -> str:
    """What was found, for messages: of a tensor its shape, dtype and device, of anything else its beginning."""
    if not isinstance(value, Tensor):
        return reprlib.repr(value)
    layout = "" if value.layout == torch.strided else f"{value.layout} "
    return f"{tuple(value.shape)} {layout}{value.dtype} on {value.device}"


def miscount(step: object) -> str | None:
    """Why this is no count of steps, or None. What lies on another device is not waited for."""
    if type(step) is int and 0 <= step < LARGEST_COUNT:  # by far the most frequent
        return None
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


def set_count(state: State, count: int) -> None:
    """Write a Tensor ``step`` anew, in place while its dtype can hold the count."""
    step = state["step"]
    if isinstance(step, Tensor) and (
        (step.dtype is torch.float32 and count <= _LARGEST_FLOAT32)
        or (step.is_floating_point() and count <= largest_count(step.dtype))
    ):
        step.fill_(count)
    else:
        state["step"] = count_tensor(count)


def count_tensor(count: float, device: torch.device | None = None) -> Tensor:
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
