"""What is kept per parameter, by the description that the rule gives of its slots: allocation, checks, counts.

    step              one for the table   an int after a sparse step, a float Tensor after a dense one
    exp_avg           one per element     the parameter's dtype
    exp_avg_sq        one per element     the parameter's dtype
    max_exp_avg_sq    one per element     the parameter's dtype; with amsgrad
    row_step          one per row         int64; with bias_correction="row", see ``_row_steps``

``step`` follows the class being replaced: torch.optim.SparseAdam keeps an int, torch.optim.Adam a Tensor. Either is
taken, so checkpoints of both load, and both load ours. Past 2^24 float32 cannot count, and the Tensor becomes float64.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import reprlib
from typing import Any

import torch
from torch import Tensor

from ._memory import has_memory, lost_memory, overlaps_itself
from ._rules.adam import SLOTS

State = dict[str, Any]

MOMENTS = tuple(slot.name for slot in SLOTS if slot.per == "element")
OPTIONAL = tuple(slot.name for slot in SLOTS if slot.option is not None)
_BY_ROW = tuple(slot.name for slot in SLOTS if slot.per != "table")
_ALWAYS = (*(slot.name for slot in SLOTS if slot.option is None and slot.per == "element"), "step")

FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
"""What parameters, moments and gradients may be made of."""
FLOATS_IN_WORDS = "a 16-, 32- or 64-bit floating-point dtype"

LARGEST_COUNT = 1 << 53
"""Above this, counts are not exact in the float64 that a bias correction is computed in."""

_LARGEST_FLOAT32 = 1 << 24

# Smaller moments gain nothing: one huge page is 2 MiB, and the kernel gives none to less.
_HUGE_FROM_BYTES = 8 << 20


def lasting() -> contextlib.AbstractContextManager[Any]:
    """For tensors that outlive a block of inference, if this is one.

    Elsewhere it does nothing. An interrupt that strikes where ``torch.inference_mode`` ends leaves autograd off.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def zeros_like(param: Tensor) -> Tensor:
    """Zeros with the parameter's shape, dtype and strides, on huge pages where the system has them.

    A step reads rows at random, so with 4 KiB pages nearly every row costs a TLB miss. Measured at 10M x 32 with
    16,384 ids, one thread: 1.74 ms on huge pages, 2.98 ms without. Fresh anonymous memory is also zero without
    being written, which makes the first step of a large table cheap.
    """
    byte_count = param.nbytes
    if not param.is_cpu or byte_count < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    try:
        memory = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"cannot allocate {byte_count} bytes of state for a parameter that is {described(param)} ({error}); "
            "expected memory for two or three times the parameter. Free some memory, or use a smaller table or dtype"
        ) from error
    with contextlib.suppress(OSError):  # a hint, and some systems are built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Strides as preserve_format gives them: the parameter's own if it is dense, else contiguous.
    strides = torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()
    return torch.frombuffer(memory, dtype=param.dtype).as_strided(param.shape, strides)


def has_moments(state: State, *, amsgrad: bool) -> bool:
    """Whether this state has every moment that the options ask for."""
    return "exp_avg" in state and (not amsgrad or "max_exp_avg_sq" in state)


def ensure_moments(state: State, param: Tensor, *, amsgrad: bool) -> None:
    """Create what this parameter's state does not have yet: all of it, or nothing if memory runs out."""
    if has_moments(state, amsgrad=amsgrad):
        return
    with lasting():
        new: State = {"step": state.get("step", 0)}
        for slot in SLOTS:
            is_wanted = slot.option is None or (amsgrad and slot.option[0] == "amsgrad")
            if slot.per == "element" and is_wanted and slot.name not in state:
                new[slot.name] = zeros_like(param)
        state.update(new)


def allocate(state: State, param: Tensor, *, amsgrad: bool) -> None:
    """Create the state that a first step would, with a count of 0.

    The count is a Tensor whatever the gradients will be: torch's checkpoints read either kind into a Tensor, but only
    an int into an int.
    """
    state.setdefault("step", torch.zeros((), dtype=torch.float32))
    ensure_moments(state, param, amsgrad=amsgrad)


def ensure_row_steps(state: State, lead: tuple[int, ...]) -> None:
    """Create the per-row counts: for rows that have history (a loaded state, dense steps), the steps taken so far."""
    if "row_step" in state:
        return
    second, count = state["exp_avg_sq"], int(state["step"])
    if count == 0 or second.numel() == 0:  # nothing to look for: of 10M x 64 the search takes 1.0 s and 0.6 GB
        state["row_step"] = torch.zeros(lead, dtype=torch.int64, device=second.device)
    else:
        state["row_step"] = second.reshape(*lead, -1).ne(0).any(dim=-1).to(torch.int64) * count


def row_slots(state: State) -> list[str]:
    """The names of what this state holds for each row of its parameter."""
    return [name for name in _BY_ROW if isinstance(slot := state.get(name), Tensor) and slot.dim()]


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
    if "row_step" in state:
        counts = state["row_step"]
        if not isinstance(counts, Tensor) or counts.shape != shape[: counts.dim()] or counts.device != device:
            return (
                f"its state 'row_step' is {described(counts)}; expected the leading dimensions and device of the "
                f"parameter, which is {described(param)}"
            )
        if counts.dtype != torch.int64 or counts.layout != torch.strided:
            return f"its state 'row_step' is {described(counts)}; expected a dense tensor of int64"
        if counts.is_cpu and (not has_memory(counts) or overlaps_itself(counts)):
            return f"its state 'row_step' is {described(counts)}; expected separate memory for each element"
    return None


def missing(state: State) -> str | None:
    """Which slot is there without another that it needs, in words, or None."""
    for name in MOMENTS:
        if name in state:
            for other in _ALWAYS:
                if other not in state:
                    return f"has {name!r} but no {other!r}; expected both"
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
    with lasting():
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
