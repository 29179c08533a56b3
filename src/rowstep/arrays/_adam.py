"""The two optimizers: settings, moments by name, one counter; no arithmetic."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._choice import choose
from .._rules.adam import Scalars, scalars
from . import _checks, _files, _reference
from ._checks import FloatArray

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_choose = functools.cache(choose)


class Moments(NamedTuple):
    """What is kept for a name, in the parameter's shape and dtype, in C order and this machine's byte order."""

    exp_avg: FloatArray
    exp_avg_sq: FloatArray


class Adam:
    """Adam for NumPy arrays, with L2 weight decay added to the gradient.

    For the gradient g of an element, or the summed gradient of a row, in iteration t:

        g ← g + weight_decay · p
        m ← β₁ · m + (1 - β₁) · g
        v ← β₂ · v + (1 - β₂) · g²
        p ← p - lr · (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)

    The settings are attributes and may change between steps, for instance by a schedule: ``optimizer.lr = 1e-4``. The
    next step validates them.

    Moments are stored in the parameter's dtype. In float16, at the default betas, the second moment of a gradient below
    5e-3 rounds to 0, and the parameter then moves too far: keep parameters with such gradients in float32.

    Args:
        lr: learning rate.
        betas: decay rates β₁ and β₂ of the two moments.
        eps: ε, added to the bias-corrected root of the second moment.
        weight_decay: L2 penalty.

    Examples:
        >>> import numpy as np
        >>> from rowstep.arrays import Adam
        >>> table, bias = np.ones((1000, 4), np.float32), np.zeros(4)
        >>> optimizer = Adam(lr=0.1)
        >>> optimizer.step_rows("table", table, rows=[3, 5, 3], grad=np.ones((3, 4)))
        >>> optimizer.step("bias", bias, np.ones(4))
        >>> optimizer.end_iteration()
        >>> table[2:6, 0], bias
        (array([1. , 0.9, 1. , 0.9], dtype=float32), array([-0.1, -0.1, -0.1, -0.1]))
        >>> optimizer
        Adam(lr=0.1, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0): iteration 2, 2 names
    """

    decoupled_weight_decay = False

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = _checks.checked_settings(lr, betas, eps, weight_decay)
        self._step = 1
        self._moments: dict[str, Moments] = {}

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={getattr(self, key)}" for key in _SETTINGS)
        return f"{type(self).__name__}({settings}): iteration {self._step}, {len(self._moments)} names"

    @property
    def current_step(self) -> int:
        """The current iteration, from 1. It sets the bias correction of all steps until ``end_iteration()``."""
        return self._step

    def end_iteration(self) -> None:
        """Advance the counter. Call this once per iteration, after all parameters have been stepped."""
        self._step += 1

    def step(self, name: str, param: NDArray[Any], grad: ArrayLike) -> None:
        """Step every element of ``param`` in place.

        Args:
            name: under which its moments are kept.
            param: a float array, of any strides.
            grad: of the same shape, with any float dtype and any strides.
        """
        p = _checks.checked_param(name, param)
        g = _checks.checked_gradient(name, grad, p.shape, p)
        backend, numbers = _backend(p, g), self._scalars()
        backend.step(p, *self._moments_of(name, p), g, numbers)

    def step_rows(self, name: str, param: NDArray[Any], rows: ArrayLike, grad: ArrayLike) -> None:
        """Step these rows of ``param``, along its first axis, and their moments in place. No other row changes.

        Duplicate rows are stepped once, by the sum of their gradients in order of occurrence.

        Args:
            name: under which its moments are kept.
            param: a float array of at least one dimension.
            rows: integers of any shape, with or without duplicates.
            grad: one row for each entry of ``rows``: its shape is that of ``rows`` followed by that of a row.
        """
        p = _checks.checked_param(name, param)
        ids = _checks.checked_rows(name, rows, p)
        g = _checks.checked_gradient(name, grad, ids.shape + p.shape[1:], p)
        backend, numbers = _backend(p, g), self._scalars()
        m, v = self._moments_of(name, p)
        if g.size:
            backend.step_rows(p, m, v, ids.reshape(-1), g.reshape(ids.size, *p.shape[1:]), numbers)

    def state_dict(self) -> dict[str, Any]:
        """The state, for ``load_state_dict``. The arrays are the optimizer's own, not copies."""
        return {
            "step": self._step,
            **self._settings(),
            "decoupled_weight_decay": self.decoupled_weight_decay,
            "state": {name: moments._asdict() for name, moments in self._moments.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the settings, the counter and copies of the moments. An invalid state is refused as a whole.

        Args:
            state_dict: what ``state_dict()`` has returned.
        """
        self._adopt(copy.deepcopy(dict(state_dict)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to one ``.npz`` or ``.safetensors`` file, depending on the suffix.

        A crash midway leaves the old file in place. It may also leave a temporary file beside it, ``.rowstep-*.tmp``.

        Args:
            path: ends with ``.npz``, or with ``.safetensors`` if that package is installed.
        """
        _files.save(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file that ``save`` wrote. A damaged or foreign file is refused, and nothing changes.

        Args:
            path: of the file.
        """
        _files.load(path, self._adopt)

    def _settings(self) -> dict[str, Any]:
        """The settings. They are plain attributes, so they are checked here, before each use."""
        settings = _checks.checked_settings(self.lr, self.betas, self.eps, self.weight_decay)
        return dict(zip(_SETTINGS, settings, strict=True))

    def _scalars(self) -> Scalars:
        lr, betas, eps, weight_decay = self._settings().values()
        return Scalars(*scalars(lr, betas, eps, self._step, weight_decay, self.decoupled_weight_decay, as_dense=True))

    def _moments_of(self, name: str, param: FloatArray) -> Moments:
        dtype = _checks.native(param.dtype)
        kept = self._moments.get(name) or Moments(np.zeros(param.shape, dtype), np.zeros(param.shape, dtype))
        if (kept.exp_avg.shape, kept.exp_avg.dtype) != (param.shape, dtype):
            raise ValueError(
                f"{name!r}: the parameter is {dtype} of shape {param.shape}; expected {kept.exp_avg.dtype} of shape "
                f"{kept.exp_avg.shape}, as when this name was first used. Use another name for another array"
            )
        self._moments[name] = kept
        return kept

    def _adopt(self, state_dict: Mapping[str, Any]) -> None:
        if missing := {"step", *_SETTINGS, "decoupled_weight_decay", "state"} - set(state_dict):
            raise ValueError(f"the state has no {', '.join(sorted(missing))}; expected what state_dict() returns")
        step, decoupled = state_dict["step"], state_dict["decoupled_weight_decay"]
        if type(step) is not int or not 1 <= step < 1 << 63:
            raise ValueError(f"the state's step is {step!r}; expected an integer in [1, 2^63)")
        if decoupled is not self.decoupled_weight_decay:
            found, own = ("AdamW" if each else "Adam" for each in (decoupled, self.decoupled_weight_decay))
            raise ValueError(f"the state is {found}'s; expected {own}'s. Load a state with the class that saved it")
        loaded = Adam(**{key: state_dict[key] for key in _SETTINGS})
        loaded._step = step
        loaded._moments = {name: _checked_moments(name, moments) for name, moments in state_dict["state"].items()}
        self.__dict__.update(loaded.__dict__)


class AdamW(Adam):
    """Adam for NumPy arrays, with decoupled weight decay.

    Before each step of ``Adam`` without weight decay:

        p ← p · (1 - lr · weight_decay)

    Args:
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the bias-corrected root of the second moment.
        weight_decay: the share of a weight, times lr, that a step takes away. ``step_rows`` decays only its rows.

    Examples:
        >>> import numpy as np
        >>> from rowstep.arrays import AdamW
        >>> weights = np.ones(2)
        >>> AdamW(lr=0.1, weight_decay=0.5).step("weights", weights, np.zeros(2))
        >>> weights
        array([0.95, 0.95])
    """

    decoupled_weight_decay = True

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)


def _backend(p: FloatArray, g: FloatArray) -> Any:
    """The module whose ``step`` and ``step_rows`` to call. Numba is imported by the first step that needs it."""
    chosen = _choose(os.environ.get("ROWSTEP_BACKEND", ""), f"{__package__}._compiled", f"{__package__}._reference")
    return _reference if 2 in (p.itemsize, g.itemsize) else chosen  # Numba has no float16


def _checked_moments(name: str, moments: Mapping[str, Any]) -> Moments:
    if set(moments) != set(Moments._fields):
        raise ValueError(f"the state of {name!r} has {sorted(moments)}; expected {list(Moments._fields)}")
    m, v = (np.asarray(moments[key]) for key in Moments._fields)
    if _checks.native(m.dtype) not in _checks.FLOATS or (m.shape, m.dtype) != (v.shape, v.dtype):
        found = f"{m.dtype} of shape {m.shape} and {v.dtype} of shape {v.shape}"
        raise ValueError(f"the state of {name!r} is {found}; expected two float arrays of the same shape and dtype")
    # NaN and infinity are what a run that diverged leaves. But no sum of squares is below 0, and its root is taken.
    if (least := np.fmin.reduce(v, axis=None, initial=0)) < 0:
        raise ValueError(f"exp_avg_sq in the state of {name!r} contains {least}; expected no negative values")
    return Moments(*(np.asarray(array, _checks.native(array.dtype), order="C") for array in (m, v)))
