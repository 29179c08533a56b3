"""What is imported and when, the public names, and which versions of torch are accepted or refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

import rowstep
from rowstep._torch_version import OLDEST, refuse_older
from tests.kernels.test_backends import python

# A process whose torch says that it is an old one.
OLD = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.7.1+cu126")
"""

USES = [*(f"from rowstep import {name}" for name in rowstep.__all__), "import rowstep.distributed"]

TRY_ALL = f"""
for use in {USES}:
    try:
        exec(use)
    except ImportError as error:
        print(error)
    else:
        print("no error:", use)
"""


@pytest.mark.parametrize(
    "version", ["2.8.0a0+gitabc", "2.8", "2.10.0.dev20260101", "2.13.0+cpu", "12.1.0", "unknown", torch.__version__]
)
def test_versions_that_are_accepted(version: str) -> None:
    refuse_older(version)


@pytest.mark.parametrize("version", ["2.7.1", "2.7.0a0+gitabc", "2.6.0+cu124", "1.13.1"])
def test_older_versions_are_refused_with_the_way_out(version: str) -> None:
    with pytest.raises(ImportError) as raised:
        refuse_older(version)
    assert str(raised.value) == (
        f"torch {version} is installed, but rowstep needs torch 2.8 or newer: run `pip install --upgrade torch`, or "
        "use rowstep.arrays, which needs no torch"
    )


def test_whatever_uses_torch_refuses_an_old_one_and_arrays_do_not_care() -> None:
    *lines, arrays = python(f"{OLD}{TRY_ALL}\nfrom rowstep import arrays\nprint(arrays.Adam.__name__)").splitlines()
    assert len(lines) == len(USES)
    assert {line.partition(" or newer")[0] for line in lines} == {
        "torch 2.7.1+cu126 is installed, but rowstep needs torch 2.8"
    }
    assert arrays == "Adam"


def test_pip_is_told_the_same() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in text


def test_the_command_line_answers_without_torch_and_numba() -> None:
    source = """
import sys
from rowstep.cli import main
for arguments in (["--version"], ["warm-up", "--help"]):
    try:
        main(arguments)
    except SystemExit as end:
        print(end.code, end=" ")
print('torch' in sys.modules, 'numba' in sys.modules, 'rich' in sys.modules)
"""
    assert python(source).splitlines()[-1].endswith("0 False False False")


# Nothing has called `step` or watched a lookup before the first one, in compiled code: what hides them from the
# compiler is made while it traces.
FIRST_STEPS = """
import os, sys
from rowstep import *
print(*(name in sys.modules for name in ("torch", "torch._dynamo", "numba", "llvmlite")))
import rowstep, torch
from torch import nn

def trained(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = rowstep.DeferredAdam(model.parameters(), lr=0.1)

    def step(ids):
        loss = model(ids).square().sum()
        loss.backward()
        optimizer.step()

    for number in range(5):
        optimizer.zero_grad()
        (torch.compile(step, backend="eager") if compiled else step)(torch.tensor([1, 2, number]))
    return [*model.state_dict().values()]

for one, other in zip(trained(True), trained(False), strict=True):
    torch.testing.assert_close(one, other)
from torch._dynamo.utils import counters
print(counters["stats"]["unique_graphs"] > 0, "numba" in sys.modules)
del os.environ["ROWSTEP_BACKEND"]
trained(False)
print("numba" in sys.modules)
"""


def test_what_a_process_imports_up_to_its_first_steps_which_may_be_in_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    on_import, compiled, on_kernels = python(FIRST_STEPS).splitlines()
    assert on_import == "True False False False"
    assert compiled == "True False"  # the reference needs no Numba
    assert on_kernels == "True"


def test_the_public_names() -> None:
    classes = ["DeferredAdam", "DeferredAdamW", "HostEmbedding", "SparseAdam", "StaleRowsError"]
    assert rowstep.__all__ == [*classes, "clip_grad_norm_", "clip_grad_value_", "prefetched", "select_rows_"]
    assert set(rowstep.__all__) <= set(dir(rowstep))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'rowstep' has no attribute 'DenseAdam'"):
        _ = rowstep.DenseAdam


def test_the_version_is_the_installed_one() -> None:
    assert rowstep.__version__ == metadata.version("rowstep")
