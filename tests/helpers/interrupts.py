"""Interrupts in the middle of a call: what Ctrl-C may do, tried at one line after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from tests.helpers.deferred_cases import LONG

# Where an interrupt is tried: our own lines.
PLACES = ("/rowstep/",)


class Interrupter:
    """A trace function that acts at the ``at``-th line, as a signal's handler would; at none, it counts them."""

    def __init__(
        self, at: int | None = None, action: Callable[[], object] | None = None, places: Sequence[str] = PLACES
    ) -> None:
        self.lines, self._at, self._action, self._places = 0, at, action, places

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in self._places):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                sys.settrace(None)
                if self._action is None:
                    raise KeyboardInterrupt
                self._action()
        return self

    def run(self, action: Callable[[], object]) -> bool:
        """Do it, and tell whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def lines_of(action: Callable[[], object], points: int = 15, places: Sequence[str] = PLACES) -> range:
    """The lines of an action at which to interrupt it: about so many of them, or all if there is time."""
    counter = Interrupter(places=places)
    counter.run(action)
    assert counter.lines > 10
    return range(1, counter.lines + 1, 1 if LONG else counter.lines // points + 1)


def interrupted(
    prepare: Callable[[], tuple[Any, Callable[[], object]]], points: int = 15, places: Sequence[str] = PLACES
) -> Iterator[Any]:
    """For lines of an action the world that ``prepare`` makes for it, after an interrupt at that line."""
    for line in lines_of(prepare()[1], points, places):
        world, action = prepare()
        if Interrupter(line, places=places).run(action):
            yield world
