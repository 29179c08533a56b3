"""Tables of more than 2^31 elements, where a 32-bit number would overflow. Only rows near the ends are touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam
from tests.helpers.gradients import rows_of, same_bits, step_with

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


@pytest.fixture
def mapped(tmp_path: Path, columns: int) -> Tensor:
    """A table of more than 2^31 elements in a file with holes, which takes no place on the disk until it is written."""
    path, rows = tmp_path / "table", LIMIT // columns + 3
    with path.open("wb") as file:
        file.truncate(rows * columns * 2)
    return torch.from_file(str(path), shared=True, size=rows * columns, dtype=torch.bfloat16).view(rows, columns)


@pytest.mark.parametrize(("cls", "columns"), [(SparseAdam, 1), (SparseAdam, 4096), (DeferredAdam, 4096)])
def test_a_table_in_a_file_with_holes(mapped: Tensor, cls: type[SparseAdam | DeferredAdam]) -> None:
    torch.set_num_threads(2)
    last = len(mapped) - 1
    rows = torch.tensor([0, 1, last - 3, last - 2, last - 1, last])
    large, small = Parameter(mapped), Parameter(torch.zeros(6, mapped.shape[1], dtype=torch.bfloat16))
    optimizers = [(large, cls([large], lr=0.1), rows), (small, cls([small], lr=0.1), torch.arange(6))]
    for touched in ([5, 2, 3, 5], [5, 4], [0, 2, 4, 4], [5]):
        values = rows_of(small, touched)._values()
        for param, optimizer, names in optimizers:
            if isinstance(optimizer, DeferredAdam):
                optimizer.catch_up(param, names[touched])
            step_with(optimizer, param, rows_of(param, names[touched], values))
    for param, optimizer, names in optimizers:
        if isinstance(optimizer, DeferredAdam):
            optimizer.catch_up(param, names)
            # The half a million rows between need not be brought along in the end.
            optimizer._tables.pop(id(param)).pending.release()
    assert same_bits(large[rows], small)
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(*(optimizer.state[param][key][names] for param, optimizer, names in optimizers))
    assert not large[2:10].any()
    assert not large[last - 11 : last - 3].any()
