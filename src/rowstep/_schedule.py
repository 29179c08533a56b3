"""The coefficients of a row's deferred steps, for every gap at once.

``rowstep._deferred`` derives what is computed here. A table at step T needs, for a row last brought up to date at step
s = T - k, the sum over the k steps in between of weights ``w`` that decay by ``r`` a step, divided by sqrt(v) plus an
``e`` that grows. Expanded around the mean of e, the sum over the terms becomes five numbers per gap:

    M0, ebar, M2, M3, M4, M5        ebar = sum(w e) / sum(w)     Mn = sum(w (e/ebar - 1)^n)

Two tables hold them. The *window* covers the gaps 1..J, where J is the number of steps after which ``r^J`` is below
float64's precision; it is rebuilt at every step from sums of positive terms, so nothing drifts. A row that has waited
longer needs its first J steps only, and those lie in the past for good: when a step leaves the window, its entry is
*frozen*. Only the weight decay since then still acts on it.

Frozen entries are kept in a ring. ``capacity`` steps is how far back it reaches; the owner of the table sees to it that
no row waits longer, so the memory is bounded however long the run.

A model has many tables, and most of them take the same steps. A window takes 0.2 ms to build, longer than the step of a
small table, so schedules that have begun alike and gone on alike share it: each window remembers the one that came
after it, as long as some schedule is there.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

# Columns of a coefficient table.
M0, EBAR, M2, M3, M4, M5, SAFE = range(7)
COLUMNS = 7

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

# Mn as a combination of E0..E6: the binomial (e/ebar - 1)^n written out.
_CENTRAL = np.array([[(-1.0) ** (n - k) * math.comb(n, k) for k in range(7)] for n in range(7)])


def window_length(beta1: float, beta2: float, *, amsgrad: bool) -> int:
    """How many steps the momentum of a row keeps acting, to float64's precision."""
    ratio = beta1 if amsgrad else beta1 / math.sqrt(beta2)
    return 1 if ratio == 0 else math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio))


def check_betas(beta1: float, beta2: float, *, amsgrad: bool, where: str = "") -> None:
    """Raise if a row's path cannot be cut off: its terms must decay, and fast enough to keep a table of them."""
    if not amsgrad and beta1 >= math.sqrt(beta2):
        raise ValueError(
            f"Invalid betas: {(beta1, beta2)}{where}; deferred steps need beta1 < sqrt(beta2), else the momentum of a "
            "row outlives its second moment and no later step can be left out; use rowstep.SparseAdam or torch's Adam"
        )
    length = window_length(beta1, beta2, amsgrad=amsgrad)
    if length > _LONGEST_WINDOW:
        raise ValueError(
            f"Invalid betas: {(beta1, beta2)}{where}; the momentum of a row would act for {length} steps, and deferred "
            f"steps keep a table of at most {_LONGEST_WINDOW}; use a smaller beta1"
        )


class _Window:
    """The newest steps, and the coefficients of every gap that they are in. Nothing in it changes."""

    __slots__ = ("__weakref__", "_next", "rates", "roots", "table")

    def __init__(self, rates: Any, roots: Any, table: Any) -> None:
        self.rates, self.roots = rates, roots
        """Newest first: rate times what weight decay has left of it since, and the powers of root."""
        self.table = table
        self._next: tuple[Any, Callable[[], _Window | None]] = None, lambda: None

    def after(self, step: tuple[float, float, float], make: Callable[[], _Window]) -> _Window:
        """The window after one more step, which another schedule may have made already."""
        known, window = self._next[0], self._next[1]()
        if window is None or known != step:
            window = make()
            self._next = step, weakref.ref(window)
        return window


@functools.lru_cache(maxsize=4)  # the tables of a step begin one after the other, when the first has left it already
def _first_window(length: int, beginning: tuple[Any, ...]) -> _Window:
    """The one that all schedules begin with which have this in common."""
    return _Window(np.zeros(length), np.ones((7, length)), np.zeros((length + 1, COLUMNS)))


class Schedule:
    """What every step of a table was like, and what it takes to make up for any number of them."""

    def __init__(
        self, betas: tuple[float, float], eps: float, *, amsgrad: bool, step: int, tolerance: float, capacity: int = 0
    ) -> None:
        beta1, beta2 = betas
        self.betas, self.eps, self.amsgrad, self.tolerance = betas, eps, amsgrad, tolerance
        # Steps are counted from the one at which the schedule begins, so that a row's note of them fits 32 bits however
        # long the run. The origin matters for the bias corrections only.
        self.origin, self.step = step, 0
        self.window_length = length = window_length(beta1, beta2, amsgrad=amsgrad)
        self.capacity = capacity = max(capacity, 1 << 14, 4 * length)
        self.ratio = beta1 if amsgrad else beta1 / math.sqrt(beta2)
        self.growth = 1.0 if amsgrad else 1 / math.sqrt(beta2)

        # Per step, in a ring over its number: lr with bias correction, sqrt(1 - beta2^t), and the logarithm of what
        # weight decay has left since this schedule began.
        self.rate, self.root, self.decayed = np.zeros(capacity), np.ones(capacity), np.zeros(capacity)
        self._decayed_excess = 0.0
        self.frozen = np.zeros((capacity, COLUMNS))
        self.beta1_powers = beta1 ** np.arange(capacity + 1, dtype=np.float64)
        self.beta2_powers = beta2 ** np.arange(capacity + 1, dtype=np.float64)

        self._window = _first_window(length, (betas, eps, amsgrad, tolerance, step))
        rho = self.ratio * self.growth ** np.arange(7.0)[:, None]
        with np.errstate(over="ignore"):
            self._undo = rho ** -np.arange(length) if self.ratio else np.zeros((7, length))
            self._redo = rho ** np.arange(1, length + 1)

    def advance(self, lr: Any, weight_decay: float, to: int | None = None) -> None:
        """Record one more step, and bring the coefficients of every gap up to it; nothing, if it is at ``to`` already.

        A Tensor lr is computed with in its own dtype, as torch does. Whatever interrupts this leaves the schedule as it
        was, and it can be called again, even by the interrupt itself: all is read at once, computed beside what is in
        use, and taken over at once.
        """
        newest, recent, decayed, excess = self._newest()
        if newest == to:
            return
        beta1, beta2 = self.betas
        kept = float(1 - lr * weight_decay)
        if kept <= 0:
            raise ValueError(f"lr * weight_decay is {float(lr * weight_decay)}; deferred steps need it below 1")
        step, count = newest + 1, self.origin + newest + 1
        root = math.sqrt(1 - beta2**count)
        rate = float(lr * root / (1 - beta1**count))
        window = recent.after((rate, root, kept), lambda: self._after(recent, rate, root, kept))
        # Nobody looks at these entries of the rings until the step is counted.
        slot, before = step % self.capacity, newest % self.capacity
        self.rate[slot], self.root[slot] = rate, root
        self.frozen[(step - self.window_length) % self.capacity] = window.table[self.window_length]
        # Kahan's sum: thousands of equal addends would round the same way every time.
        addend = math.log(kept) - excess
        total = decayed[before] + addend
        excess = (total - decayed[before]) - addend
        decayed[slot] = total
        if total < -1:  # only differences count, and those of small numbers are the better ones
            decayed = decayed - total
        vars(self).update(step=step, _window=window, decayed=decayed, _decayed_excess=excess)

    def _newest(self) -> tuple[int, _Window, Any, float]:
        # On one line: nothing can come between.
        return self.step, self._window, self.decayed, self._decayed_excess

    @property
    def window(self) -> Any:
        """The coefficients of the gaps 0 to ``window_length``."""
        return self._window.table

    def _after(self, window: _Window, rate: float, root: float, kept: float) -> _Window:
        """The window after a step with this rate and this root, which leaves so much of a weight."""
        rates, roots = np.empty_like(window.rates), np.empty_like(window.roots)
        rates[1:], rates[0] = window.rates[:-1] * kept, rate
        roots[:, 1:], roots[:, 0] = window.roots[:, :-1], [root**n for n in range(7)]
        with np.errstate(over="ignore", invalid="ignore"):
            return _Window(rates, roots, self._coefficients_of(rates, roots))

    def _coefficients_of(self, recent_rate: Any, recent_root: Any) -> Any:
        """The coefficients for every gap in the window, if these were the newest steps."""
        # sums[n, k-1] = sum over the last k steps of w * (e/eps)^n, where step T-i has the weight
        # rate * kept * ratio^(k-i) and e/eps = root * growth^(k-i). Every term is positive: no digit is lost.
        sums = np.cumsum(recent_rate * recent_root * self._undo, axis=1) * self._redo
        total = sums[0]
        some = total > 0
        mean = np.divide(sums[1], total, out=np.ones_like(total), where=some)
        for n in range(1, 7):
            sums[n:] /= mean
        central = _CENTRAL @ sums
        table = np.zeros_like(self.window)
        window = table[1:]
        window[:, M0], window[:, EBAR] = total, self.eps * mean
        window[:, M2:SAFE] = central[2:6].T
        # The series ends after M5. What is left out is at most theta^6 (M6/M0) max(1, ebar/e_1) of the sum; where
        # that is above the tolerance, i.e. for sqrt(v) below a bound, the terms have to be summed one by one.
        first = recent_root[1] * self.growth
        rest = np.divide(np.abs(central[6]), total, out=np.zeros_like(total), where=some) * np.maximum(1, mean / first)
        least_root = window[:, EBAR] * ((rest / self.tolerance) ** (1 / 6) - 1)
        # A mean that float32 may round to 0 leaves nothing to divide by where v is 0, and there only.
        window[:, SAFE] = np.maximum(
            np.maximum(least_root, 0) ** 2, np.where(window[:, EBAR] < 1 / _LARGEST, _SMALLEST, 0)
        )
        # With a small beta2 the e of a long gap grow past what a float holds: no series there.
        lost = ~(np.abs(window) < _LARGEST).all(axis=1)
        window[lost], window[lost, SAFE] = 0, np.inf
        return table

    def coefficients(self, since: Any) -> tuple[Any, Any, Any]:
        """For rows up to date at the steps ``since``: coefficients, what decay leaves of p, and of the past sum."""
        gap = self.step - since
        young = gap <= self.window_length
        table = np.where(young[:, None], self.window[np.where(young, gap, 0)], self.frozen[since % self.capacity])
        now = self.decayed[self.step % self.capacity]
        kept = np.exp(now - self.decayed[since % self.capacity])
        aged = np.exp(now - self.decayed[(since + self.window_length) % self.capacity])
        return table, kept, np.where(young, 1.0, aged)

    def terms(self, since: int) -> tuple[Any, Any]:
        """The weights w and the e of every step that a row, up to date at ``since``, still has to take."""
        count = min(self.step - since, self.window_length)
        slots = np.arange(since + 1, since + count + 1) % self.capacity
        powers = np.arange(1, count + 1)
        kept = np.exp(self.decayed[self.step % self.capacity] - self.decayed[slots])
        with np.errstate(over="ignore"):  # an e beyond float64 belongs to a term that is 0
            e = self.eps * self.root[slots] * self.growth**powers
        return self.rate[slots] * kept * self.ratio**powers, e
