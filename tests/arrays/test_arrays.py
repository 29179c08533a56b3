"""rowstep.arrays: the update of plain NumPy buffers, against textbook Adam by hand and against torch."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import rowstep.arrays
from rowstep.arrays import Adam, AdamW
from tests.kernels.test_backends import python

Array = NDArray[Any]


class ByHand:
    """Adam as the paper writes it, in float64, with the same storage: no trick, no shortcut."""

    def __init__(self, param: Array, decoupled: bool = False, **settings: Any) -> None:
        self.p, self.m, self.v = param.copy(), np.zeros_like(param), np.zeros_like(param)
        self.decoupled = decoupled
        self.settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | settings

    def step(self, t: int, grad: Array, where: Any = ...) -> None:
        lr, (beta1, beta2), eps, decay = self.settings.values()
        p, m, v, g = (array.astype(np.float64) for array in (self.p[where], self.m[where], self.v[where], grad))
        if self.decoupled:
            p = p - lr * decay * p
        else:
            g = g + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        self.p[where], self.m[where], self.v[where] = p - lr * m_hat / (np.sqrt(v_hat) + eps), m, v


def normal(*shape: int, dtype: Any = np.float64, seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def moments(optimizer: Adam, name: str) -> tuple[Array, Array]:
    state = optimizer.state_dict()["state"][name]
    return state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize(("kind", "weight_decay"), [(Adam, 0.0), (Adam, 0.1), (AdamW, 0.1)])
def test_rows_are_adam_by_hand_and_others_stay(kind: type[Adam], weight_decay: float, backend: str) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay}
    param, start = normal(9, 2, 2), normal(9, 2, 2)
    hand, optimizer = ByHand(param, kind is AdamW, **settings), kind(**settings)
    for t, rows in enumerate(([5, 1, 5, 0], [8], [1, 1, 1, 7], []), start=1):
        grad = normal(len(rows), 2, 2, seed=t)
        optimizer.step_rows("e", param, rows, grad)
        optimizer.end_iteration()
        distinct = np.unique(np.array(rows, np.int64))
        total = np.array([sum(grad[i] for i, row in enumerate(rows) if row == one) for one in distinct])
        hand.step(t, total.reshape(-1, 2, 2), distinct)
    assert np.array_equal(param[[2, 3, 4, 6]], start[[2, 3, 4, 6]])
    for array, expected in zip((param, *moments(optimizer, "e")), (hand.p, hand.m, hand.v), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-12)


@pytest.mark.parametrize(("kind", "theirs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_steps_under_settings_that_change_equal_torch_in_float64(kind: type[Adam], theirs: Any, backend: str) -> None:
    params = {"a": normal(5, 4, seed=1), "b": normal(3, seed=2), "c": np.array(0.5)}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(param.copy())) for name, param in params.items()}
    optimizer, expected = kind(), theirs(tensors.values())
    for t in range(20):
        settings = {"lr": 0.1 / (1 + t), "betas": (0.04 * t, 0.95), "eps": 1e-4 * (1 + t), "weight_decay": 0.01 * t}
        expected.param_groups[0].update(settings)
        for key, value in settings.items():
            setattr(optimizer, key, value)
        for name, param in params.items():
            grad = normal(*param.shape, seed=t)
            tensors[name].grad = torch.from_numpy(grad.copy())
            optimizer.step(name, param, grad)
        optimizer.end_iteration()
        expected.step()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(params[name], tensor.detach(), rtol=1e-12)
        for moment, key in zip(moments(optimizer, name), ("exp_avg", "exp_avg_sq"), strict=True):
            np.testing.assert_allclose(moment, expected.state[tensor][key], rtol=1e-12)


def test_the_public_names_and_defaults() -> None:
    assert rowstep.arrays.__all__ == ["Adam", "AdamW"]
    for optimizer, weight_decay in ((Adam(), 0.0), (AdamW(), 1e-2)):
        assert (optimizer.lr, optimizer.betas, optimizer.eps) == (1e-3, (0.9, 0.999), 1e-8)
        assert optimizer.weight_decay == weight_decay


def test_the_counter_is_one_for_all_names_and_moves_on_end_iteration_only(backend: str) -> None:
    """A name first seen late is corrected by the common counter, not by its own age."""
    optimizer, grad = Adam(lr=0.1, eps=1e-3), np.array([1.0, -2.0, 0.0])
    assert optimizer.current_step == 1
    for _ in range(9):
        optimizer.step_rows("early", np.zeros(3), [1], [0.5])
        optimizer.end_iteration()
    for name in ("first", "second"):
        param = np.zeros(3)
        hand = ByHand(param, lr=0.1, eps=1e-3)
        optimizer.step(name, param, grad)
        hand.step(10, grad)
        np.testing.assert_allclose(param, hand.p, rtol=1e-12)
    assert optimizer.current_step == 10


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arithmetic_is_float64_and_storage_the_dtype_of_the_array(dtype: Any, backend: str) -> None:
    """A stored number is the float64 result, rounded: textbook Adam in float64 gives the same bits.

    (With betas of one digit the results are often halfway between two numbers, and its other order of operations would
    show.)
    """
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.876543, 0.9912345)}
    param = normal(1000, dtype=dtype)
    hand, optimizer = ByHand(param, **settings), Adam(**settings)
    for t in range(1, 6):
        grad = normal(1000, dtype=dtype, seed=t)
        optimizer.step("w", param, grad)
        optimizer.end_iteration()
        hand.step(t, grad)
    for array, expected in zip((param, *moments(optimizer, "w")), (hand.p, hand.m, hand.v), strict=True):
        assert array.dtype == dtype
        assert np.array_equal(array, expected)


def test_a_gradient_of_a_wider_dtype_is_not_rounded_first(backend: str) -> None:
    param, grad = np.zeros(3, np.float32), np.array([1e-300, 1 + 1e-12, 1e39])
    hand, optimizer = ByHand(param), Adam()
    optimizer.step("w", param, grad)
    with np.errstate(over="ignore"):
        hand.step(1, grad)
    assert np.array_equal(param, hand.p)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float16_gradients_are_summed_beyond_their_range(dtype: Any, backend: str) -> None:
    param = np.zeros((2, 3), dtype)
    Adam(lr=0.5).step_rows("e", param, [1, 1, 1, 1], np.full((4, 3), 60000, np.float16))
    assert param.tolist() == [[0] * 3, [-0.5] * 3]
    Adam(lr=0.5).step("w", param, np.full((2, 3), 60000, np.float16))
    assert param.tolist() == [[-0.5] * 3, [-1.0] * 3]


def test_duplicates_are_summed_in_order_of_occurrence(backend: str) -> None:
    numbers = np.array([1e16, 1.0, -1e16, 1.0])
    optimizer = Adam()
    optimizer.step_rows("e", np.zeros((3, 1)), [2, 2, 2, 2], numbers.reshape(4, 1))
    total = ((numbers[0] + numbers[1]) + numbers[2]) + numbers[3]
    assert moments(optimizer, "e")[0][2, 0] == total * (1 - 0.9)


LAYOUTS: dict[str, Any] = {
    "fortran": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "backwards": lambda array: array[::-1, ::-1].copy()[::-1, ::-1],
    "axes exchanged": lambda array: array.transpose(1, 2, 0).copy().transpose(2, 0, 1),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "unaligned": lambda array: np.ndarray(array.shape, array.dtype, bytearray(b"x" + array.tobytes()), offset=1),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_the_parameter_or_the_gradient_gives_the_same_bits(layout: str, backend: str) -> None:
    """The third parameter also changes its own layout between steps."""
    plain = normal(60, 8, 30, dtype=np.float32)
    params, optimizers = [plain, LAYOUTS[layout](plain), plain.copy()], [Adam(), Adam(), Adam()]
    for t in range(3):
        grad, rows = normal(60, 8, 30, dtype=np.float32, seed=t), np.array([5, 59, 5])
        for optimizer, param, g in zip(optimizers, params, (grad, grad, LAYOUTS[layout](grad)), strict=True):
            optimizer.step("w", param, g)
            optimizer.step_rows("w", param, rows, g[:3])
            optimizer.end_iteration()
        params[2] = LAYOUTS[layout](params[2]) if t == 0 else np.array(params[2], np.float32, order="C")
    assert all(np.array_equal(plain, param) for param in params)


@pytest.mark.parametrize("index_type", [np.int8, np.uint64, list])
def test_rows_of_any_integer_type_and_shape(index_type: Any, backend: str) -> None:
    rows, grad = np.array([[4, 0, 4], [1, 1, 1]]), normal(2, 6, 2)[:, ::2]
    nested = rows.tolist() if index_type is list else rows.astype(index_type)
    for shape in ((5, 2), (5,)):
        params = [normal(*shape), normal(*shape)]
        g = grad if len(shape) == 2 else grad[..., 0]
        Adam().step_rows("e", params[0], nested, g)
        Adam().step_rows("e", params[1], rows.ravel(), g.reshape(6, *shape[1:]).copy())
        Adam().step_rows("e", params[0], 3, g[0, 0])
        Adam().step_rows("e", params[1], [3], g[0, :1])
        assert np.array_equal(params[0], params[1])


def test_gradients_that_are_lists_or_share_memory(backend: str) -> None:
    """A list, a broadcast number, the parameter itself or a part of it, its neighbour in every row."""
    param, expected, both = normal(5000), normal(5000), normal(500, 2)
    for grad in ([0.5] * 5000, np.broadcast_to(0.5, 5000)):
        Adam().step("w", param, grad)
        Adam().step("w", expected, np.full(5000, 0.5))
    Adam().step("w", param, param)
    Adam().step("w", expected, expected.copy())
    Adam().step("w", param[1:], param[:-1])
    Adam().step("w", expected[1:], expected[:-1].copy())
    Adam().step_rows("w", param, [1, 0], param[:2])
    Adam().step_rows("w", expected, [1, 0], expected[:2].copy())
    assert np.array_equal(param, expected)
    column, grad = both[:, 0].copy(), both[:, 1].copy()
    Adam().step("w", both[:, 0], both[:, 1])
    Adam().step("w", column, grad)
    assert np.array_equal(both, np.stack([column, grad], axis=1))


def test_arrays_without_dimensions_and_without_elements(backend: str) -> None:
    optimizer, scalar = Adam(lr=0.5), np.array(1.0, np.float32)
    optimizer.step("s", scalar, 2.0)
    assert scalar == pytest.approx(0.5)
    for shape in ((0,), (3, 0), (0, 4)):
        optimizer.step(f"empty {shape}", np.zeros(shape), np.zeros(shape))
        optimizer.step_rows(f"empty {shape}", np.zeros(shape), np.zeros(0, int), np.zeros((0, *shape[1:])))
    optimizer.step_rows("empty (3, 0)", np.zeros((3, 0)), [2, 2], np.zeros((2, 0)))


def test_numbers_that_are_not_finite_pass_through_without_warnings(backend: str) -> None:
    param = np.ones(3, np.float32)
    Adam().step("w", param, np.array([np.nan, np.inf, 1.0], np.float32))
    assert np.isnan(param[:2]).all()
    assert param[2] == pytest.approx(0.999)


def test_large_arrays_have_the_same_bits_on_both_backends_and_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    before, results = numba.get_num_threads(), []
    for backend, threads in (("reference", 1), ("numba", 1), ("numba", most)):
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        numba.set_num_threads(threads)
        optimizer, params = Adam(), [normal(5001, 17, dtype=np.float32) for _ in range(2)]
        for t in range(2):
            rows, grad = np.random.default_rng(t).integers(5001, size=5001), normal(5001, 17, dtype=np.float32, seed=t)
            optimizer.step("w", params[0], grad)
            optimizer.step_rows("e", params[1], rows, grad)
            optimizer.end_iteration()
        results.append((*params, *moments(optimizer, "w"), *moments(optimizer, "e")))
    numba.set_num_threads(before)
    for result in results[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_a_step_has_no_temporaries_of_the_size_of_the_array(backend: str) -> None:
    optimizer, param, grad = Adam(), np.zeros(2_000_000, np.float32), np.ones(2_000_000, np.float32)
    optimizer.step("w", param, grad)
    tracemalloc.start()
    optimizer.step("w", param, grad)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < param.nbytes / 8


STEP = """
import sys, warnings
import numpy as np
from rowstep.arrays import Adam
print(sorted({"torch", "numba"} & set(sys.modules)))
optimizer, param = Adam(lr=0.5), np.zeros((3, 2), np.float32)
def step():
    optimizer.step("w", param, np.ones((3, 2), np.float32))
    optimizer.step_rows("w", param, [1, 1], np.ones((2, 2), np.float32))
"""


def test_torch_is_never_imported_and_numba_by_the_first_step(backend: str, tmp_path: Path) -> None:
    lines = python(f"{STEP}step(); path = {str(tmp_path / 'state.npz')!r}; optimizer.save(path); optimizer.load(path)\n"
                   'print(sorted({"torch", "numba"} & set(sys.modules)))').splitlines()  # fmt: skip
    assert lines == ["[]", "['numba']" if backend == "numba" else "[]"]
