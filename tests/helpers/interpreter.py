"""Triton's interpreter, which runs the kernels for GPUs on CPU tensors: made faster, and watched."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton, which `make gpu` installs")

from triton.runtime import interpreter as interpreter

Program = tuple[int, int, int]

_patched: set[str] = set()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call one device function from another.

    The interpreter patches all of ``triton.language`` at each such call, for 1 ms. Ours see what the launch has
    patched, and for Triton's own it is enough to do it once.
    """
    home = self.fn.__module__
    if not home.startswith("rowstep.") and home not in _patched:
        _patched.add(home)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel. It is NumPy that computes, and it would warn of what is not finite."""
    with np.errstate(all="ignore"):
        return _plain_launch(self, *args, **kwargs)


_plain_launch = interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = _launch
interpreter.InterpretedFunction.__call__ = _call


class Writes:
    """What the programs of each launch have written: for every address the program that has."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, dict[int, set[Program]]]] = []

    @property
    def shared(self) -> list[tuple[str, int, set[Program]]]:
        """Addresses that more than one program of a launch has written."""
        return [
            (name, address, programs)
            for name, written in self.launches
            for address, programs in written.items()
            if len(programs) > 1
        ]

    def count(self, kernel: str) -> int:
        """How many addresses the launches of a kernel have written."""
        return sum(len(written) for name, written in self.launches if name == kernel)


@contextlib.contextmanager
def recorded_writes() -> Iterator[Writes]:
    """Record the addresses that each program of every launch writes."""
    writes, builder = Writes(), interpreter.InterpreterBuilder
    store, launch = builder.create_masked_store, interpreter.GridExecutor.__call__

    def recording_store(self: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for address in places.data[mask.data].tolist():
            writes.launches[-1][1][address].add(self.grid_idx)
        return store(self, places, value, mask, *rest)

    def recording_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes.launches.append((self.fn.__name__, defaultdict(set)))
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_store", recording_store)
        patch.setattr(interpreter.GridExecutor, "__call__", recording_launch)
        yield writes
