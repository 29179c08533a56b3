"""rowstep.arrays refuses what it cannot do: a sentence says why, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rowstep.arrays import Adam, AdamW

pytestmark = pytest.mark.usefixtures("reference_backend")


def refused(error: type[Exception], message: str, act: Callable[[Adam, Any], object]) -> None:
    """``act`` raises, and leaves an optimizer and the parameter 'w' as they were."""
    optimizer, param = Adam(), np.arange(6.0).reshape(3, 2)
    optimizer.step("w", param, np.ones((3, 2)))
    before = [param.copy(), *(array.copy() for array in optimizer._moments["w"])]
    with pytest.raises(error, match=message):
        act(optimizer, param)
    assert list(optimizer._moments) == ["w"]
    assert all(np.array_equal(*pair) for pair in zip((param, *optimizer._moments["w"]), before, strict=True))
    assert optimizer.current_step == 1


READ_ONLY, ONES = np.broadcast_to(1.0, 2), np.ones((3, 2))
HUGE = np.full(1, 2**64 - 1, np.uint64)
FLOATS = "expected float16, float32 or float64"
CHANGED = r"'w': the parameter is float.* of shape .*; expected float64 of shape \(3, 2\), .* another name"


@pytest.mark.parametrize(
    ("name", "param", "grad", "error", "message"),
    [
        ("new", [1.0, 2.0], np.ones(2), TypeError, "'new': the parameter is a list; expected a NumPy array"),
        ("new", np.ma.ones(2), np.ones(2), TypeError, "'new': the parameter is a MaskedArray, whose mask would be"),
        ("new", np.ones(2, int), np.ones(2), TypeError, f"'new': the parameter has dtype int64; {FLOATS}"),
        ("new", np.ones(2, np.longdouble), np.ones(2), TypeError, f"'new': the parameter has dtype .*; {FLOATS}"),
        ("new", READ_ONLY, np.ones(2), ValueError, r"'new': the parameter is read-only; expected .* mode='r\+'"),
        ("w", None, np.ones((2, 3)), ValueError, r"'w': the gradient has shape \(2, 3\); expected \(3, 2\) for a"),
        ("w", None, None, TypeError, f"'w': the gradient has dtype object; {FLOATS}"),
        ("w", None, np.ones((3, 2), int), TypeError, f"'w': the gradient has dtype int64; {FLOATS}"),
        ("w", None, np.ma.ones((3, 2)), TypeError, "'w': the gradient is a MaskedArray, whose mask would be ignored"),
        ("w", np.ones((2, 3)), np.ones((2, 3)), ValueError, CHANGED),
        ("w", np.ones((3, 2), np.float32), ONES, ValueError, CHANGED),
    ],
)
@pytest.mark.parametrize("rows", [False, True])
def test_operands(rows: bool, name: Any, param: Any, grad: Any, error: type[Exception], message: str) -> None:
    def act(optimizer: Adam, own: Any) -> None:
        stepped = own if param is None else param
        if rows:
            optimizer.step_rows(name, stepped, range(len(stepped)), grad)
        else:
            optimizer.step(name, stepped, grad)

    refused(error, message, act)


@pytest.mark.parametrize(
    ("name", "param", "rows", "grad", "error", "message"),
    [
        ("w", None, [0, 3], np.ones((2, 2)), IndexError, "'w': rows contains 3; expected 0 <= row < 3"),
        ("w", None, [0, -1], np.ones((2, 2)), IndexError, "'w': rows contains -1; expected 0 <= row < 3"),
        ("w", None, HUGE, np.ones((1, 2)), IndexError, "'w': rows contains 18446744073709551615; expected 0 <= row"),
        ("w", None, [0.0, 1.0], np.ones((2, 2)), TypeError, "'w': rows has dtype float64; expected integers"),
        ("w", None, [1], np.ones((2, 2)), ValueError, r"'w': the gradient has shape \(2, 2\); expected \(1, 2\)"),
        ("e", np.array(1.0), [0], [1.0], ValueError, r"'e': the parameter has shape \(\), so no rows; .* Use step\(\)"),
        ("e", np.ones((0, 2)), [0], np.ones((1, 2)), IndexError, "'e': rows contains 0; expected 0 <= row < 0"),
    ],
)
def test_rows(name: str, param: Any, rows: Any, grad: Any, error: type[Exception], message: str) -> None:
    refused(error, message, lambda opt, own: opt.step_rows(name, own if param is None else param, rows, grad))


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("lr", -0.1, ValueError, "lr is -0.1; expected a finite number >= 0"),
        ("lr", float("nan"), ValueError, "lr is nan; expected a finite number >= 0"),
        ("lr", "high", TypeError, "the settings are {'lr': 'high', 'betas': .*}; expected numbers, and two for betas"),
        ("lr", [0.1], TypeError, r"the settings are {'lr': \[0.1\], .*}; expected numbers, and two for betas"),
        ("eps", 0.0, ValueError, "eps is 0.0; expected a finite number > 0"),
        ("weight_decay", -1, ValueError, "weight_decay is -1.0; expected a finite number >= 0"),
        ("betas", (0.9, 1.0), ValueError, r"betas\[1\] is 1.0; expected a number in \[0, 1\)"),
        ("betas", (0.9,), TypeError, r"'betas': \(0.9,\), .*; expected numbers, and two for betas"),
        ("betas", 0.9, TypeError, "'betas': 0.9, .*; expected numbers, and two for betas"),
    ],
)
def test_settings(setting: str, value: Any, error: type[Exception], message: str) -> None:
    """A new optimizer is refused; one whose attribute gets such a value does not step or save."""

    def changed(optimizer: Adam) -> Adam:
        setattr(optimizer, setting, value)
        return optimizer

    refused(error, message, lambda *_: AdamW(**{setting: value}))
    refused(error, message, lambda optimizer, param: changed(optimizer).step("new", param, ONES))
    refused(error, message, lambda optimizer, _: changed(optimizer).save("state.npz"))


def test_zero_and_numbers_of_numpy_are_in_range() -> None:
    optimizer, param = Adam(lr=0, betas=(0, 0), weight_decay=0), np.ones(2)
    optimizer.step("w", param, np.ones(2))
    assert param.tolist() == [1, 1]
    optimizer = Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.25]), eps=np.array(1e-3))  # type: ignore[arg-type]
    optimizer.weight_decay = np.int64(2)  # type: ignore[assignment]
    found = optimizer.state_dict()
    assert (found["lr"], found["betas"], found["eps"], found["weight_decay"]) == (0.5, (0.5, 0.25), 1e-3, 2.0)
    assert type(optimizer.lr) is type(found["weight_decay"]) is float
