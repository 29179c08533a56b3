"""What is imported, and when: a program that only imports rowstep does not wait for torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(source: str, *arguments: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-W", "ignore", "-c", source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_do_not_import_torchs_compiler() -> None:
    source = "import sys; from rowstep import *; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert python(source) == "True False"


@pytest.mark.parametrize("arguments", [["--version"], ["warm-up", "--help"]])
def test_the_command_line_answers_without_torch_and_numba(arguments: list[str]) -> None:
    source = """
import sys
from rowstep.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, 'torch' in sys.modules, 'numba' in sys.modules, 'rich' in sys.modules)
"""
    assert python(source, *arguments).splitlines()[-1] == "0 False False False"


# Nothing has called `step` or watched a lookup before: what hides them from the compiler is made while it traces.
FIRST_STEP_IN_COMPILED_CODE = """
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
print(counters["stats"]["unique_graphs"] > 0)
"""


def test_the_first_step_of_a_process_inside_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # compiles no kernels
    assert python(FIRST_STEP_IN_COMPILED_CODE) == "True"
