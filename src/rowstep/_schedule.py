"""The coefficients of a row's deferred steps, for every gap at once.

``rowstep._deferred`` derives what is computed here. A table at step T needs, for a row last brought up to date at step
s = T - k, the sum over the k steps in between of weights ``w`` that decay by ``r`` a step, divided by sqrt(v) plus an
``e`` that grows. Expanded around the mean of e, the sum over the terms becomes six numbers per gap:

    M0, ebar, M2, M3, M4, M5        ebar = sum(w e) / sum(w)     Mn = sum(w (e/ebar - 1)^n)

Two tables hold them. The *window* covers the gaps 1..J, where J is the number of steps after which ``r^J`` is below
float64's precision. A step makes each gap one longer and adds one term to its sums. A row that has waited longer than J
needs its first J steps only, and those lie in the past for good: when a step leaves the window, its entry is *frozen*.
Only the weight decay since then still acts on it.

Frozen entries are kept in a ring. ``capacity`` steps is how far back it reaches; the owner of the table sees to it that
no row waits longer, so the memory is bounded however long the run.

A model has many tables, and most of them take the same steps. A window takes 0.1 ms to build, as long as the step of a
small table, and the rings take 1.6 MB. So a schedule is a place on a *timeline*, and ``twin`` makes another one at the
same place. As long as twins take the same steps, be it one after the other, they share the rings and the windows. One
that takes another step goes on with a copy.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ._rules.adam import corrections

# Columns of a coefficient table.
M0, EBAR, M2, M3, M4, M5, SAFE = range(7)
COLUMNS = 7

# What a kernel is told of a schedule: 64-bit words, then scalars.
STEP, LENGTH, CAPACITY, WINDOW_AT, FROZEN_AT, RATE_AT, ROOT_AT, DECAYED_AT, BETA1_POWERS_AT, BETA2_POWERS_AT = range(10)
SCALARS = 10
RATIO, GROWTH, EPS = range(3)

# The terms beyond the window are smaller than this against the first.
_NEGLIGIBLE = 1e-17
_LONGEST_WINDOW = 1 << 16

# A series has coefficients below this, and unless v is above 0 a mean of e above its inverse: float32 holds them.
# Elsewhere the terms are summed one by one.
_LARGEST = 1e30

_SMALLEST = 2.0**-1074

# A momentum m moves a weight by at most m lr / eps * beta1 / (1 - beta1)^2 until it has died away. Below this share of
# eps that is less than 1e-17 lr, since no window is long enough for a beta1 above 0.9994. It becomes 0 once it is also
# too small to have all its digits: such numbers make every later step three times slower.
DUST_OF_EPS = 1e-24

# M2..M6 as combinations of E0..E6: the binomial (e/ebar - 1)^n written out.
_CENTRAL = np.array([[(-1.0) ** (n - k) * math.comb(n, k) for k in range(7)] for n in range(2, 7)])


def window_length(beta1: float, beta2: float, *, amsgrad: bool) -> int:
    """How many steps the momentum of a row keeps acting, to float64's precision."""
    ratio = beta1 if amsgrad else beta1 / math.sqrt(beta2)
    return 1 if ratio == 0 else math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio))


def check_betas(beta1: float, beta2: float, *, amsgrad: bool, where: str = "") -> None:
    """Raise if a row's path cannot be cut off: its terms must decay, and fast enough to keep a table of them."""
    if not amsgrad and beta1 >= math.sqrt(beta2):
        raise ValueError(
            f"Invalid betas: {(beta1, beta2)}{where}; deferred steps need beta1 < sqrt(beta2), or a row's momentum "
            "outlives its second moment and no later step can be skipped. Use rowstep.SparseAdam or torch.optim.Adam"
        )
    length = window_length(beta1, beta2, amsgrad=amsgrad)
    if length > _LONGEST_WINDOW:
        raise ValueError(
            f"Invalid betas: {(beta1, beta2)}{where}; a row's momentum would act for {length} steps; expected at most "
            f"{_LONGEST_WINDOW}. Use a smaller beta1"
        )


class _Window:
    """The newest steps, and the coefficients of every gap that they are in. Nothing in it changes."""

    __slots__ = ("__weakref__", "_next", "at", "first", "sums", "table")

    def __init__(self, sums: Any, first: Any, table: Any) -> None:
        self.sums, self.first = sums, first
        """For every gap, beginning with 1: E0..E6, the sums of w (e/eps)^n, and the e/eps of its first step."""
        self.table, self.at = table, table.ctypes.data
        self._next: tuple[Any, Callable[[], _Window | None]] = None, lambda: None

    def after(self, step: _Step, make: Callable[[], _Window]) -> _Window:
        """The window after one more step, which another schedule may have made already and still has."""
        known, window = self._next[0], self._next[1]()
        if window is None or known != step:
            window = make()
            self._next = step, weakref.ref(window)
        return window


_Step = tuple[float, float, float]
"""A step's rate, its root, and what weight decay leaves of a weight."""


class _Timeline:
    """What every step was like, in rings over its number.

    The ring of a shared timeline must not come around while a schedule on it lags behind. So a timeline takes on
    ``capacity // 8`` steps; then whoever is ahead goes on with a copy, and leaves it to those behind.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.newest, self._last = capacity, 0, capacity // 8
        # lr with bias correction, sqrt(1 - beta2^t), what weight decay leaves of a weight, and the logarithm of what it
        # has left since the beginning, with what that sum lacks.
        self.rate, self.root, self.kept = np.zeros(capacity), np.ones(capacity), np.ones(capacity)
        self.decayed, self.lacking = np.zeros(capacity), np.zeros(capacity)
        self.frozen = np.zeros((capacity, COLUMNS))
        self.recorded: tuple[Any, Any, Any] = None, None, None
        """What kernels were last told, and of which window and which ``decayed``."""
        self.advanced: tuple[Any, ...] = None, None, None, None, None, None
        """Of the last advance the lr, the weight decay, step and window before it, and window and timeline after it."""

    def copy(self, newest: int) -> _Timeline:
        """A timeline of its own for the step after ``newest``."""
        copied = copy.copy(self)
        for name in ("rate", "root", "kept", "decayed", "lacking", "frozen"):
            setattr(copied, name, getattr(self, name).copy())
        copied.recorded, copied.advanced = (None,) * 3, (None,) * 6
        copied.newest, copied._last = newest, newest + self.capacity // 8
        return copied

    def with_step(self, number: int, step: _Step, frozen: tuple[int, Any]) -> _Timeline:
        """The timeline on which this is the ``number``-th step: this one, or a copy.

        ``frozen`` are coefficients that will not change any more, and the step that they belong to.
        """
        slot = number % self.capacity
        if number <= self.newest and (self.rate[slot], self.root[slot], self.kept[slot]) == step:
            return self
        if number <= self.newest or number > self._last:
            return self.copy(number - 1).with_step(number, step, frozen)
        # Nobody looks at these entries until the step is counted, in the last line. Whatever interrupts this before, it
        # can be done again.
        before = (number - 1) % self.capacity
        self.rate[slot], self.root[slot], self.kept[slot] = step
        self.frozen[frozen[0] % self.capacity] = frozen[1]
        # Kahan's sum: thousands of equal addends would round the same way every time.
        addend = math.log(step[2]) - self.lacking[before]
        total = self.decayed[before] + addend
        self.lacking[slot] = (total - self.decayed[before]) - addend
        self.decayed[slot] = total
        # Only differences count, and those of small numbers are the better ones.
        decayed = self.decayed - total if total < -1 else self.decayed
        vars(self).update(newest=number, decayed=decayed)
        return self


class Schedule:
    """What every step of a table was like, and what it takes to make up for any number of them."""

    def __init__(self, betas: tuple[float, float], eps: float, *, amsgrad: bool, step: int, tolerance: float) -> None:
        beta1, beta2 = betas
        self.betas, self.eps, self.amsgrad, self.tolerance = betas, eps, amsgrad, tolerance
        # Steps are counted from the one at which the schedule begins, so that a row's note of them fits 32 bits however
        # long the run. The origin matters for the bias corrections only.
        self.origin, self.step = step, 0
        self.window_length = length = window_length(beta1, beta2, amsgrad=amsgrad)
        self.capacity = capacity = max(1 << 14, 4 * length)
        self.longest_wait = capacity - capacity // 8 - 2
        """No row may wait for more steps than this."""
        self.ratio = beta1 if amsgrad else beta1 / math.sqrt(beta2)
        self.growth = 1.0 if amsgrad else 1 / math.sqrt(beta2)
        self.beta1_powers = beta1 ** np.arange(capacity + 1, dtype=np.float64)
        self.beta2_powers = beta2 ** np.arange(capacity + 1, dtype=np.float64)

        self._timeline = _Timeline(capacity)
        self._window = _Window(np.zeros((7, length)), np.ones(length), np.zeros((length + 1, COLUMNS)))
        rho = self.ratio * self.growth ** np.arange(7.0)[:, None]
        with np.errstate(over="ignore"):
            self._powers = rho ** np.arange(1, length + 1)
        # No root is below that of the first step, and no mean of them either.
        self._has_tiny_means = eps * math.sqrt(1 - beta2) < 1 / _LARGEST

    def twin(self) -> Schedule:
        """Another schedule at the same step, for another table; both share what they have in common."""
        return copy.copy(self)

    def advance(self, lr: Any, weight_decay: float, to: int | None = None) -> None:
        """Record one more step, and bring the coefficients of every gap up to it; nothing, if it is at ``to`` already.

        A Tensor lr is computed with in its own dtype, as torch does. Whatever interrupts this leaves the schedule as it
        was, and it can be called again, even by the interrupt itself: all is read at once, computed beside what is in
        use, and taken over at once.
        """
        newest, window, timeline = self.step, self._window, self._timeline  # on one line: nothing can come between
        if newest == to:
            return
        before, its_decay, its_step, its_window, *after = timeline.advanced
        if before is lr and its_window is window and its_step == newest and its_decay == weight_decay:
            window, timeline = after[0], after[1] or timeline  # a twin has been here: 1 µs instead of 6
        else:
            window, timeline = self._advanced(lr, weight_decay, newest, window, timeline)
        vars(self).update(step=newest + 1, _window=window, _timeline=timeline)

    def _advanced(
        self, lr: Any, weight_decay: float, newest: int, window: _Window, timeline: _Timeline
    ) -> tuple[_Window, _Timeline]:
        """Window and timeline after one more step than ``newest``."""
        step = self._step_with(lr, weight_decay, newest + 1)
        following = window.after(step, functools.partial(self._after, window, *step))
        length = self.window_length
        longer = timeline.with_step(newest + 1, step, (newest + 1 - length, following.table[length]))
        other = None if longer is timeline else longer  # not itself: that would be garbage only a collection finds
        timeline.advanced = lr, weight_decay, newest, window, following, other
        return following, longer

    def _step_with(self, lr: Any, weight_decay: float, number: int) -> _Step:
        kept = float(1 - lr * weight_decay)
        if kept <= 0:
            raise ValueError(
                f"lr * weight_decay is {float(lr * weight_decay)}; expected less than 1. "
                "Use a smaller lr or weight_decay"
            )
        first, root = corrections(*self.betas, self.origin + number, math.sqrt)
        return float(lr * root / first), root, kept

    @property
    def window(self) -> Any:
        """The coefficients of the gaps 0 to ``window_length``."""
        return self._window.table

    @property
    def record(self) -> tuple[Any, ...]:
        """What a kernel is told of this schedule, and what the addresses in it point to: to be held while it runs.

        A signal handler that steps in the meantime lets the schedule go on with others.
        """
        timeline, window = self._timeline, self._window
        if timeline.recorded[0] is not window or timeline.recorded[1] is not timeline.decayed:
            timeline.recorded = window, timeline.decayed, self._new_record(timeline, window)
        window, decayed, record = timeline.recorded
        return record, window, decayed, timeline

    def _new_record(self, timeline: _Timeline, window: _Window) -> Any:
        record = np.empty(SCALARS + 3, np.int64)
        rings = (timeline.frozen, timeline.rate, timeline.root, timeline.decayed)
        addresses = [array.ctypes.data for array in (*rings, self.beta1_powers, self.beta2_powers)]
        record[:SCALARS] = self.step, self.window_length, self.capacity, window.at, *addresses
        record[SCALARS:].view(np.float64)[:] = self.ratio, self.growth, self.eps
        return record

    def _after(self, window: _Window, rate: float, root: float, kept: float) -> _Window:
        """The window after a step with this rate and this root, which leaves so much of a weight."""
        # A row that has now waited for k steps had waited for k - 1, and this step is the k-th term of its sums. Every
        # term is positive, so no digit is lost, and no sum outlives the window, so nothing drifts. To sum all terms
        # anew in every step takes a third longer: 124 µs, not 91.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            sums = self._powers * np.array([[rate * root**n] for n in range(7)])
            sums[:, 1:] += window.sums[:, :-1] * kept
            first = np.empty_like(window.first)
            first[1:], first[0] = window.first[:-1], root * self.growth
            return _Window(sums, first, self._coefficients_of(sums, first))

    def _coefficients_of(self, sums: Any, first: Any) -> Any:
        """The coefficients for every gap in the window, from what it holds."""
        total = sums[0]
        some = total > 0
        mean = np.divide(sums[1], total, out=np.ones_like(total), where=some)
        # One column after the other, as NumPy computes them fastest; turned around at the end.
        columns = np.empty((COLUMNS, self.window_length))
        columns[0], columns[1:] = 1, 1 / mean
        central = _CENTRAL @ (sums * np.multiply.accumulate(columns))
        columns[M0], columns[EBAR], columns[M2:SAFE] = total, self.eps * mean, central[:-1]
        # The series ends after M5. What is left out is at most theta^6 (M6/M0) max(1, ebar/e_1) of the sum; where
        # that is above the tolerance, i.e. for sqrt(v) below a bound, the terms have to be summed one by one.
        rest = np.divide(np.abs(central[-1]), total, out=np.zeros_like(total), where=some) * np.maximum(1, mean / first)
        least_root = columns[EBAR] * ((rest / self.tolerance) ** (1 / 6) - 1)
        columns[SAFE] = np.maximum(least_root, 0) ** 2
        if self._has_tiny_means:  # float32 may round one to 0, which leaves nothing to divide by where v is 0
            columns[SAFE, columns[EBAR] < 1 / _LARGEST] += _SMALLEST
        # With a small beta2 the e of a long gap grow past what a float holds: no series there.
        if not np.abs(columns).max() < _LARGEST:
            lost = ~(np.abs(columns).max(axis=0) < _LARGEST)
            columns[:, lost], columns[SAFE, lost] = 0, np.inf
        table = np.zeros((self.window_length + 1, COLUMNS))
        table[1:] = columns.T
        return table

    def coefficients(self, since: Any) -> tuple[Any, Any, Any]:
        """For rows up to date at the steps ``since``: coefficients, what decay leaves of p, and of the past sum."""
        gap = self.step - since
        young = gap <= self.window_length
        table = np.where(
            young[:, None], self.window[np.where(young, gap, 0)], self._timeline.frozen[since % self.capacity]
        )
        now = self._timeline.decayed[self.step % self.capacity]
        kept = np.exp(now - self._timeline.decayed[since % self.capacity])
        aged = np.exp(now - self._timeline.decayed[(since + self.window_length) % self.capacity])
        return table, kept, np.where(young, 1.0, aged)

    def terms(self, since: int) -> tuple[Any, Any]:
        """The weights w and the e of every step that a row, up to date at ``since``, still has to take."""
        count = min(self.step - since, self.window_length)
        slots = np.arange(since + 1, since + count + 1) % self.capacity
        powers = np.arange(1, count + 1)
        kept = np.exp(self._timeline.decayed[self.step % self.capacity] - self._timeline.decayed[slots])
        with np.errstate(over="ignore"):  # an e beyond float64 belongs to a term that is 0
            e = self.eps * self._timeline.root[slots] * self.growth**powers
        return self._timeline.rate[slots] * kept * self.ratio**powers, e
