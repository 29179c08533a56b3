"""The updates once more, on memory with inaccessible neighbours: a program, since a mistake would end it.

Each case's name is printed before it runs, so that the last one tells what was wrong.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowstep import arrays
from rowstep._backends import Backend, LateRows, Outcome, admit, admit_notes, admit_state
from rowstep._gradient import RowGradient
from rowstep._rules.adam import Kept, Scalars
from rowstep._schedule import Schedule
from rowstep._state import State
from tests.helpers.deferred_cases import LONG
from tests.helpers.guard_pages import Guard, GuardedNumpy

# Any: what these modules have imported is changed below.
compiled: Any = import_module("rowstep._backends.numba")
compiled_arrays: Any = import_module("rowstep.arrays._compiled")
kept_memory: Any = import_module("rowstep._kernels.workspace")
backend = Backend(compiled)

WIDTHS = range(1, 71) if LONG else (1, 2, 3, 8, 17, 33, 64, 70)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROWS = 41

RULE = Scalars(0.9, 0.999, 1e-8, 0.1)
ALL_OPTIONS = Scalars(0.9, 0.999, 1e-8, 0.1, True, None, 0.1, True, False, True, Kept(amsgrad=True))
BY_ROW = Scalars(0.9, 0.999, 1e-8, 0.1, kept=Kept("row"))
FACTORED = Scalars(0.0, 0.999, 1e-8, 0.1, decay=0.1, kept=Kept("factored", first=False))
RULES = [RULE, ALL_OPTIONS, FACTORED]
if LONG:  # amsgrad, counts and skipping decide what is read and written where; the others come along
    RULES += [BY_ROW]
    RULES += [
        replace(
            RULE,
            maximize=skip,
            shrink=0.9 if amsgrad else None,
            per_row=per_row,
            as_dense=amsgrad != skip,
            skip_nonfinite=skip,
            kept=Kept(amsgrad=amsgrad),
        )
        for amsgrad, per_row, skip in itertools.product((False, True), repeat=3)
    ]


class Operands:
    """A table, its state and a gradient, on memory of this guard or, without one, anywhere."""

    def __init__(
        self, guard: Guard | None, width: int, dtype: torch.dtype, rows: Tensor, kept: Kept | None = None
    ) -> None:
        place: Callable[[Tensor], Tensor] = torch.clone if guard is None else guard.like
        torch.manual_seed(width)
        self.param = place(torch.randn(ROWS, width).to(dtype))
        self.state: State = {"exp_avg": place(torch.randn(ROWS, width).to(dtype))}
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            self.state[key] = place(torch.rand(ROWS, width).to(dtype))
        self.state["row_step"] = place(torch.ones(ROWS, dtype=torch.int64))
        if kept is not None and kept.second != "element":
            self.state = by_row(kept, width, dtype, place)
        self.since = place(torch.zeros(ROWS, dtype=torch.int32))
        self.rows = place(rows)
        values = place(torch.randn(len(rows), width).to(dtype))
        self.gradient = RowGradient(self.rows, values, (ROWS,), ROWS, width)

    def assert_same(self, other: Operands) -> None:
        for key, value in ({"param": self.param, "since": self.since} | self.state).items():
            expected = getattr(other, key, None)
            assert torch.equal(value, other.state[key] if expected is None else expected), key


def by_row(kept: Kept, width: int, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> State:
    wide = torch.promote_types(dtype, torch.float32)
    state: State = {"exp_avg_sq_row": place(torch.rand(ROWS, dtype=wide))}
    if kept.first:
        state["exp_avg"] = place(torch.randn(ROWS, width).to(dtype))
    if kept.second == "factored":
        total = state["exp_avg_sq_row"].sum(dtype=torch.float64)
        state |= {"exp_avg_sq_column": place(torch.rand(width, dtype=wide)), "exp_avg_sq_sum": total}
    return state


def ids() -> list[Tensor]:
    """Row numbers: the ends of the table, duplicates, one alone, sorted and not."""
    last = ROWS - 1
    return [
        torch.tensor([last, 0, last, 5, 5, 0, last]),
        torch.tensor([last]),
        torch.arange(ROWS),
        torch.randint(ROWS, (70,)),
    ]


def shapes() -> Iterator[tuple[int, Tensor]]:
    """Widths and row numbers; on two threads, where a launch takes milliseconds if others want the cores, fewer."""
    return itertools.product(WIDTHS if LONG or torch.get_num_threads() == 1 else WIDTHS[2::3], ids())


_guard = Guard("end")


def cases(first: Iterable[Any], second: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Each of ``first`` with each of ``second``, at both edges and on one and two threads.

    Every pair is a kernel to compile. Unless there is time, only float32 meets all of ``second`` and two threads, and
    bfloat16 none.
    """
    global _guard

    for edge, threads, one, two in itertools.product(("end", "start"), (1, 2), first, second):
        if not (LONG or "float32" in str(one) or (threads == 1 and two == second[0] and "bfloat" not in str(one))):
            continue
        torch.set_num_threads(threads)
        compiled.PARALLEL_FROM_BYTES = 0 if threads > 1 else math.inf
        compiled_arrays.PARALLEL_FROM_BYTES = compiled.PARALLEL_FROM_BYTES
        print(edge, threads, one, two, flush=True)
        _guard = Guard(edge)
        kept_memory.workspace = compiled.workspace = compiled_arrays.workspace = kept_memory.Workspace()
        yield one, two
        _guard.close()


def updates() -> None:
    for dtype, scalars in cases(DTYPES, RULES):
        for width, rows in shapes():
            kept = scalars.kept
            plain, guarded = Operands(None, width, dtype, rows, kept), Operands(_guard, width, dtype, rows, kept)
            for each in (plain, guarded):
                at = admit_state(each.param, each.state)
                update = admit(each.param, each.state, each.gradient, at, scalars, admit_notes(each.since, (ROWS,), 3))
                assert update.at is not None
                backend.take_columns(update, lambda sums: sums)
                (batch,) = backend.batches([update])
                batch.update(Outcome())
            guarded.assert_same(plain)
            assert backend.first_outside(guarded.rows, ROWS) is None
    for dtype, power in cases(DTYPES, (2.0, math.inf, 3.0)):
        for width, rows in shapes():
            plain, guarded = Operands(None, width, dtype, rows), Operands(_guard, width, dtype, rows)
            assert backend.norm(plain.gradient, power) == backend.norm(guarded.gradient, power)
            assert not backend.has_nonfinite(guarded.gradient)


def schedule(*, amsgrad: bool) -> Schedule:
    made = Schedule((0.9, 0.999), 1e-8, amsgrad=amsgrad, step=0, tolerance=1e-9)
    for _ in range(3):
        made.advance(0.1, 0.01)
    for owner in (made, made._timeline):
        for name, value in list(vars(owner).items()):
            if isinstance(value, np.ndarray):
                setattr(owner, name, _guard.array(value))
    window = made._window
    made._window = type(window)(window.sums, window.first, _guard.array(window.table))
    return made


def deferred() -> None:
    kinds = [Kept(), Kept(amsgrad=True), Kept("row"), *([Kept("row", first=False)] if LONG else [])]
    for dtype, kept in cases(DTYPES, kinds):
        coefficients = schedule(amsgrad=kept.amsgrad)
        for width, rows in shapes():
            plain, guarded = Operands(None, width, dtype, rows, kept), Operands(_guard, width, dtype, rows, kept)
            if width % 2:  # small second moments: the sum goes term by term
                for each, name in itertools.product(
                    (plain, guarded), ("exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row")
                ):
                    if name in each.state:
                        each.state[name].mul_(1e-6)
            for each in (plain, guarded):
                late = LateRows(each.param, each.state, each.since, coefficients, kept)
                backend.catch_up(late, each.rows)
                backend.catch_up(late, range(7, ROWS))
            guarded.assert_same(plain)
            notes = admit_notes(guarded.since, (ROWS,))
            assert backend.look_at(guarded.gradient, notes, 3) == (None, 0)
            assert backend.look_at(guarded.gradient, notes, 8) == (None, len(rows))


def numpy_arrays() -> None:
    for dtype, weight_decay in cases(("float16", "float32", "float64"), (0.0, 0.1)):
        for width, rows in shapes():
            rng = np.random.default_rng(width)
            numbers = rows.numpy()
            operands = [rng.normal(size=(count, width)).astype(dtype) for count in (ROWS, ROWS, len(rows))]
            results = []
            for place in (copy.copy, _guard.array):
                param, whole, some = map(place, operands)
                optimizer = arrays.Adam(weight_decay=weight_decay)
                optimizer.step("a", param, whole)
                moments = optimizer._moments["a"]
                optimizer._moments["a"] = type(moments)(*map(place, moments))
                optimizer.step("a", param, whole)
                optimizer.step_rows("a", param, place(numbers), some)
                results.append(param)
            assert np.array_equal(*results)


def overruns() -> None:
    """What no kernel may do ends a process: this shows that the others would be found out."""
    for edge in ("start", "end"):
        memory = Guard(edge).buffer(60)
        beyond = ctypes.addressof(memory) + (60 if edge == "end" else -1)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            ctypes.string_at(beyond, 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


if __name__ == "__main__":
    overruns()
    kept_memory.np = GuardedNumpy(lambda: _guard)
    updates()
    deferred()
    numpy_arrays()
    print("all held")
