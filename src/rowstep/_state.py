"""What is kept per parameter: names, shapes, dtypes, and where the memory comes from.

key                 shape                   dtype          present
``step``            int, or a 0-dim Tensor  float32        always; an int after a sparse step, a Tensor after a dense
``exp_avg``         the parameter's         parameter's    always
``exp_avg_sq``      the parameter's         parameter's    always
``max_exp_avg_sq``  the parameter's         parameter's    amsgrad
``row_step``        the leading dimensions  int64          bias_correction="row"; see ``_row_steps``

``step`` follows the class being replaced: torch.optim.SparseAdam keeps an int, torch.optim.Adam a Tensor. Either is
taken, so checkpoints of both load, and both load ours.
"""

from __future__ import annotations

import functools
import mmap
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# Smaller moments gain nothing: one huge page is 2 MiB, and the kernel gives none to less.
_HUGE_FROM_BYTES = 8 << 20


def zeros_like(param: Tensor) -> Tensor:
    """Zeros with the parameter's shape, dtype and strides, on huge pages where the system has them.

    A step reads rows at random, so with 4 KiB pages nearly every row costs a TLB miss. Measured at 10M x 32 with
    16,384 ids, one thread: 1.74 ms on huge pages, 2.98 ms without. Fresh anonymous memory is also zero without
    being written, which makes the first step of a large table cheap.
    """
    byte_count = param.numel() * param.element_size()
    if not param.is_cpu or byte_count < _HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    memory = mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    # Strides as preserve_format gives them: the parameter's own if it is dense, else contiguous.
    strides = torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()
    return torch.frombuffer(memory, dtype=param.dtype).as_strided(param.shape, strides)


def ensure_moments(state: State, param: Tensor, *, amsgrad: bool) -> None:
    """Create what this parameter's state does not have yet."""
    if "exp_avg" not in state:
        state.setdefault("step", 0)
        state["exp_avg"] = zeros_like(param)
        state["exp_avg_sq"] = zeros_like(param)
    if amsgrad and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = zeros_like(param)


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
    second = state["exp_avg_sq"]
    touched = second.reshape(*lead, -1).ne(0).any(dim=-1) if second.numel() else torch.zeros(lead, dtype=torch.bool)
    state["row_step"] = touched.to(torch.int64) * int(state["step"])


def misfit(state: State, param: Tensor) -> str | None:
    """Why this state cannot belong to this parameter, or None."""
    shape, device = param.shape, param.device
    for key in MOMENTS:
        if key in state and (state[key].shape != shape or state[key].device != device):
            return (
                f"its state {key!r} is {tuple(state[key].shape)} on {state[key].device}, "
                f"the parameter is {tuple(shape)} on {device}"
            )
    return None


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
