"""rowstep.arrays refuses what it cannot do: a sentence says why, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rowstep.arrays import Adam, AdamW
from tests.kernels.test_backends import python


pytestmark = pytest.mark.usefixtures("reference_backend")


def refused(error: type[Exception], message: str, act: Callable[[Adam, Any], object]) -> None:
    """``act`` raises, and leaves an optimizer and the parameter 'w' as they were."""
    optimizer, param = Adam(), np.arange(6.0).reshape(3, 2)
    optimizer.step("w", param, np.ones((3, 2)))
    before = param.copy()
    kept = {key: array.copy() for key, array in optimizer.state_dict()["state"]["w"].items()}
    with pytest.raises(error, match=message):
        act(optimizer, param)
    assert np.array_equal(param, before)
    assert list(optimizer._moments) == ["w"]
    assert all(np.array_equal(array, getattr(optimizer._moments["w"], key)) for key, array in kept.items())
    assert optimizer.current_step == 1


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "'new': the parameter is a list; expected a NumPy array"),
        (np.ma.ones(2), TypeError, "'new': the parameter is a MaskedArray; expected a NumPy array"),
        (np.ones(2, int), TypeError, "'new': the parameter has dtype int64; expected float16, float32 or float64"),
        (np.ones(2, np.longdouble), TypeError, "'new': the parameter has dtype (float128|longdouble); expected"),
        (read_only(np.ones(2)), ValueError, r"'new': the parameter is read-only; expected .* mode='r\+'"),
    ],
)
def test_a_parameter_that_cannot_be_stepped(param: Any, error: type[Exception], message: str) -> None:
    grad = np.ones(np.shape(param))
    refused(error, message, lambda optimizer, _: optimizer.step("new", param, grad))
    refused(error, message, lambda optimizer, _: optimizer.step_rows("new", param, [0], grad[:1]))


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (np.ones((2, 3)), ValueError, r"'w': the gradient has shape \(2, 3\); expected \(3, 2\), because .* \(3, 2\)"),
        (1.0, ValueError, r"'w': the gradient has shape \(\); expected \(3, 2\)"),
        (None, TypeError, "'w': the gradient has dtype object; expected float16, float32 or float64"),
        (np.ones((3, 2), int), TypeError, "'w': the gradient has dtype int64; expected"),
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
        ([1], ValueError, r"'w': the gradient has shape \(2, 2\); expected \(1, 2\)"),
        ([[0, 1]], ValueError, r"'w': the gradient has shape \(2, 2\); expected \(1, 2, 2\)"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, error: type[Exception], message: str) -> None:
    refused(error, message, lambda optimizer, param: optimizer.step_rows("w", param, rows, np.ones((2, 2))))


def test_rows_of_what_has_none() -> None:
    message = r"'e': the parameter has shape \(\), so no rows; expected rows. Use step\(\) instead"
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("e", np.array(1.0), [0], [1.0]))
    message = "'e': rows contains 0; expected 0 <= row < 0"
    refused(IndexError, message, lambda optimizer, _: optimizer.step_rows("e", np.ones((0, 2)), [0], [[1.0, 1.0]]))


@pytest.mark.parametrize("other", [np.ones((2, 3)), np.ones(6), np.ones((3, 2), np.float32)])
def test_a_name_whose_shape_or_dtype_changes(other: Any) -> None:
    message = r"'w': the parameter has shape .* and dtype .*; expected shape \(3, 2\) and dtype float64.* another name"
    refused(ValueError, message, lambda optimizer, _: optimizer.step("w", other, np.ones_like(other)))
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("w", other, [0], np.ones_like(other[:1])))


@pytest.mark.parametrize(("name", "error"), [(3, TypeError), ("a\0b", ValueError), ("\ud800", ValueError)])
def test_a_name_that_cannot_be_saved(name: Any, error: type[Exception]) -> None:
    refused(error, "the name .* expected", lambda optimizer, param: optimizer.step(name, param, np.ones((3, 2))))
    refused(error, "the name .* expected", lambda opt, param: opt.step_rows(name, param, [0], np.ones((1, 2))))


def test_a_gradient_that_the_step_would_overwrite() -> None:
    message = "'new': the gradient shares memory with the parameter; expected separate memory. Pass a copy"
    memory = np.arange(10.0)
    refused(ValueError, message, lambda optimizer, _: optimizer.step("new", memory[1:], memory[:-1]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step("new", memory, memory[::-1]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("new", memory, [1, 0], memory[:2]))
    refused(ValueError, message, lambda optimizer, _: optimizer.step_rows("new", memory, range(10), memory))
    assert np.array_equal(memory, np.arange(10.0))


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("lr", -0.1, ValueError, "lr is -0.1; expected a finite number >= 0"),
        ("lr", float("nan"), ValueError, "lr is nan; expected a finite number >= 0"),
        ("lr", float("inf"), ValueError, "lr is inf; expected a finite number >= 0"),
        ("lr", "0.1", TypeError, "lr is '0.1'; expected a finite number >= 0"),
        ("lr", None, TypeError, "lr is None; expected a finite number >= 0"),
        ("lr", True, TypeError, "lr is True; expected a finite number >= 0"),
        ("lr", np.array([0.1]), TypeError, r"lr is array\(\[0.1\]\); expected a finite number >= 0"),
        ("eps", 0.0, ValueError, "eps is 0.0; expected a finite number > 0"),
        ("weight_decay", -1, ValueError, "weight_decay is -1; expected a finite number >= 0"),
        ("betas", (0.9, 1.0), ValueError, r"betas\[1\] is 1.0; expected a number in \[0, 1\)"),
        ("betas", (-0.1, 0.9), ValueError, r"betas\[0\] is -0.1; expected a number in \[0, 1\)"),
        ("betas", "00", TypeError, r"betas\[0\] is '0'; expected a number in \[0, 1\)"),
        ("betas", (0.9,), TypeError, r"betas is \(0.9,\); expected two numbers in \[0, 1\)"),
        ("betas", 0.9, TypeError, r"betas is 0.9; expected two numbers in \[0, 1\)"),
    ],
)
def test_settings_out_of_range(setting: str, value: Any, error: type[Exception], message: str) -> None:
    """A new optimizer is refused; one whose attribute gets such a value does not step or save."""

    def step(optimizer: Adam, param: Any) -> None:
        setattr(optimizer, setting, value)
        optimizer.step("new", param, np.ones((3, 2)))

    def save(optimizer: Adam, _: Any) -> None:
        setattr(optimizer, setting, value)
        optimizer.save("state.npz")

    refused(error, message, lambda *_: AdamW(**{setting: value}))
    refused(error, message, step)
    refused(error, message, save)


def test_zero_and_numbers_of_numpy_are_in_range() -> None:
    optimizer, param = Adam(lr=0, betas=(0, 0), weight_decay=0), np.ones(2)
    optimizer.step("w", param, np.ones(2))
    assert param.tolist() == [1, 1]
    optimizer = Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.25]), eps=np.array(1e-3))  # type: ignore[arg-type]
    optimizer.weight_decay = np.int64(2)  # type: ignore[assignment]
    found = optimizer.state_dict()
    assert (found["lr"], found["betas"], found["eps"], found["weight_decay"]) == (0.5, (0.5, 0.25), 1e-3, 2.0)
    assert type(optimizer.lr) is type(found["weight_decay"]) is float


def test_an_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "cuda")
    optimizer, param = Adam(), np.ones(2)
    with pytest.raises(ValueError, match="ROWSTEP_BACKEND is 'cuda'; expected 'numba' or 'reference'"):
        optimizer.step("w", param, np.ones(2))
    assert (param.tolist(), optimizer.state_dict()["state"]) == ([1, 1], {})


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
