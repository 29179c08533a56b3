"""How many steps each row has taken: the slot ``row_step``, which ``bias_correction="row"`` reads and writes.

A parameter has the slot from its first step on, whatever gradient came with it. torch.distributed.checkpoint reads only
into slots that are there, and torch makes those of a fresh optimizer by a step with dense zeros: counts that appeared
with the first gradient of rows would have no place to be read into.

Dense gradients count nothing. As long as no other has come, the slot is zero everywhere: it is *blank*, the parameter
steps as under torch.optim.Adam, and a blank slot says as much as none. When the first gradient of rows comes, or some
rows begin anew by ``grow`` or ``reset_rows``, the counts begin with the history that the moments show.
Rows with history never count zero after that, except by ``reset_rows``, which takes the moments along. So zeros from a
file, or from another process, mean the same as zeros from here.

Telling blank from counted takes a look at all rows. The answer holds until somebody writes to the slot: torch counts
its own writes in ``_version``, and those that it cannot see, by a kernel, only ever happen to a slot that is counted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._state import State, ensure_row_steps, has_second_moment, second_moment
from ._torch_internals import writes_to


def ensure_slot(state: State, param: Tensor) -> None:
    """Make room for the counts of ``param``'s rows; nothing is counted yet."""
    if "row_step" not in state:
        state["row_step"] = torch.zeros(param.shape[:1], dtype=torch.int64, device=param.device)


class RowSteps:
    """Knows which parameters' rows are counted, without a look at all of their rows at every step."""

    def __init__(self) -> None:
        self._last_look: dict[Tensor, tuple[Tensor, float, bool]] = {}
        self._with_history: dict[Tensor, tuple[Tensor, float]] = {}

    def are_counted(self, param: Tensor, state: State) -> bool:
        """Whether this state counts rows: it has the slot, and the slot is not blank."""
        slot = state.get("row_step")
        if slot is None:
            return False
        last = self._last_look.get(param)
        if last is not None and last[0] is slot and last[1] == _writes_to(slot):
            return last[2]
        counted = bool(slot.any())
        self._last_look[param] = slot, _writes_to(slot), counted
        return counted

    def takes_rows(self, param: Tensor, state: State) -> bool:
        """Whether a dense gradient has to be counted row by row, because ``step`` does not tell what rows have taken.

        Rows have counts; or the parameter has taken steps, but none of its rows has any history of them.
        """
        if self.are_counted(param, state):
            return True
        if not has_second_moment(state) or int(state["step"]) == 0:
            return False
        slot, last = state.get("row_step"), self._with_history.get(param)
        if slot is not None and last is not None and last[0] is slot and last[1] == _writes_to(slot):
            return False
        if not second_moment(state).any():
            return True
        if slot is not None:
            self._with_history[param] = slot, _writes_to(slot)
        return False

    def before_new_rows(self, param: Tensor, state: State) -> Tensor | None:
        """What to count from, if rows have taken steps without being counted and some are about to begin anew."""
        lead = tuple(state["row_step"].shape)
        if not lead or self.are_counted(param, state) or not has_second_moment(state) or int(state["step"]) == 0:
            return None
        history = {key: slot for key, slot in state.items() if key != "row_step"}
        ensure_row_steps(history, lead)
        counts: Tensor = history["row_step"]
        return counts

    def begin(self, param: Tensor, state: State, lead: tuple[int, ...]) -> None:
        """Count rows that run over the dimensions ``lead`` from now on, if that has not begun yet."""
        if self.are_counted(param, state):
            return
        begun = {name: slot for name, slot in state.items() if name != "row_step"}
        ensure_row_steps(begun, lead)
        blank = state.get("row_step")
        if blank is not None and blank.shape == lead:  # in place: a step of the same parameter may have its address
            blank.copy_(begun["row_step"])
        else:
            state["row_step"] = begun["row_step"]
        self._last_look.pop(param, None)  # a step follows, which counts some rows, or none of them if it skips them all


def _writes_to(slot: Tensor) -> float:
    """How often torch has written to this tensor; NaN, which equals nothing, of one made in inference mode."""
    return math.nan if slot.is_inference() else writes_to(slot)
