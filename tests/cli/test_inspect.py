"""`rowstep inspect` says what a checkpoint holds, never more than it knows; files that are no checkpoint do no harm."""

from __future__ import annotations

import io
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rowstep import DeferredAdam, SparseAdam
from rowstep.arrays import Adam
from rowstep.cli import main
from rowstep.distributed import ShardedEmbedding

Show = Callable[[Path], str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Run the command and return what it printed; of an error, its one line."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # what is inspected does not depend on it: compile nothing

    def run(path: Path) -> str:
        code = main(["inspect", str(path)])
        out, err = capsys.readouterr()
        assert (code, bool(out), err.count("\n")) in ((0, True, 0), (1, False, 1))
        assert not err or err.startswith(f"rowstep: {path}: ")
        return out or err

    return run


def make_model(sparse: bool = True) -> Any:
    """Two tables of one shape."""
    tables = {name: nn.Embedding(10, 4, sparse=sparse) for name in ("user", "item")}
    return nn.ModuleDict({**tables, "head": nn.Linear(4, 3)})


def stepped(model: Any, optimizer: Any) -> Any:
    """The optimizer after three steps: rows 1 and 2 of one table three times, and 5 once; row 0 of the other."""
    for step in range(3):
        optimizer.zero_grad()
        rows = model.user(torch.tensor([1, 2, 5 if step == 0 else 1])).sum(0) + model.item(torch.tensor(0))
        model.head(rows).square().sum().backward()
        optimizer.step()
    return optimizer


def saved(thing: Any, folder: Path) -> Path:
    torch.save(thing, folder / "file.pt")
    return folder / "file.pt"


def parts_of(shown: str) -> dict[str, str]:
    """What is said of each parameter, in up to three lines, by its name."""
    blocks = shown.replace("\n    ", "; ").split("\n  ")[1:]
    return {name: rest.split("\n")[0] for name, _, rest in (block.partition(": ") for block in blocks)}


def test_a_checkpoint_of_model_and_optimizer(tmp_path: Path, show: Show) -> None:
    model = make_model()
    optimizer = stepped(model, SparseAdam(model.named_parameters(), bias_correction="row", weight_decay=0.5))
    shown = show(saved({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path))
    # 10 x 4 floats of 4 bytes; two moments as large, and ten counts of 8 bytes.
    table = parts_of(shown)["model.user.weight"]
    assert table.startswith("10 x 4 float32, 160 B; state: 400 B; step 3; exp_avg 10 x 4 float32, 160 B; exp_avg_sq ")
    rows = "rows: 7 of 10 never touched (70.0%); steps of touched rows 1, 3, 3; norms "
    assert f"row_step 10 int64, 80 B; {rows}" in table
    for part in ("group: lr=0.001, betas=(0.9, 0.999)", "=0.5, bias_correction=row", "Total: weights 380 B, "):
        assert part in shown
    assert "amsgrad" not in shown


@pytest.mark.parametrize("make", [SparseAdam, DeferredAdam, torch.optim.Adam])
@pytest.mark.parametrize("is_named", [True, False])
def test_two_tables_of_one_shape_find_their_states(make: Any, is_named: bool, tmp_path: Path, show: Show) -> None:
    model = make_model(sparse=make is not torch.optim.Adam)
    optimizer = stepped(model, make(model.named_parameters() if is_named else model.parameters()))
    shown = show(saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path))
    order, shape = ("", "") if is_named else (" (by order)", " (by shape)")
    parts = parts_of(shown)
    assert list(parts)[2:] == [f"model.head.weight{shape}", f"model.head.bias{shape}"]
    assert "7 of 10 never touched" in parts[f"model.user.weight{order}"]
    assert "9 of 10 never touched" in parts[f"model.item.weight{order}"]
    assert not any(claim in shown for claim in ("not in file", "Other tensors"))


def test_what_is_not_certain_is_not_claimed(tmp_path: Path, show: Show) -> None:
    """Of tables in two groups, or of two models, the file does not tell which is which."""
    model = make_model()
    groups = [{"params": [model.item.weight]}, {"params": [model.user.weight, *model.head.parameters()]}]
    state = stepped(model, SparseAdam(groups)).state_dict()
    shown = show(saved({"model": model.state_dict(), "optimizer": state}, tmp_path))
    assert shown.count("  one of model.user.weight, model.item.weight: 10 x 4 float32, 160 B\n") == 2
    assert "model.head.weight (by shape)" in shown
    copies = {"model": model.head.state_dict(), "ema": make_model().head.state_dict()}
    (optimizer := torch.optim.Adam(model.head.parameters())).step()
    shown = show(saved({**copies, "optimizer": optimizer.state_dict()}, tmp_path))
    assert "one of model.weight, ema.weight: 3 x 4" in shown
    assert "not in file" not in shown
    assert "  parameter 0: weights not in file\n    state: 320 B; " in show(saved(state, tmp_path))


def test_states_of_other_optimizers_and_of_rows(tmp_path: Path, show: Show) -> None:
    row = torch.tensor([0.5, 0, 0.25, 0])
    sgd = {0: {"momentum_buffer": torch.ones(2, 3)}, 1: {"step": 7, "exp_avg_sq_row": row}, 2: {}}
    weights = {"a": torch.ones(2, 3), "b": torch.ones(4, 3), "c": torch.ones(5)}
    group = {"lr": torch.tensor(0.5), "state_dtype": torch.bfloat16, "params": [0, 1, 2]}
    shown = show(saved({"w": weights, "o": {"state": sgd, "param_groups": [group]}}, tmp_path))
    assert "group: lr=0.5, state_dtype=bfloat16\n" in shown
    parts = parts_of(shown)
    assert "state: 24 B; momentum_buffer 2 x 3 float32, 24 B; rows: norms 1.732" in parts["w.a (by shape)"]
    assert "step 7; exp_avg_sq_row 4 float32, 16 B; rows: 2 of 4 never touched (50.0%)" in parts["w.b (by shape)"]
    assert parts["parameter 2"] == "weights not in file"
    assert "Other tensors\n  w.c: 5 float32, 20 B" in shown


def test_rows_by_hand(tmp_path: Path, show: Show) -> None:
    weights = torch.tensor([[3.0, 4.0], [0, 0], [6, 8], [math.nan, 1], [0, -5]])
    state = {"step": 9, "exp_avg_sq": weights**2, "row_step": torch.tensor([2, 0, 9, 1, 2])}
    path = saved({"w": weights, "o": {"state": {0: state}, "param_groups": [{"params": [0]}]}}, tmp_path)
    expected = "rows: 1 of 5 never touched (20.0%); steps of touched rows 1, 2, 9; norms 0, 5, 10; 1 with NaN or inf\n"
    assert expected in show(path)
    tall = torch.ones(300_000, 8)  # more than is read at once
    tall[::3] = 0
    assert "300,000 x 8 float32, 9,600,000 B\n    rows: norms 0, 2.828, 2.828" in show(saved(tall, tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_named", [True, False])
def test_a_directory_of_torch_distributed_checkpoint_after_the_conversion(
    is_named: bool, tmp_path: Path, show: Show
) -> None:
    """To read it can run code, so that is left to torch and the user."""
    model = make_model()
    optimizer = stepped(model, SparseAdam(model.parameters(), bias_correction="row"))
    state = get_optimizer_state_dict(model, optimizer) if is_named else optimizer
    folder, file = tmp_path / "folder", tmp_path / "file.pt"
    dcp_save({"model": model.state_dict(), "optimizer": state, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    assert "To convert a distributed checkpoint: python -m torch.distributed.checkpoint.format_utils" in show(folder)
    dcp_to_torch_save(folder, file)
    table = parts_of(show(file))["model.user.weight" if is_named else "model.user.weight (by order)"]
    assert table.startswith("10 x 4 float32, 160 B; state: 400 B; step 3; ")
    assert "rows: 7 of 10 never touched (70.0%); steps of touched rows 1, 3, 3; norms " in table


def test_a_sharded_table(tmp_path: Path, show: Show) -> None:
    table = ShardedEmbedding(1003, 16)
    optimizer = SparseAdam(table.parameters(), bias_correction="row")
    table(torch.arange(5)).sum().backward()
    optimizer.step()
    shown = show(saved({"model": table.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path))
    assert "998 of 1,003 never touched" in parts_of(shown)["model.weight (by shape)"]


def test_files_of_rowstep_arrays_and_safetensors(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, table = Adam(lr=0.25), np.ones((6, 2), np.float32)
    for _ in range(2):
        optimizer.step_rows("deep/table", table, [1, 4], np.ones((2, 2)))
        optimizer.end_iteration()
    optimizer.save(tmp_path / "state.npz")
    shown = show(tmp_path / "state.npz")
    assert "lr=0.25" in shown
    assert parts_of(shown)["parameter deep/table"].endswith(
        "exp_avg_sq 6 x 2 float32, 48 B; rows: 4 of 6 never touched (66.7%)"
    )
    assert "state: 96 B; step 2; " in shown
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes((2).to_bytes(8, "little") + b"{}")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        assert "needs safetensors, which is not installed: pip install safetensors" in show(weights)
    pytest.importorskip("safetensors.torch").save_file({"a": torch.ones(3, 2, dtype=torch.bfloat16)}, weights)
    assert "a: 3 x 2 bfloat16, 12 B\n    rows: norms 1.414" in show(weights)


@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_and_junk_are_shown(tmp_path: Path, show: Show) -> None:
    odd: dict[str, Any] = {
        "empty": torch.ones(0, 4), "scalar": torch.tensor(3.0), "meta": torch.empty(3, 2, device="meta"),
        "sparse": torch.eye(3).to_sparse(), "expanded": torch.ones(1).expand(1 << 40, 1 << 10),
        "complex": torch.ones(3, 2, dtype=torch.complex64), "float8": torch.ones(3, 2).to(torch.float8_e4m3fn),
        "quantized": torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8),
    }  # fmt: skip
    shown = show(saved(odd, tmp_path))
    assert list(parts_of(shown)) == list(odd)
    assert shown.count("not a dense tensor with all its numbers") == 4
    laughs: list[Any] = [torch.ones(3, 2)]
    for _ in range(60):
        laughs = [laughs, laughs]  # small in the file, and 2^60 elements if each is looked at
    cyclic: dict[str, Any] = {"w": torch.ones(2, 2), "laughs": laughs}
    cyclic["self"] = cyclic
    assert "w: 2 x 2" in show(saved(cyclic, tmp_path))
    slots = ("step", "exp_avg", "exp_avg_sq", "row_step")
    states = {n: dict.fromkeys(slots, value) for n, value in enumerate([*odd.values(), laughs, None, "x", 1 << 70])}
    assert "lr=<list>" in show(saved({"state": states, "param_groups": [{"lr": laughs}]}, tmp_path))


def test_names_cannot_command_the_terminal(tmp_path: Path, show: Show) -> None:
    names = ["\x1b[2J", "a\nb", "\u202egpj", "日本", "\ud800", "x" * 500]
    shown = show(saved({name: torch.ones(2, 2) for name in names}, tmp_path))
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert list(parts_of(shown)) == [r"\x1b[2J", r"a\nb", r"\u202egpj", "日本", r"\ud800", "x" * 97 + "..."]


class Runs:
    """Whoever unpickles this runs code: it makes a folder beside the file."""

    def __init__(self, path: Path) -> None:
        self.mark = path.with_name("was_run")

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def npz_of(array: Any) -> bytes:
    np.savez(file := io.BytesIO(), x=array)
    return file.getvalue()


NO_CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "No such file or directory": lambda path: None,
    "a directory; expected a file": Path.mkdir,
    "expected a regular file": os.mkfifo,
    "is empty; expected a whole torch.save, .npz or .safetensors file": Path.touch,
    "begins with b'hello, ch'; expected a": lambda path: path.write_bytes(b"hello, checkpoint"),
    "its end is missing; expected a whole torch.save": lambda path: path.write_bytes(
        saved(torch.ones(9), path.parent).read_bytes()[:-99]
    ),
    "begins with b'\\x80": lambda path: path.write_bytes(pickle.dumps(Runs(path))),
    ".mkdir, which could run code; expected state dicts": lambda path: torch.save(Runs(path), path),
    "Object arrays cannot be loaded": lambda path: path.write_bytes(npz_of(np.array([Runs(path)]))),
    "it holds no tensor; expected the state dict of a module or of an optimizer": lambda path: torch.save(3, path),
}


@pytest.mark.parametrize("reason", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_in_one_sentence(reason: str, tmp_path: Path, show: Show) -> None:
    NO_CHECKPOINTS[reason](tmp_path / "file")
    assert reason in show(tmp_path / "file")
    assert not (tmp_path / "was_run").exists()


def test_a_reader_that_closes_the_pipe(tmp_path: Path) -> None:
    path = saved({str(number): torch.ones(2, 2) for number in range(5000)}, tmp_path)
    command = f"{sys.executable} -m rowstep inspect {path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "Tensors\n")
    assert done.stderr == "rowstep: the output ended before all of it was written: Broken pipe\n"
