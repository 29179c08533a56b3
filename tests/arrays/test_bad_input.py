"""rowstep.arrays refuses what it cannot do: a sentence says why, and nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from rowstep.arrays import Adam, AdamW
from tests.kernels.test_backends import python

pytestmark = pytest.mark.usefixtures("backend")


def refused(error: type[Exception], message: str, act: Callable[[Adam, Any], None]) -> None:
    """``act`` raises, and leaves an optimizer and the parameter 'w' as they were."""
    optimizer, param = Adam(), np.arange(6.0).reshape(3, 2)
    optimizer.step("w", param, np.ones((3, 2)))
    before, state = param.copy(), optimizer.state_dict()["state"]
    kept = {name: {key: array.copy() for key, array in moments.items()} for name, moments in state.items()}
    with pytest.raises(error, match=message):
        act(optimizer, param)
    assert np.array_equal(param, before)
    after = optimizer.state_dict()["state"]
    assert after.keys() == kept.keys()
    for name, moments in kept.items():
        assert all(np.array_equal(array, after[name][key]) for key, array in moments.items())
    assert optimizer.current_step == 1


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "'new': the parameter is a list; expected a NumPy array"),
        (np.float64(1.0), TypeError, "'new': the parameter is a float64; expected a NumPy array"),
        (np.ma.ones(2), TypeError, "'new': the parameter is a MaskedArray; expected a NumPy array"),
        (np.ones(2, int), TypeError, "'new': the parameter has dtype int64; expected float16, float32 or float64"),
        (np.ones(2, complex), TypeError, "'new': the parameter has dtype complex128; expected float16"),
        (np.ones(2, np.longdouble), TypeError, "'new': the parameter has dtype (float128|longdouble); expected"),
        (np.array([1.0, None]), TypeError, "'new': the parameter has dtype object; expected float16"),
        (read_only(np.ones(2)), ValueError, "'new': the parameter is read-only; expected .* mode='r\\+'"),
        (as_strided(np.ones(1), (2,), (0,)), ValueError, r"'new': the parameter has strides \(0,\) and shape \(2,\)"),
        (sliding_window_view(np.ones(4), 3, writeable=True), ValueError, "so elements may share memory; expected"),
    ],
)
def test_a_parameter_that_cannot_be_stepped(param: Any, error: type[Exception], message: str) -> None:
    grad = np.ones(np.shape(param))
    refused(error, message, lambda optimizer, _: optimizer.step("new", param, grad))
    refused(error, message, lambda optimizer, _: optimizer.step_rows("new", param, [0], grad[:1] if grad.ndim else 1.0))


def test_a_memmap_opened_for_reading(tmp_path: Path) -> None:
    np.ones(4).tofile(tmp_path / "table")
    mapped = np.memmap(tmp_path / "table", np.float64, "r")
    refused(ValueError, "'new': the parameter is read-only", lambda opt, _: opt.step("new", mapped, np.ones(4)))


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (np.ones((2, 3)), ValueError, r"'w': the gradient has shape \(2, 3\); expected \(3, 2\)"),
        (np.ones(2), ValueError, r"'w': the gradient has shape \(2,\); expected \(3, 2\)"),
        (1.0, ValueError, r"'w': the gradient has shape \(\); expected \(3, 2\)"),
        (None, TypeError, "'w': the gradient has dtype object; expected float16, float32 or float64"),
        (np.ones((3, 2), int), TypeError, "'w': the gradient has dtype int64; expected"),
        (np.ones((3, 2), complex), TypeError, "'w': the gradient has dtype complex128; expected"),
        (np.ma.ones((3, 2)), TypeError, "'w': the gradient is a MaskedArray, whose mask would be ignored; expected"),
    ],
)
def test_a_gradient_that_does_not_fit(grad: Any, error: type[Exception], message: str) -> None:
    refused(error, message, lambda optimizer, param: optimizer.step("w", param, grad))
    refused(error, message, lambda optimizer, param: optimizer.step_rows("w", param, [0, 1, 2], grad))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 3], IndexError, "'w': rows contains 3; expected 0 <= row < 3"),
        ([0, -1], IndexError, "'w': rows contains -1; expected"),
        (np.array([2**64 - 1, 0], np.uint64), IndexError, "'w': rows contains 18446744073709551615; expected"),
        ([0.0, 1.0], TypeError, "'w': rows has dtype float64; expected integers"),
        ([True, False], TypeError, "'w': rows has dtype bool; expected integers"),
        (np.zeros(0), TypeError, "'w': rows has dtype float64; expected integers"),
        (["0", "1"], TypeError, "'w': rows has dtype <U1; expected integers"),
        ([1], ValueError, r"'w': the gradient has shape \(2, 2\); expected \(1, 2\)"),
        ([[0, 1]], ValueError, r"'w': the gradient has shape \(2, 2\); expected \(1, 2, 2\)"),
    ],
)
def test_rows_that_are_not_there(rows: Any, error: type[Exception], message: str) -> None:
    refused(error, message, lambda optimizer, param: optimizer.step_rows("w", param, rows, np.ones((2, 2))))


def test_rows_of_what_has_none() -> None:
    refused(ValueError, r"'s': the parameter has shape \(\), so it has no rows; expected",
            lambda optimizer, _: optimizer.step_rows("s", np.array(1.0), [0], [1.0]))  # fmt: skip
    refused(IndexError, "'e': rows contains 0; expected 0 <= row < 0",
            lambda optimizer, _: optimizer.step_rows("e", np.ones((0, 2)), [0], [[1.0, 1.0]]))  # fmt: skip


@pytest.mark.parametrize("other", [np.ones((2, 3)), np.ones(6), np.ones((3, 2), np.float32), np.array(1.0)])
def test_a_name_whose_shape_or_dtype_changes(other: Any) -> None:
    message = r"'w': the parameter has shape .* and dtype .*; expected shape \(3, 2\) and dtype float64"
    refused(ValueError, message, lambda optimizer, _: optimizer.step("w", other, np.ones_like(other)))
    if other.ndim:
        refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("w", other, [0], np.ones_like(other[:1])))


@pytest.mark.parametrize(
    ("name", "error"), [(3, TypeError), (None, TypeError), ("a\0b", ValueError), ("\ud800", ValueError)]
)
def test_a_name_that_cannot_be_saved(name: Any, error: type[Exception]) -> None:
    refused(error, "the name .* expected", lambda optimizer, param: optimizer.step(name, param, np.ones((3, 2))))
    refused(error, "the name .* expected", lambda opt, param: opt.step_rows(name, param, [0], np.ones((1, 2))))


def test_a_gradient_that_the_step_would_overwrite() -> None:
    message = "'new': the gradient shares memory with the parameter; expected separate memory"
    memory = np.arange(10.0)
    refused(ValueError, message, lambda optimizer, _: optimizer.step("new", memory[1:], memory[:-1]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step("new", memory, memory[::-1]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("new", memory, [1, 0], memory[:2]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("new", memory, range(10), memory))
    assert np.array_equal(memory, np.arange(10.0))


NO_NUMBERS: tuple[Any, ...] = (
    "0.1", b"0.1", np.str_("0.1"), np.array("0.1"), True, np.True_, 1j, np.array([0.1]), [0.1], {},
)  # fmt: skip
NUMBERS_REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", -0.1, ValueError, "lr is -0.1; expected a finite number >= 0"),
    ("lr", float("nan"), ValueError, "lr is nan; expected a finite number >= 0"),
    ("lr", float("inf"), ValueError, "lr is inf; expected a finite number >= 0"),
    ("lr", "fast", TypeError, "lr is 'fast'; expected a finite number >= 0"),
    ("lr", None, TypeError, "lr is None; expected a finite number >= 0"),
    ("eps", 0.0, ValueError, "eps is 0.0; expected a finite number > 0"),
    ("eps", float("nan"), ValueError, "eps is nan; expected a finite number > 0"),
    ("weight_decay", -1, ValueError, "weight_decay is -1; expected a finite number >= 0"),
    ("weight_decay", float("nan"), ValueError, "weight_decay is nan; expected"),
    ("betas", (0.9, 1.0), ValueError, r"betas is \(0.9, 1.0\); expected two numbers in \[0, 1\)"),
    ("betas", (-0.1, 0.9), ValueError, r"betas is \(-0.1, 0.9\); expected two numbers in \[0, 1\)"),
    ("betas", (0.9, float("nan")), ValueError, r"betas is \(0.9, nan\); expected two numbers in \[0, 1\)"),
    ("betas", (0.9,), TypeError, r"betas is \(0.9,\); expected two numbers in \[0, 1\)"),
    ("betas", 0.9, TypeError, r"betas is 0.9; expected two numbers in \[0, 1\)"),
    *(
        (setting, value, TypeError, f"{setting} is {re.escape(repr(value))}; expected a finite number")
        for setting in ("lr", "eps", "weight_decay")
        for value in NO_NUMBERS
    ),
    ("lr", 10**400, ValueError, "lr is 1000.*; expected a finite number >= 0"),
    ("betas", "00", TypeError, r"betas is '00'; expected two numbers in \[0, 1\)"),
    ("betas", b"\0\0", TypeError, r"betas is b'.*'; expected two numbers in \[0, 1\)"),
    ("betas", (True, False), TypeError, r"betas is \(True, False\); expected two numbers in \[0, 1\)"),
    ("betas", {0.5: 1, 0.25: 2}, TypeError, r"betas is \{.*\}; expected two numbers in \[0, 1\)"),
    ("betas", frozenset((0.5, 0.25)), TypeError, r"betas is frozenset.*; expected two numbers in \[0, 1\)"),
    ("betas", (0.5, 0.5, 0.5), TypeError, r"betas is \(0.5, 0.5, 0.5\); expected two numbers in \[0, 1\)"),
    ("betas", ("a", "b"), TypeError, r"betas is \('a', 'b'\); expected two numbers in \[0, 1\)"),
]


@pytest.mark.parametrize(("setting", "value", "error", "message"), NUMBERS_REFUSED)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_settings_out_of_range(kind: Any, setting: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**{setting: value})
    optimizer = kind()
    before = getattr(optimizer, setting)
    with pytest.raises(error, match=message):
        setattr(optimizer, setting, value)
    assert getattr(optimizer, setting) == before


def test_zero_is_in_range_where_it_has_a_meaning() -> None:
    optimizer, param = Adam(lr=0, betas=(0, 0), weight_decay=0), np.ones(2)
    optimizer.step("w", param, np.ones(2))
    assert param.tolist() == [1, 1]


def test_numbers_of_numpy_are_numbers() -> None:
    optimizer = Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.25]), eps=np.array(1e-3))  # type: ignore[arg-type]
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (0.5, (0.5, 0.25), 1e-3)
    assert type(optimizer.lr) is float
    optimizer.lr, optimizer.betas = Fraction(1, 4), [np.float16(0.5), np.array(0.75)]  # type: ignore[assignment]
    assert (optimizer.lr, optimizer.betas) == (0.25, (0.5, 0.75))
    optimizer.lr = np.int64(2)  # type: ignore[assignment]
    assert optimizer.lr == 2.0


@pytest.mark.parametrize("name", ["Numba", "cuda"])
def test_an_unknown_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, param = Adam(), np.ones(2)
    monkeypatch.setenv("ROWSTEP_BACKEND", name)
    with pytest.raises(ValueError, match=f"ROWSTEP_BACKEND is '{name}'; expected 'numba' or 'reference'"):
        optimizer.step("w", param, np.ones(2))
    assert param.tolist() == [1, 1]
    assert optimizer.state_dict()["state"] == {}


def test_asking_for_numba_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    printed = python("""
import sys
import numpy as np
from rowstep.arrays import Adam
sys.modules["numba"] = None
optimizer, param = Adam(), np.zeros(2)
try:
    optimizer.step("w", param, np.ones(2))
except ImportError:
    print(len(optimizer.state_dict()["state"]), param.any())
""")
    assert printed == "0 False"
