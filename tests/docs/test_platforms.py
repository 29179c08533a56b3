"""What docs/versions.md expects of macOS and Windows, as far as Linux can stand for them.

Torch, NumPy and Numba are this platform's. What Rowstep itself asks for is not there: the names of the platform, the
modules that only POSIX has, and the functions and constants that other systems lack.
"""

from __future__ import annotations

import pytest

from tests.kernels.test_backends import python

PROGRAM = """
import mmap, os, sys
import numba, numpy as np, torch
from torch import nn

def without(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

sys.platform = PLATFORM
without(os, "posix_fallocate", "posix_fadvise", "sched_getaffinity", "copy_file_range", "sendfile")
without(mmap, "MADV_HUGEPAGE")
if sys.platform == "win32":
    without(os, "fork", "register_at_fork", "pread", "pwrite", "geteuid", "getuid", "fchmod")
    without(mmap, *(name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))))
    for name in ("fcntl", "resource", "pwd", "grp", "posix"):
        sys.modules[name] = None

import rowstep
from rowstep.arrays import Adam

def trained(make, table, clip=rowstep.clip_grad_norm_):
    with torch.no_grad():
        table.weight.copy_(torch.linspace(-1, 1, 32_000).view(2_000, 16))
    torch.manual_seed(0)
    optimizer = make(table.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.randint(0, 2_000, (500,))).square().sum().backward()
        clip(table.parameters(), 1.0)
        optimizer.step()
    return table.weight.detach().clone()

size = (2_000, 16)
dense = trained(torch.optim.Adam, nn.Embedding(*size), nn.utils.clip_grad_norm_)
torch.testing.assert_close(trained(rowstep.DeferredAdam, nn.Embedding(*size, sparse=True)), dense)
sparse = trained(torch.optim.SparseAdam, nn.Embedding(*size, sparse=True))
for table in (nn.Embedding(*size, sparse=True), rowstep.HostEmbedding(*size)):
    torch.testing.assert_close(trained(rowstep.SparseAdam, table), sparse)

array = np.ones((4, 2), np.float32)
Adam(lr=0.1).step_rows("table", array, np.array([1]), np.ones((1, 2), np.float32))
np.testing.assert_allclose(array[:, 0], [1, 0.9, 1, 1], rtol=1e-6)

for refused in (
    lambda: __import__("rowstep.storage"),
    lambda: rowstep.HostEmbedding(10, 2, path="table.safetensors"),
    lambda: rowstep.SparseAdam([nn.Parameter(torch.ones(2, 2))], state_dir="state"),
):
    try:
        refused()
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_all_but_storage_imports_and_steps_elsewhere(platform: str) -> None:
    refusal = f"rowstep.storage relies on Linux, for its locks and file times; this is {platform}"
    assert python(f"PLATFORM = {platform!r}\n{PROGRAM}").splitlines() == [refusal] * 3
