"""The coefficients of a row's deferred steps, for every gap at once.

``rowstep._deferred`` derives what is computed here. A table at step T needs, for a row last brought up to date at step
s = T - k, the sum over the k steps in between of weights ``w`` that decay by ``r`` a step, divided by sqrt(v) plus an
``e`` that grows. Expanded around the mean of e, the sum over the terms becomes six numbers per gap:

    M0, ebar, M2, M3, M4, M5        ebar = sum(w e) / sum(w)     Mn = sum(w (e/ebar - 1)^n)

A seventh says for which v they are too few, and an eighth what weight decay leaves of p.

Two tables hold them. The *window* covers the gaps 1..J, where J is the number of steps after which ``r^J`` is below
float64's precision. A step makes each gap one longer and adds one term to its sums. A row that has waited longer than J
needs its first J steps only, and those lie in the past for good: when a step leaves the window, its entry is *frozen*.
Only the weight decay since then still acts on it.

Frozen entries are kept in a ring. ``capacity`` steps is how far back it reaches; the owner of the table sees to it that
no row waits longer, so the memory is bounded however long the run.

A ``Schedule`` is a place on a *timeline*, and nothing in it changes: ``advanced`` gives the one a step later. A model
has many tables, and most of them take the same steps, so they hold the same schedules, as long as they do. A table that
takes another step goes on with a timeline of its own.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ._rules.adam import corrections

# The coefficients of a gap: columns of a table.
M0, EBAR, M2, M3, M4, M5, UNSAFE_UP_TO, KEPT = range(8)
COEFFICIENTS = 8

# What a kernel is told of a timeline: 64-bit words, then scalars.
LENGTH, CAPACITY, BETA1_POWERS_AT, BETA2_POWERS_AT = range(4)
FROZEN_AT, RATE_AT, ROOT_AT, KEPT_AT, LOG_KEPT_AT, POWERS_AT = range(4, 10)
SCALARS = 10
RATIO, GROWTH, EPS, TOLERANCE, HAS_TINY_MEANS = range(5)

# The terms beyond the window are smaller than this against the first.
_NEGLIGIBLE = 1e-17
_LONGEST_WINDOW = 1 << 16

# A series has coefficients below this, and unless v is above 0 a mean of e above its inverse: float32 holds them.
# Elsewhere the terms are summed one by one.
LARGEST = 1e30

SMALLEST = 2.0**-1074

# What weight decay leaves of a weight over any steps of a ring follows from running sums of logarithms. They are sums
# of integers, so a difference has the same bits wherever the sums began: a resumed run goes on as if it had not ended.
# One integer counts in units that hold a ring of the strongest decay, another in units that lose nothing when thousands
# of equal addends are summed. The sums may overflow, their differences do not.
COARSE, FINE = 2.0**-38, 2.0**-80

# A momentum m moves a weight by at most m lr / eps * beta1 / (1 - beta1)^2 until it has died away. Below this share of
# eps that is less than 1e-17 lr, since no window is long enough for a beta1 above 0.9994. It becomes 0 once it is also
# too small to have all its digits: such numbers make every later step three times slower.
DUST_OF_EPS = 1e-24


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


_Step = tuple[float, float, float]
"""A step's rate, its root, and what weight decay leaves of a weight."""


class _Timeline:
    """What every step was like, in rings over its number.

    The ring of a shared timeline must not come around while a schedule on it lags behind. So a timeline takes on
    ``capacity // 8`` steps; then whoever is ahead goes on with a copy, and leaves it to those behind.
    """

    def __init__(self, path: Path) -> None:
        capacity = path.capacity
        self._path, self.capacity, self.newest, self._last = path, capacity, 0, capacity // 8
        # lr with bias correction, sqrt(1 - beta2^t), what weight decay leaves of a weight, and the running sum of its
        # logarithms, as two integers.
        self.rate, self.root, self.kept = np.zeros(capacity), np.ones(capacity), np.ones(capacity)
        self.log_kept = np.zeros((capacity, 2), np.int64)
        self.frozen = np.zeros((capacity, COEFFICIENTS))
        self._tell()

    def _tell(self) -> None:
        """Write what kernels are told."""
        path, self._told = self._path, np.empty(SCALARS + 5, np.int64)
        rings = (
            path.beta1_powers, path.beta2_powers, self.frozen, self.rate, self.root, self.kept, self.log_kept,
            path.powers,
        )  # fmt: skip
        self._told[:SCALARS] = path.window_length, path.capacity, *(array.ctypes.data for array in rings)
        scalars = path.ratio, path.growth, path.eps, path.tolerance, path.has_tiny_means
        self._told[SCALARS:].view(np.float64)[:] = scalars
        self.told_at = self._told.ctypes.data

    def copy(self, newest: int) -> _Timeline:
        """A timeline of its own for the step after ``newest``."""
        copied = copy.copy(self)
        for name in ("rate", "root", "kept", "log_kept", "frozen"):
            setattr(copied, name, getattr(self, name).copy())
        copied._tell()
        copied.newest, copied._last = newest, newest + self.capacity // 8
        return copied

    def for_step(self, number: int, step: _Step) -> _Timeline:
        """The timeline on which this is the ``number``-th step: this one, or a copy."""
        slot = number % self.capacity
        if number > self.newest:
            return self if number <= self._last else self.copy(number - 1)
        is_same = (self.rate[slot], self.root[slot], self.kept[slot]) == step
        return self if is_same else self.copy(number - 1)

    def write(self, number: int, step: _Step, frozen: Any) -> None:
        """Write the ``number``-th step, and ``frozen``, coefficients of the step that leaves the window with it.

        Nobody looks at these entries until the step is counted. Whatever interrupts this before, it can be done again.
        """
        slot, before = number % self.capacity, (number - 1) % self.capacity
        self.rate[slot], self.root[slot], self.kept[slot] = step
        self.frozen[(number - self._path.window_length) % self.capacity] = frozen
        log = math.log(step[2])
        coarse = math.floor(log / COARSE)
        self.log_kept[slot] = self.log_kept[before] + np.array([coarse, math.floor((log - coarse * COARSE) / FINE)])

    def kept_since(self, steps: Any, now: int) -> Any:
        """What weight decay leaves of a weight that was up to date at these steps."""
        coarse, fine = (self.log_kept[now % self.capacity] - self.log_kept[steps % self.capacity]).T
        return np.exp(coarse * COARSE + fine * FINE)


_NO_GAP = [0.0] * KEPT + [1.0]  # the coefficients of a row that is up to date


class Window:
    """The newest steps, and the coefficients of every gap that they are in: one piece of memory, for kernels."""

    __slots__ = ("_length", "_memory", "at")

    def __init__(self, length: int) -> None:
        self._length, self._memory = length, np.empty(8 * length + (length + 1) * COEFFICIENTS)
        self.at = self._memory.ctypes.data

    @property
    def sums(self) -> Any:
        """For every gap, beginning with 1: E0..E6, the sums of w (e/eps)^n."""
        return self._memory[: 7 * self._length].reshape(7, self._length)

    @property
    def first(self) -> Any:
        """And the e/eps of its first step."""
        return self._memory[7 * self._length : 8 * self._length]

    @property
    def table(self) -> Any:
        """The coefficients of the gaps 0 to ``length``."""
        return self._memory[8 * self._length :].reshape(self._length + 1, COEFFICIENTS)


class Path:
    """What the schedules of a table have in common: its options, and what follows from them alone."""

    def __init__(self, betas: tuple[float, float], eps: float, *, amsgrad: bool, step: int, tolerance: float) -> None:
        beta1, beta2 = betas
        self.betas, self.eps, self.amsgrad, self.tolerance = betas, eps, amsgrad, tolerance
        # Steps are counted from the one at which the schedule begins, so that a row's note of them fits 32 bits however
        # long the run. The origin matters for the bias corrections only.
        self.origin = step
        self.window_length = length = window_length(beta1, beta2, amsgrad=amsgrad)
        self.capacity = capacity = max(1 << 14, 4 * length)
        self.longest_wait = capacity - capacity // 8 - 2
        """No row may wait for more steps than this."""
        self.ratio = beta1 if amsgrad else beta1 / math.sqrt(beta2)
        self.growth = 1.0 if amsgrad else 1 / math.sqrt(beta2)
        self.beta1_powers = beta1 ** np.arange(capacity + 1, dtype=np.float64)
        self.beta2_powers = beta2 ** np.arange(capacity + 1, dtype=np.float64)
        rho = self.ratio * self.growth ** np.arange(7.0)[:, None]
        with np.errstate(over="ignore"):
            self.powers = rho ** np.arange(1, length + 1)
        # No root is below that of the first step, and no mean of them either.
        self.has_tiny_means = eps * math.sqrt(1 - beta2) < 1 / LARGEST

    def begin(self) -> Schedule:
        """The schedule before the first step."""
        window = Window(self.window_length)
        window.sums[:], window.first[:], window.table[:] = 0, 1, _NO_GAP
        return Schedule(self, 0, window, _Timeline(self))

    def step_with(self, lr: Any, weight_decay: float, number: int) -> _Step:
        """What the ``number``-th step is like. A Tensor lr is computed with in its own dtype, as torch does."""
        first, root = corrections(*self.betas, self.origin + number, math.sqrt)
        return float(lr * root / first), root, float(1 - lr * weight_decay)

    def window_after(self, window: Window, step: _Step) -> Window:
        """The window after one more step."""
        # A row that has now waited for k steps had waited for k - 1, and this step is the k-th term of its sums. Every
        # term is positive, so no digit is lost, and no sum outlives the window, so nothing drifts. To sum all terms
        # anew in every step takes a third longer: 124 µs, not 91.
        rate, root, kept = step
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            after = Window(self.window_length)
            after.sums[:] = self.powers * np.array([[rate * root**n] for n in range(7)])
            after.sums[:, 1:] += window.sums[:, :-1] * kept
            after.first[1:], after.first[0] = window.first[:-1], root * self.growth
            after.table[0], after.table[1:, :KEPT] = _NO_GAP, self._coefficients_of(after.sums, after.first)
            after.table[1:, KEPT] = window.table[:-1, KEPT] * kept
            return after

    def _coefficients_of(self, sums: Any, first: Any) -> Any:
        """The coefficients for every gap in the window, from what it holds."""
        total = sums[0]
        some = total > 0
        mean = np.divide(sums[1], total, out=np.ones_like(total), where=some)
        # The sums in multiples of the mean, of which the first is the total: Mn by the binomial theorem.
        _, _, second, third, fourth, fifth, sixth = sums * mean ** -np.arange(7.0)[:, None]
        columns = np.empty((KEPT, self.window_length))
        columns[M0], columns[EBAR] = total, self.eps * mean
        columns[M2] = second - total
        columns[M3] = third - 3 * second + 2 * total
        columns[M4] = fourth - 4 * third + 6 * second - 3 * total
        columns[M5] = fifth - 5 * fourth + 10 * (third - second) + 4 * total
        sixth = sixth - 6 * fifth + 15 * (fourth + second) - 20 * third - 5 * total
        # The series ends after M5. What is left out is at most theta^6 (M6/M0) max(1, ebar/e_1) of the sum; where
        # that is above the tolerance, i.e. for sqrt(v) below a bound, the terms have to be summed one by one.
        rest = np.divide(np.abs(sixth), total, out=np.zeros_like(total), where=some) * np.maximum(1, mean / first)
        least_root = columns[EBAR] * ((rest / self.tolerance) ** (1 / 6) - 1)
        columns[UNSAFE_UP_TO] = np.maximum(least_root, 0) ** 2
        if self.has_tiny_means:  # float32 may round one to 0, which leaves nothing to divide by where v is 0
            columns[UNSAFE_UP_TO, columns[EBAR] < 1 / LARGEST] += SMALLEST
        # With a small beta2 the e of a long gap grow past what a float holds: no series there.
        if not np.abs(columns).max() < LARGEST:
            lost = ~(np.abs(columns).max(axis=0) < LARGEST)
            columns[:, lost], columns[UNSAFE_UP_TO, lost] = 0, np.inf
        return columns.T


class Schedule:
    """A place on a timeline: what it takes to make up for any number of the steps up to there."""

    __slots__ = ("__weakref__", "_next", "_window", "path", "step", "timeline", "window_at")

    def __init__(self, path: Path, step: int, window: Window, timeline: _Timeline) -> None:
        self.path, self.step = path, step
        self._window, self.timeline = window, timeline
        self.window_at = window.at + 8 * path.window_length * 8
        """Where kernels find the coefficients of the gaps 0 to ``window_length``."""
        self._next: tuple[Any, Callable[[], Schedule | None]] = None, lambda: None

    def advanced(self, lr: Any, weight_decay: float, kernels: Any = None) -> Schedule:
        """The schedule after one more step, which another table may have taken already and still holds.

        Whatever interrupts this, it can be called again, even by the interrupt itself.
        """
        path, number = self.path, self.step + 1
        step = path.step_with(lr, weight_decay, number)
        known, following = self._next[0], self._next[1]()
        if following is None or known != step:
            timeline = self.timeline.for_step(number, step)
            after = window_after if kernels is None else kernels.window_after
            window = after(path, self._window, step, timeline, number)
            if number > timeline.newest:
                timeline.newest = number  # it has been written
            following = Schedule(path, number, window, timeline)
            self._next = step, weakref.ref(following)
        return following

    @property
    def window(self) -> Any:
        """The coefficients of the gaps 0 to ``window_length``."""
        return self._window.table

    def coefficients(self, since: Any) -> tuple[Any, Any]:
        """For rows up to date at the steps ``since``: coefficients, and what later decay leaves of frozen ones."""
        path, gap = self.path, self.step - since
        young = gap <= path.window_length
        table = np.where(
            young[:, None], self._window.table[np.where(young, gap, 0)], self.timeline.frozen[since % path.capacity]
        )
        return table, np.where(young, 1.0, self.timeline.kept_since(since + path.window_length, self.step))

    def terms(self, since: int) -> tuple[Any, Any]:
        """The weights w and the e of every step that a row, up to date at ``since``, still has to take."""
        path = self.path
        count = min(self.step - since, path.window_length)
        steps = np.arange(since + 1, since + count + 1)
        slots, powers = steps % path.capacity, np.arange(1, count + 1)
        kept = self.timeline.kept_since(steps, self.step)
        # An e beyond float64 belongs to a term that is 0. No np.errstate here, which sets a context variable: garbage
        # collection may call this, and where it comes in the middle of another np.errstate, Python 3.11 goes on with
        # one that is freed.
        growth = np.exp(np.minimum(powers * math.log(path.growth), 700.0))
        e = path.eps * self.timeline.root[slots] * growth
        return self.timeline.rate[slots] * kept * path.ratio**powers, e


def window_after(path: Path, window: Window, step: _Step, timeline: _Timeline, number: int) -> Window:
    """The window after the ``number``-th step, which is written to the timeline unless it is there."""
    after = path.window_after(window, step)
    if number > timeline.newest:
        timeline.write(number, step, after.table[path.window_length])
    return after
