"""Tables of more than 2^31 elements, where a 32-bit number would overflow. Only rows near the ends are touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from gradients import rows_of, same_bits, sparse, step_with
from rowstep import SparseAdam

LIMIT = 2**31
NEEDED = 12 << 30


def available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)


pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.skipif(available_bytes() < NEEDED, reason="needs 12 GB of free memory"),
]


def untouched(*shape: int) -> Parameter:
    """A parameter in bfloat16 that uses no memory until it is written."""
    return Parameter(torch.empty(shape, dtype=torch.bfloat16))


def test_rows_beyond_two_to_the_31() -> None:
    large, small = untouched(LIMIT + 64, 1), Parameter(torch.ones(6, 1, dtype=torch.bfloat16))
    rows = torch.tensor([0, 63, LIMIT - 1, LIMIT, LIMIT + 62, LIMIT + 63])
    with torch.no_grad():
        large[:128] = 1
        large[rows] = 1
    optimizer, reference = SparseAdam([large], lr=0.1), SparseAdam([small], lr=0.1)
    touched = torch.tensor([5, 2, 3, 5, 4, 2])
    for _ in range(2):
        grad = rows_of(small, touched)
        step_with(optimizer, large, rows_of(large, rows[touched], grad._values()))
        step_with(reference, small, grad)
    assert same_bits(large[rows], small)
    assert (large[:128] == 1).all()
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(optimizer.state[large][key][rows], reference.state[small][key])
        assert not optimizer.state[large][key][:128].any()


@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_elements_beyond_two_to_the_31(sparse_dim: int) -> None:
    last = LIMIT // 2 + 7
    large = untouched(last + 1, 2)
    with torch.no_grad():
        large[:16] = 1
        large[last - 15 :] = 1
    indices = torch.tensor([[last, last - 2, last], [1, 0, 1]])[:sparse_dim]
    values = torch.ones((3, 2)[: 3 - sparse_dim], dtype=torch.bfloat16)
    optimizer = SparseAdam([large], lr=0.25)
    step_with(optimizer, large, sparse(indices, values, large.shape))
    moved = (large[last - 15 :] != 1).nonzero() + torch.tensor([last - 15, 0])
    expected = [[last - 2, 0], [last - 2, 1], [last, 0], [last, 1]] if sparse_dim == 1 else [[last - 2, 0], [last, 1]]
    assert moved.tolist() == expected
    assert large[last, 1].item() == pytest.approx(0.75)
    assert (large[:16] == 1).all()
