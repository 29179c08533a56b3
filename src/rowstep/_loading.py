"""What a loaded state has to bring along.

torch.distributed.checkpoint restores the options of a group as they were saved, but of the state only what the
optimizer it loads into has slots for. Slots follow the options, so an optimizer that was made with others comes out
with options whose state stayed in the file. torch's Adam then fails at its next step; here the slot would quietly begin
anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._state import State

_SLOT_OF_OPTION = (("bias_correction", "row", "row_step"), ("amsgrad", True, "max_exp_avg_sq"))


def check_slots(own: Mapping[str, Any], loaded: Mapping[str, Any], states: Sequence[State], where: str) -> None:
    """Raise if a group with the options ``own`` is to become ``loaded``, and what that needs has got lost."""
    for option, value, slot in _SLOT_OF_OPTION:
        if option not in own or own[option] == value or loaded.get(option) != value:
            continue
        has_history = [state for state in states if "exp_avg" in state and state.get("step") != 0]
        if has_history and not any(slot in state for state in has_history):
            raise ValueError(
                f"no state has {slot!r}, though {option}={value!r} was saved{where}; expected it with the moments: "
                "a checkpoint is read only into state that exists, so "
                f"make the optimizer with {option}={value!r} before you read into it"
            )


def tidied(state: State) -> State:
    """What was meant by a state that has been through torch's hands."""
    # Of what a flattened state dict lacks, torch makes an empty dict.
    tidy = {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
    counts = tidy.get("row_step")
    if isinstance(counts, Tensor) and counts.is_floating_point():
        tidy["row_step"] = _whole_numbers(counts)
    return tidy


def _whole_numbers(counts: Tensor) -> Tensor:
    """Counts that torch has cast to the parameter's dtype, as it does with all state, while that lost nothing."""
    largest, exact_below = counts.max().item() if counts.numel() else 0.0, 2 / torch.finfo(counts.dtype).eps
    if not largest < exact_below:
        raise ValueError(
            f"'row_step' came as {counts.dtype}, with counts up to {largest:.0f}; expected int64, or counts below "
            f"{exact_below:.0f}, where that dtype has every whole number; load the state without torch's own classes "
            "in between, which cast it"
        )
    return counts.to(torch.int64)
