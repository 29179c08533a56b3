"""rowstep.arrays: the update of plain NumPy buffers, against textbook Adam by hand and against torch."""

from __future__ import annotations

import copy
import threading
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


KINDS = [(Adam, 0.0), (Adam, 0.1), (AdamW, 0.1)]


@pytest.mark.parametrize(("kind", "weight_decay"), KINDS)
def test_a_step_is_adam_by_hand(kind: type[Adam], weight_decay: float, backend: str) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay}
    param = normal(7, 3)
    hand, optimizer = ByHand(param, kind is AdamW, **settings), kind(**settings)
    for t in range(1, 20):
        grad = normal(7, 3, seed=t)
        optimizer.step("w", param, grad)
        optimizer.end_iteration()
        hand.step(t, grad)
    for array, expected in zip((param, *moments(optimizer, "w")), (hand.p, hand.m, hand.v), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-12)


@pytest.mark.parametrize(("kind", "weight_decay"), KINDS)
def test_rows_are_adam_by_hand_and_others_stay(kind: type[Adam], weight_decay: float, backend: str) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": weight_decay}
    param = normal(9, 2, 2)
    start = param.copy()
    hand, optimizer = ByHand(param, kind is AdamW, **settings), kind(**settings)
    for t, rows in enumerate(([5, 1, 5, 0], [8], [1, 1, 1, 7], []), start=1):
        grad = normal(len(rows), 2, 2, seed=t)
        optimizer.step_rows("e", param, rows, grad)
        optimizer.end_iteration()
        distinct = np.unique(np.array(rows, np.int64))
        total = np.array([sum(grad[i] for i, row in enumerate(rows) if row == one) for one in distinct])
        hand.step(t, total.reshape(-1, 2, 2), distinct)
    untouched = [2, 3, 4, 6]
    assert np.array_equal(param[untouched], start[untouched])
    assert not any(moment[untouched].any() for moment in moments(optimizer, "e"))
    for array, expected in zip((param, *moments(optimizer, "e")), (hand.p, hand.m, hand.v), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-12)


@pytest.mark.parametrize(("kind", "weight_decay"), KINDS)
def test_many_parameters_equal_torch_in_float64(kind: type[Adam], weight_decay: float, backend: str) -> None:
    params = {"a": normal(5, 4, seed=1), "b": normal(3, seed=2), "c": np.array(0.5)}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(param.copy())) for name, param in params.items()}
    theirs = torch.optim.AdamW if kind is AdamW else torch.optim.Adam
    expected = theirs(tensors.values(), lr=0.01, weight_decay=weight_decay)
    optimizer = kind(lr=0.01, weight_decay=weight_decay)
    for t in range(30):
        optimizer.lr = expected.param_groups[0]["lr"] = 0.01 / (1 + t)
        for name, param in params.items():
            grad = normal(*param.shape, seed=t)
            tensors[name].grad = torch.from_numpy(grad.copy())
            optimizer.step(name, param, grad)
        optimizer.end_iteration()
        expected.step()
    for name, param in params.items():
        np.testing.assert_allclose(param, tensors[name].detach().numpy(), rtol=1e-12)
        state = expected.state[tensors[name]]
        np.testing.assert_allclose(moments(optimizer, name)[0], state["exp_avg"].numpy(), rtol=1e-12)
        np.testing.assert_allclose(moments(optimizer, name)[1], state["exp_avg_sq"].numpy(), rtol=1e-12)


def test_all_rows_once_equal_a_step(backend: str) -> None:
    by_rows, whole = normal(6, 3, dtype=np.float32), normal(6, 3, dtype=np.float32)
    one, other = Adam(), Adam()
    for t in range(5):
        grad, order = normal(6, 3, dtype=np.float32, seed=t), np.random.default_rng(t).permutation(6)
        one.step_rows("e", by_rows, order, grad[order])
        other.step("e", whole, grad)
        one.end_iteration()
        other.end_iteration()
    assert np.array_equal(by_rows, whole)


def test_the_public_names() -> None:
    assert rowstep.arrays.__all__ == ["Adam", "AdamW"]
    assert all(getattr(rowstep.arrays, name).__doc__ for name in rowstep.arrays.__all__)


def test_defaults() -> None:
    adam, adamw = Adam(), AdamW()
    assert (adam.lr, adam.betas, adam.eps, adam.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert (adamw.lr, adamw.betas, adamw.eps, adamw.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 1e-2)


def test_the_counter_starts_at_1_and_moves_on_end_iteration_only(backend: str) -> None:
    optimizer, param = Adam(), normal(4)
    assert optimizer.current_step == 1
    optimizer.step("a", param, param * 0.5)
    optimizer.step_rows("b", param, [1], [0.5])
    assert optimizer.current_step == 1
    optimizer.end_iteration()
    assert optimizer.current_step == 2


def test_all_names_of_an_iteration_share_the_bias_correction(backend: str) -> None:
    """A name first seen late is corrected by the common counter, not by its own age."""
    optimizer, late = Adam(lr=0.1, eps=1e-3), np.zeros(3)
    for _ in range(9):
        optimizer.end_iteration()
    hand = ByHand(late, lr=0.1, eps=1e-3)
    for name in ("first", "second"):
        param, grad = np.zeros(3), np.array([1.0, -2.0, 0.0])
        optimizer.step(name, param, grad)
        hand.p[:] = hand.m[:] = hand.v[:] = 0
        hand.step(10, grad)
        np.testing.assert_allclose(param, hand.p, rtol=1e-12)


def test_state_is_kept_by_name_and_allocated_when_first_seen(backend: str) -> None:
    optimizer, shared = Adam(), np.zeros(2)
    assert optimizer.state_dict()["state"] == {}
    optimizer.step("a", shared, np.ones(2))
    assert list(optimizer.state_dict()["state"]) == ["a"]
    optimizer.step("b", shared, -np.ones(2))
    assert moments(optimizer, "a")[0].tolist() == pytest.approx([0.1, 0.1])
    assert moments(optimizer, "b")[0].tolist() == pytest.approx([-0.1, -0.1])


def test_settings_may_change_between_steps(backend: str) -> None:
    optimizer, param = AdamW(), normal(5)
    hand = ByHand(param, decoupled=True)
    for t in range(1, 6):
        changed = {"lr": 0.1 / t, "betas": (0.1 * t, 0.9), "eps": 1e-4 * t, "weight_decay": 0.01 * t}
        for key, value in changed.items():
            setattr(optimizer, key, value)
        hand.settings = changed
        grad = normal(5, seed=t)
        optimizer.step("w", param, grad)
        optimizer.end_iteration()
        hand.step(t, grad)
    np.testing.assert_allclose(param, hand.p, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arithmetic_is_float64_and_storage_the_dtype_of_the_array(dtype: Any, backend: str) -> None:
    """A stored number is the float64 result, rounded: textbook Adam in float64 gives the same bits.

    (With betas of one digit the results are often halfway between two numbers, and its other order of operations would
    show.) The kernels round to float16 by way of float32, which now and then goes to the other neighbour.
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
        np.testing.assert_array_max_ulp(array, expected, maxulp=1 if dtype == np.float16 else 0)


def test_a_gradient_of_a_wider_dtype_is_not_rounded_first(backend: str) -> None:
    param, grad = np.zeros(3, np.float32), np.array([1e-300, 1 + 1e-12, 1e39])
    hand, optimizer = ByHand(param), Adam()
    optimizer.step("w", param, grad)
    with np.errstate(over="ignore"):
        hand.step(1, grad)
    assert np.array_equal(param, hand.p)


def test_float16_duplicates_are_summed_beyond_its_range(backend: str) -> None:
    param = np.zeros((2, 3), np.float16)
    optimizer = Adam(lr=0.5)
    optimizer.step_rows("e", param, [1, 1, 1, 1], np.full((4, 3), 60000, np.float16))
    assert param.tolist() == [[0] * 3, [-0.5] * 3]


def test_duplicates_are_summed_in_order_of_occurrence(backend: str) -> None:
    numbers = np.array([1e16, 1.0, -1e16, 1.0])
    optimizer = Adam()
    optimizer.step_rows("e", np.zeros((3, 1)), [2, 2, 2, 2], numbers.reshape(4, 1))
    total = ((numbers[0] + numbers[1]) + numbers[2]) + numbers[3]
    assert moments(optimizer, "e")[0][2, 0] == total * (1 - 0.9)


LAYOUTS: dict[str, Any] = {
    "fortran": np.asfortranarray,
    "every other": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    "backwards": lambda array: array[::-1, ::-1].copy()[::-1, ::-1],
    "axes exchanged": lambda array: array.transpose(1, 2, 0).copy().transpose(2, 0, 1),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "unaligned": lambda array: np.ndarray(array.shape, array.dtype, bytearray(b"x" + array.tobytes()), offset=1),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad_layout", ["plain", "same"])
def test_any_layout_gives_the_same_bits(layout: str, grad_layout: str, backend: str) -> None:
    plain, optimizer, other = normal(60, 8, 30, dtype=np.float32), Adam(), Adam()
    laid_out = LAYOUTS[layout](plain)
    assert np.array_equal(plain, laid_out)
    for t in range(3):
        grad, rows = normal(60, 8, 30, dtype=np.float32, seed=t), np.array([5, 59, 5])
        laid_out_grad = LAYOUTS[layout](grad) if grad_layout == "same" else grad
        optimizer.step("w", plain, grad)
        other.step("w", laid_out, laid_out_grad)
        optimizer.step_rows("w", plain, rows, grad[:3])
        other.step_rows("w", laid_out, rows, laid_out_grad[:3])
        optimizer.end_iteration()
        other.end_iteration()
    assert np.array_equal(plain, laid_out)


def test_a_name_may_change_its_layout(backend: str) -> None:
    plain, turned, optimizer, other = normal(4, 3), np.asfortranarray(normal(4, 3)), Adam(), Adam()
    for t in range(4):
        grad = normal(4, 3, seed=t)
        optimizer.step("w", plain, grad)
        turned = (np.asfortranarray if t % 2 else np.ascontiguousarray)(turned)
        other.step("w", turned, grad)
    assert np.array_equal(plain, turned)


@pytest.mark.parametrize("index_type", [np.int8, np.uint64, np.int64, list])
def test_rows_of_any_integer_type_and_shape(index_type: Any, backend: str) -> None:
    nested, flat = normal(5, 2), normal(5, 2)
    rows, grad = np.array([[4, 0, 4], [1, 1, 1]]), normal(2, 3, 2)
    Adam().step_rows("e", nested, rows.tolist() if index_type is list else rows.astype(index_type), grad)
    Adam().step_rows("e", flat, rows.ravel(), grad.reshape(6, 2))
    assert np.array_equal(nested, flat)
    one, other = normal(5, 2), normal(5, 2)
    Adam().step_rows("e", one, 3, grad[0, 0])
    Adam().step_rows("e", other, [3], grad[0, :1])
    assert np.array_equal(one, other)


def test_rows_of_a_vector_and_of_every_other_gradient(backend: str) -> None:
    param, expected, grad = normal(6), normal(6), normal(8)
    Adam().step_rows("b", param, [5, 0, 5, 2], grad[::2])
    Adam().step_rows("b", expected, [5, 0, 5, 2], grad[::2].copy())
    assert np.array_equal(param, expected)
    assert np.flatnonzero(param != normal(6)).tolist() == [0, 2, 5]


@pytest.mark.parametrize("grad", [np.broadcast_to(0.5, (4, 3)), [[0.5] * 3] * 4])
def test_a_gradient_that_is_no_array_of_its_own(grad: Any, backend: str) -> None:
    param, expected = np.zeros((4, 3)), np.zeros((4, 3))
    Adam().step("w", param, grad)
    Adam().step("w", expected, np.full((4, 3), 0.5))
    Adam().step_rows("w", param, [0, 1, 1, 3], grad)
    Adam().step_rows("w", expected, [0, 1, 1, 3], np.full((4, 3), 0.5))
    assert np.array_equal(param, expected)


def test_the_gradient_may_be_the_parameter_itself(backend: str) -> None:
    param, expected = normal(5000), normal(5000)
    Adam().step("w", param, param)
    Adam().step("w", expected, expected.copy())
    assert np.array_equal(param, expected)


def test_parameter_and_gradient_may_interleave(backend: str) -> None:
    both = normal(500, 2)
    expected, grad = both[:, 0].copy(), both[:, 1].copy()
    Adam().step("w", both[:, 0], both[:, 1])
    Adam().step("w", expected, grad)
    assert np.array_equal(both, np.stack([expected, grad], axis=1))


def test_arrays_without_dimensions_and_without_elements(backend: str) -> None:
    optimizer, scalar = Adam(lr=0.5), np.array(1.0, np.float32)
    optimizer.step("s", scalar, 2.0)
    assert scalar == pytest.approx(0.5)
    for shape in ((0,), (3, 0), (0, 4)):
        optimizer.step(f"empty {shape}", np.zeros(shape), np.zeros(shape))
        optimizer.step_rows(f"empty {shape}", np.zeros(shape), np.zeros(0, int), np.zeros((0, *shape[1:])))
    optimizer.step_rows("empty (3, 0)", np.zeros((3, 0)), [2, 2], np.zeros((2, 0)))
    assert moments(optimizer, "empty (3, 0)")[0].shape == (3, 0)


def test_a_memmap_is_stepped_in_its_file(tmp_path: Path, backend: str) -> None:
    start, grad = normal(50, 4, dtype=np.float32), normal(50, 4, dtype=np.float32, seed=1)
    file = tmp_path / "table"
    start.tofile(file)
    optimizer, other = Adam(), Adam()
    mapped = np.memmap(file, np.float32, "r+", shape=(50, 4))
    optimizer.step("e", mapped, grad)
    optimizer.step_rows("e", mapped, [49, 3], np.memmap(file, np.float32, "r", shape=(50, 4))[:2].copy())
    expected = start.copy()
    other.step("e", expected, grad)
    other.step_rows("e", expected, [49, 3], expected[:2].copy())
    mapped.flush()
    del mapped
    assert np.array_equal(np.fromfile(file, np.float32).reshape(50, 4), expected)


def test_numbers_that_are_not_finite_pass_through_without_warnings(backend: str) -> None:
    param = np.ones(3, np.float32)
    Adam().step("w", param, np.array([np.nan, np.inf, 1.0], np.float32))
    assert np.isnan(param[:2]).all()
    assert param[2] == pytest.approx(0.999)


@pytest.mark.parametrize("kind", ["step", "rows"])
def test_large_arrays_have_the_same_bits_on_both_backends_and_any_threads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    ways = [("reference", 1), ("numba", 1), ("numba", most)]
    results = []
    for backend, threads in ways:
        monkeypatch.setenv("ROWSTEP_BACKEND", backend)
        optimizer, param = Adam(), normal(5001, 17, dtype=np.float32)
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        for t in range(2):
            rows, grad = np.random.default_rng(t).integers(5001, size=5001), normal(5001, 17, dtype=np.float32, seed=t)
            if kind == "step":
                optimizer.step("w", param, grad)
            else:
                optimizer.step_rows("w", param, rows, grad)
            optimizer.end_iteration()
        numba.set_num_threads(before)
        results.append((param, *moments(optimizer, "w")))
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


def test_two_threads_may_step_at_the_same_time(backend: str) -> None:
    params = [np.zeros((5000, 20), np.float32) for _ in range(2)]
    grad = normal(5000, 20, dtype=np.float32)
    optimizer = Adam()

    def run(index: int) -> None:
        for _ in range(10):
            optimizer.step(str(index), params[index], grad)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert params[0].any()
    assert np.array_equal(params[0], params[1])


def test_a_deep_copy_goes_its_own_way(backend: str) -> None:
    optimizer, param = Adam(lr=0.1), normal(3)
    optimizer.step("w", param, np.ones(3))
    twin, before = copy.deepcopy(optimizer), moments(optimizer, "w")[0].copy()
    twin.lr = 0.5
    twin.step("w", param, np.ones(3))
    twin.end_iteration()
    assert (optimizer.lr, optimizer.current_step) == (0.1, 1)
    assert np.array_equal(moments(optimizer, "w")[0], before)


def test_an_optimizer_says_what_it_is() -> None:
    optimizer = AdamW(lr=0.5)
    optimizer.step("w", np.zeros(1), np.ones(1))
    assert repr(optimizer) == ("AdamW(lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01): iteration 1, 1 names")


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


def test_without_numba_numpy_does_it_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROWSTEP_BACKEND", raising=False)
    lines = python(
        STEP
        + """
sys.modules["numba"] = None  # makes `import numba` raise ImportError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step()
    step()
print(len(caught), caught[0].category.__name__, caught[0].filename, bool(param.all()))
print(caught[0].message)
"""
    ).splitlines()
    assert lines[1] == "1 RuntimeWarning <string> True"
    assert "Numba could not be imported" in lines[2]
