"""Convert a state to what the options keep, when torch's is loaded or when options change in mid-run.

    element to row      r_i is the mean over the row
    to state_dtype      moments are rounded
    without momentum    the first moment is dropped

A first moment that was not kept begins with 0. Row to element is refused: one number cannot become many.
"""

from __future__ import annotations

from torch import Tensor

from ._rules.adam import Kept
from ._state import State, compute_dtype, ensure_moments, has_moments, misplaced, slots_in, zeros_like


def row_moment_flaw(state: State, second_moment: str) -> str | None:
    """Why there cannot be one second moment per row where one per element is to be kept, or None."""
    if second_moment == "row" or "exp_avg_sq_row" not in state:
        return None
    return (
        "its state has 'exp_avg_sq_row', a second moment per row; expected 'exp_avg_sq', because second_moment is "
        "'element'. Create the optimizer with second_moment='row', or clear the state to start over"
    )


def convert(state: State, param: Tensor, kept: Kept, lead: tuple[int, ...]) -> list[str]:
    """Convert the state of a parameter whose rows run over ``lead``; return a description of each lossy conversion.

    What does not exist yet is created. All is made before anything is changed: memory may run out.
    """
    if has_moments(state, kept):
        return []
    if not any(name in state for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row")):
        ensure_moments(state, param, kept, lead)
        return []
    new: State = {}
    words = []
    if kept.second == "row" and "exp_avg_sq_row" not in state:
        table = state["exp_avg_sq"].reshape(*lead, -1)
        new["exp_avg_sq_row"] = table.mean(dim=-1, dtype=compute_dtype(param.dtype))
        words.append("'exp_avg_sq' reduced to its mean over each row")
    for slot in slots_in(kept):
        before = state.get(slot.name)
        if slot.per == "element" and before is not None and kept.dtype not in (None, before.dtype):
            new[slot.name] = zeros_like(before, kept.dtype).copy_(before)
            words.append(f"{slot.name!r} rounded to {kept.dtype}")
    if "exp_avg" in state and not kept.first:
        words.append("'exp_avg' dropped, because beta1 is 0")
    made = state | new
    dropped = misplaced(made, kept)
    ensure_moments(made, param, kept, lead)
    for name in dropped:
        if name not in new:
            made.pop(name, None)
            state.pop(name, None)
    state.update(made)
    return words if int(state["step"]) else []
