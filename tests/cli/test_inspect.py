"""`rowstep inspect` shows what a checkpoint holds, and files that were damaged or made to do harm do none."""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rowstep import DeferredAdam, SparseAdam
from rowstep.arrays import Adam
from rowstep.arrays._safetensors import write as write_safetensors
from rowstep.cli import main
from rowstep.cli._inspect import contents, figures, parameters, reading, stored, text
from rowstep.cli._inspect.parameters import Parameter
from rowstep.distributed import ShardedEmbedding
from tests.arrays.test_mutations import DAMAGES
from tests.helpers.deferred_cases import LONG
from tests.helpers.pictures import is_png
from tests.helpers.ranks import Ranks
from tests.helpers.state_mutations import COUNTS, STRANGE

FILES = 3000 if LONG else 300

Shown = tuple[int, str, str]
Show = Callable[..., Shown]


@pytest.fixture(autouse=True)
def _reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inspected does not depend on the backend: compile nothing."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Run the command; in case of an error, there is one line of it and nothing else."""

    def run(path: Path, *arguments: str) -> Shown:
        code = main(["inspect", str(path), *(arguments or ("--no-plot",))])
        out, err = capsys.readouterr()
        if code:
            assert code == 1
            assert err.startswith(f"rowstep: {path}: ")
            assert err.count("\n") == 1
            assert not out
        else:
            assert not err
        return code, out, err

    return run


def found(path: Path) -> list[Parameter]:
    return parameters.of(contents.of(reading.read(path))).all


def cells(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def model() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 3))


def stepped(net: nn.Sequential, optimizer: Any, steps: int = 3) -> Any:
    """The optimizer after steps that touch the rows 1 and 2, and 5 in the first."""
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.tensor([[1, 2, 5 if step == 0 else 1]])).square().sum().backward()
        optimizer.step()
    return optimizer


def saved(thing: Any, folder: Path, name: str = "file.pt") -> Path:
    torch.save(thing, folder / name)
    return folder / name


def saved_dcp(thing: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(thing, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


# What is shown


def test_a_checkpoint_of_model_and_optimizer(tmp_path: Path, show: Show) -> None:
    net = model()
    optimizer = stepped(net, SparseAdam(net.parameters(), bias_correction="row", weight_decay=0.5))
    path = saved({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path)
    code, out, _ = show(path)
    assert code == 0
    rows = cells(out)
    # 10 x 4 floats of 4 bytes; two moments as large, and ten counts of 8 bytes: 400 bytes for 40 weights.
    assert rows[0][:4] == ["0.weight", "10 x 4", "float32", "160 B"]
    assert rows[0][5:] == ["3", "3 of 10", "10.00"]
    slots = [row[4] for row in rows[:4]]
    assert slots[0] == "step  3"
    assert "exp_avg  float32  10 x 4  160 B" in slots
    assert "row_step  int64  10  80 B" in slots
    assert "lr=0.001, betas=(0.9, 0.999)" in out
    assert "weight_decay=0.5, bias_correction=row" in out
    assert "amsgrad" not in out
    # The weights are 40 + 12 + 3. State: 400, then 2 * 48 + 3 * 8 + 4, then 2 * 12 + 3 * 8 + 4.
    assert "Total: 3 parameters; weights in the file: 55 in 220 B; state: 576 B, 10.47 bytes per weight" in out


@pytest.mark.parametrize("make", [SparseAdam, DeferredAdam])
def test_names_in_the_state_dict_are_used(make: Any, tmp_path: Path) -> None:
    net = model()
    optimizer = stepped(net, make(net.named_parameters()))
    for path in (
        saved(optimizer.state_dict(), tmp_path, "bare.pt"),
        saved({"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path, "light.ckpt"),
    ):
        table, *_ = shown = found(path)
        assert [parameter.name for parameter in shown] == ["0.weight", "1.weight", "1.bias"]
        assert not any(parameter.is_named_by_shape for parameter in shown)
        assert (table.shape, table.touched, table.steps) == ((10, 4), (3, 10), 3)
        assert (table.weights is None) == (path.name == "bare.pt")


def test_several_models_keep_their_paths_and_states_find_none_of_two(tmp_path: Path) -> None:
    net = model()
    optimizer = stepped(net, SparseAdam(net.parameters()))
    weights = net.state_dict()
    twice = {"model": weights, "ema": {key: value.clone() for key, value in weights.items()}}
    names = [parameter.name for parameter in found(saved({**twice, "optimizer": optimizer.state_dict()}, tmp_path))]
    assert names[:3] == ["parameter 0", "parameter 1", "parameter 2"]
    assert names[3:] == [f"{which}.{key}" for which in twice for key in weights]


def test_equal_shapes_are_not_guessed(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shown = found(saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path))
    assert [parameter.name for parameter in shown] == ["parameter 0", "parameter 1", "2.weight", "0.weight", "1.weight"]
    assert [parameter.is_named_by_shape for parameter in shown] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (torch.optim.Adam, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.Adagrad, {"step", "sum"}),
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), {"momentum_buffer"}),
    ],
)
def test_optimizers_of_torch(make: Any, slots: set[str], tmp_path: Path, show: Show) -> None:
    layer = nn.Linear(3, 2)
    optimizer = make(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = saved(optimizer.state_dict(), tmp_path)
    weight, bias = found(path)
    assert set(weight.slots) == slots
    assert (weight.shape, bias.shape) == ((2, 3), (2,))
    code, out, _ = show(path)
    assert code == 0
    assert all(f"{slot}  " in out for slot in slots)


def test_slots_per_row_and_per_column(tmp_path: Path, show: Show) -> None:
    """Second moments that are kept by row or factored, and a first moment in bfloat16 or not at all."""
    row, column = torch.tensor([0.5, 0, 0.25, 0]), torch.ones(3)
    state = {
        0: {
            "step": 7,
            "exp_avg": torch.ones(4, 3, dtype=torch.bfloat16),
            "exp_avg_sq_row": row,
            "exp_avg_sq_column": column,
            "exp_avg_sq_sum": torch.tensor(0.75, dtype=torch.float64),
        },
        1: {"step": 7, "exp_avg_sq_row": row, "exp_avg_sq_column": column},
        2: {"step": 7, "exp_avg_sq_row": row},
    }
    group = {
        "lr": 0.1, "second_moment": "factored", "state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 5,
        "params": [0, 1, 2],
    }  # fmt: skip
    path = saved({"state": state, "param_groups": [group]}, tmp_path)
    both, factored, by_row = found(path)
    assert both.touched == factored.touched == by_row.touched == (2, 4)
    assert (both.shape, factored.shape, by_row.shape) == ((4, 3), (4, 3), (4, None))
    assert (both.state_bytes, factored.state_bytes) == (24 + 16 + 12 + 8, 28)
    _, out, _ = show(path)
    assert "lr=0.1, second_moment=factored, state_dtype=bfloat16, stochastic_rounding=True, seed=5" in out
    assert [row[1] for row in cells(out) if row[0].startswith("parameter")] == ["4 x 3", "4 x 3", "4 x ?"]
    assert [row[7] for row in cells(out) if row[0].startswith("parameter")] == ["5.00", "2.33", ""]


def test_counts_that_are_blank_do_not_hide_the_moments(tmp_path: Path) -> None:
    second = torch.zeros(3, 2)
    second[1] = 1
    state = {"step": 4, "exp_avg": second, "exp_avg_sq": second, "row_step": torch.zeros(3, dtype=torch.int64)}
    (parameter,) = found(saved({"state": {0: state}, "param_groups": [{"params": [0]}]}, tmp_path))
    assert parameter.touched == (1, 3)


@pytest.mark.parametrize("way", ["state_dict", "stateful", "by_name", "flattened"])
def test_a_directory_of_torch_distributed_checkpoint(way: str, tmp_path: Path) -> None:
    net = model()
    optimizer = stepped(net, SparseAdam(net.parameters(), bias_correction="row"))
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flattened")
    state: Any = optimizer.state_dict() if way == "state_dict" else optimizer
    if way in ("by_name", "flattened"):
        state = get_optimizer_state_dict(net, optimizer, options=options)
    path = saved_dcp({"model": net.state_dict(), "optimizer": state, "epoch": 3}, tmp_path)
    table, weight, bias = found(path)
    assert [parameter.name for parameter in (table, weight, bias)] == ["0.weight", "1.weight", "1.bias"]
    assert table.is_named_by_shape == (way in ("state_dict", "stateful"))
    assert (table.touched, table.steps, table.state_bytes) == ((3, 10), 3, 400)
    assert table.weights is not None
    assert torch.equal(torch.cat(list(table.weights.blocks())), next(net.parameters()).detach())


def save_sharded(rank: int, path: Path) -> Tensor:
    torch.manual_seed(0)
    table = ShardedEmbedding(1003, 16)
    optimizer = SparseAdam(table.parameters(), bias_correction="row")
    torch.autograd.backward(table(torch.arange(5)).sum())
    optimizer.step()
    dcp_save({"model": table.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
    return table.weight.detach()


@pytest.mark.parametrize("way", ["of ranks", "of one process"])
def test_a_sharded_table_has_the_shape_of_its_rows(way: str, tmp_path: Path, show: Show, ranks: Ranks) -> None:
    if way == "of ranks":
        path = tmp_path
        weight = torch.cat(ranks.run(2, save_sharded, path))
    else:
        table = ShardedEmbedding(1003, 16)
        optimizer = SparseAdam(table.parameters(), bias_correction="row")
        table(torch.arange(5)).sum().backward()
        optimizer.step()
        weight = table.weight.detach()
        path = saved({"model": table.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    (parameter,) = found(path)
    assert parameter.shape == (1003, 16)
    assert parameter.touched == (5, 1003)
    assert parameter.weights is not None
    assert torch.equal(torch.cat(list(parameter.weights.blocks())), weight)
    assert torch.equal(parameter.weights.rows(500, 504), weight[500:504])
    assert "1003 x 16" in show(path)[1].replace(",", "")


def test_pieces_are_put_together() -> None:
    whole = torch.arange(30.0).reshape(5, 6)
    corners = [(0, 0, 2, 6), (2, 0, 3, 4), (2, 4, 3, 2)]
    pieces = [
        stored.Piece((row, column), stored.in_memory(whole[row : row + height, column : column + width]))
        for row, column, height, width in corners
    ]
    table = stored.in_pieces((5, 6), torch.float32, pieces[::-1])
    assert torch.equal(torch.cat([table.rows(0, 1), table.rows(1, 4), table.rows(4, 5)]), whole)
    assert stored.in_pieces((5, 6), torch.float32, pieces[:2]).flaw == "its pieces are not all of it"
    assert stored.in_pieces((4, 6), torch.float32, pieces).flaw == "a piece reaches beyond its shape"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_of_rowstep_arrays(suffix: str, tmp_path: Path, show: Show) -> None:
    optimizer, table = Adam(lr=0.25), np.ones((6, 2), np.float32)
    for _ in range(2):
        optimizer.step_rows("deep/table", table, [1, 4], np.ones((2, 2)))
        optimizer.end_iteration()
    path = tmp_path / f"state{suffix}"
    optimizer.save(path)
    (parameter,) = found(path)
    assert (parameter.name, parameter.shape, parameter.steps) == ("deep/table", (6, 2), 2)
    assert (parameter.touched, parameter.state_bytes) == ((2, 6), 96)
    assert "lr=0.25" in show(path)[1]


def test_safetensors_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with open(path, "wb") as file:
        write_safetensors(file, {"format": "pt"}, {"a": np.ones((3, 2), np.float32)})
    (parameter,) = found(path)
    assert (parameter.name, parameter.shape, parameter.slots) == ("a", (3, 2), {})
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))  # what other programs write
    assert found(path)[0].weights == stored.in_file((3, 2), torch.int32, path, path.stat().st_size - 24)
    half = path.read_bytes().replace(b'"I32"', b'"BF16"').replace(b"[3, 2]", b"[3, 4]")
    length = int.from_bytes(half[:8], "little") + 1
    path.write_bytes(length.to_bytes(8, "little") + half[8:])
    assert found(path)[0].weights == stored.in_file((3, 4), torch.bfloat16, path, path.stat().st_size - 24)


# Figures


def values(*numbers: float) -> Callable[[], figures.Values]:
    return lambda: iter([np.array(numbers[:2], np.float64), np.array(numbers[2:], np.float64)])


def test_norms_and_ages_by_hand(tmp_path: Path, show: Show) -> None:
    weights = torch.tensor([[3.0, 4.0], [0, 0], [6, 8], [math.nan, 1], [0, -5]])
    state = {"step": 9, "exp_avg": weights, "exp_avg_sq": weights**2, "row_step": torch.tensor([2, 0, 9, 1, 2])}
    path = saved({"w": weights, "o": {"state": {0: state}, "param_groups": [{"params": [0]}]}}, tmp_path)
    _, out, _ = show(path, "--plot", str(tmp_path / "new" / "picture.png"))
    assert is_png(tmp_path / "new" / "picture.png")
    lines = [line.replace("█", "").split() for line in out.splitlines()]
    norms, ages = lines[lines.index(["5", "to", "5.417", "2"]) :], lines[lines.index(["1", "1"]) :]
    assert ["9.583", "to", "10", "1"] in norms
    assert ["0", "1"] in norms
    assert ["NaN", "or", "inf", "1"] in norms
    assert ages[:4] == [["1", "1"], ["2", "2"], ["3", "0"], ["4", "0"]]
    assert ["9", "1"] in ages
    assert "a state without row_step does not tell" in out


def test_norms_are_of_the_first_moment_where_there_are_no_weights(tmp_path: Path, show: Show) -> None:
    state = {"step": 1, "exp_avg": torch.ones(3, 4), "exp_avg_sq": torch.ones(3, 4)}
    _, out, _ = show(saved({"state": {0: state}, "param_groups": [{"params": [0]}]}, tmp_path))
    assert "parameter 0: Euclidean norm of each row of the exp_avg" in out
    assert "row_step" not in out.split("Euclidean")[1]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    "numbers", [(1, 2, 3), (7, 7, 7), (1, 1000, 10**6), (5, 100, 101), (1, 2**62, 2**62), (2**60, 2**60 + 2**10, 2**60)]
)
def test_every_value_is_in_some_bin(numbers: tuple[float, ...], is_whole: bool) -> None:
    drawn = figures.histogram(values(*numbers, 0.0, -1.0, math.inf, math.nan), is_whole=is_whole)
    assert sum(drawn.counts) == 3
    assert (drawn.not_positive, drawn.not_finite) == (2, 2)
    assert len(drawn.edges) == len(drawn.counts) + 1 <= 15


def test_tables_are_read_in_blocks() -> None:
    tall = stored.in_memory(torch.ones(3 * stored.BLOCK // 8, 8))
    assert [block.numel() for block in tall.blocks()] == [stored.BLOCK] * 3
    wide = stored.in_memory(torch.ones(2, stored.BLOCK + 1))
    assert [tuple(block.shape) for block in wide.blocks()] == [(1, stored.BLOCK + 1)] * 2
    assert np.concatenate(list(figures.row_norms(wide))) == pytest.approx(math.sqrt(stored.BLOCK + 1))
    assert figures.rows_not_zero(wide) == 2


def test_sizes_in_words() -> None:
    sizes = {
        0: "0 B",
        9_999: "9,999 B",
        10_000: "10.0 kB",
        123_456: "123 kB",
        1_500_000: "1.50 MB",
        30 * 10**9: "30.0 GB",
    }
    assert {size: text.size(size) for size in sizes} == sizes


# Odd contents


ODD: dict[str, Any] = {
    "empty": torch.ones(0, 4), "no columns": torch.ones(4, 0), "scalar": torch.tensor(3.0), "one row": torch.ones(1, 4),
    "infinite": torch.tensor([[math.inf, 1], [math.nan, 2]]), "meta": torch.empty(3, 2, device="meta"),
    "sparse": torch.eye(3).to_sparse(), "compressed": None, "expanded": torch.ones(1).expand(1 << 40, 1 << 10),
    "transposed": torch.ones(3, 4).t(), "complex": torch.ones(3, 2, dtype=torch.complex64),
    "float8": torch.ones(3, 2).to(torch.float8_e4m3fn), "bool": torch.ones(3, 2, dtype=torch.bool),
    "uint64": torch.ones(3, 2).to(torch.uint64), "parameter": nn.Parameter(torch.ones(2, 2)), "number": 10**30,
    "deep": torch.ones([1] * 20),
}  # fmt: skip


def test_odd_tensors_are_shown(tmp_path: Path, show: Show) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            **ODD,
            "compressed": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
        path = saved(odd, tmp_path)
    code, out, _ = show(path, "--plot", str(tmp_path / "odd.png"))
    assert code == 0
    assert [row[0] for row in cells(out) if row[0]] == [key for key in odd if key != "number"]
    for flaw in (
        "sparse_coo",
        "sparse_csr",
        "quantized",
        "a nested tensor",
        "no data (meta)",
        "its numbers share memory",
    ):
        assert f"({flaw})" in out
    as_state = {
        "state": dict(enumerate(dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "row_step"), v) for v in odd.values()))
    }
    assert show(saved({**as_state, "param_groups": [{"params": list(odd)}]}, tmp_path))[0] == 0


def laughing() -> list[Any]:
    """A list that is small in the file, and has 2^60 elements if each is looked at."""
    nested: list[Any] = [torch.ones(3, 2)]
    for _ in range(60):
        nested = [nested, nested]
    return nested


def test_junk_is_passed_over(tmp_path: Path, show: Show) -> None:
    cyclic: dict[str, Any] = {"w": torch.ones(2, 2)}
    cyclic["self"] = cyclic
    deep: list[Any] = [torch.ones(2, 2)]
    for _ in range(100):
        deep = [deep]
    laughs, group = laughing(), {"params": [None, (1, 2), {}], "param_names": [3, 4, 5], "lr": {}, 7: [[]]}
    for junk in (
        cyclic,
        {"deep": deep, "w": torch.ones(2, 2)},
        {
            "laughs": laughs,
            "state": {0: {"step": laughs, "x": laughs}},
            "param_groups": [{"lr": laughs, "params": laughs}],
        },
        {"state": {None: {3: 4, "step": torch.ones(3)}, (1, 2): 5, 0: {}}, "param_groups": [group]},
        {"state": {0: {"exp_avg": "no", "row_step": torch.ones(3, 2).to_sparse()}}, "param_groups": []},
        {"state": 3, "param_groups": [{"params": "01"}], "w": torch.ones(2, 2)},
        {"state": {}, "param_groups": [{"params": [0], "lr": torch.ones(3)}]},
    ):
        assert show(saved(junk, tmp_path))[0] == 0
    strange = {
        number: {"step": value, "exp_avg": value, "exp_avg_sq": value, "row_step": value, "other": value}
        for number, value in enumerate((*STRANGE, *COUNTS))
    }
    options = {f"option {number}": value for number, value in enumerate((*STRANGE, *COUNTS))}
    assert show(saved({"state": strange, "param_groups": [options, {**options, "params": [0]}]}, tmp_path))[0] == 0
    nothings: list[Any] = [{}, 3, [], None, {"epoch": 3}, {"state": 3, "param_groups": 4}]
    for nothing in nothings:
        assert "it holds no tensor; expected" in show(saved(nothing, tmp_path))[2]


def test_names_cannot_command_the_terminal(tmp_path: Path, show: Show) -> None:
    names = ["\x1b[2J", "[red]x[/]", "a\nb", "\u202egpj", "$\\frac", "日本", "\ud800", "x" * 500, "[/]"]
    group = {"params": [], "\x1b]0;": "\x1b[31m[/bold]"}
    path = saved({**{name: torch.ones(2, 2) for name in names}, "o": {"state": {}, "param_groups": [group]}}, tmp_path)
    code, out, _ = show(path, "--plot", str(tmp_path / "names.png"))
    assert code == 0
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    for shown in (
        r"\x1b[2J",
        "[red]x[/]",
        r"a\nb",
        r"\u202egpj",
        "$\\frac",
        "日本",
        r"\ud800",
        r"\x1b]0;=\x1b[31m[/bold]",
    ):
        assert shown in out
    assert "x" * 200 not in out


# Files that were made to do harm


class Runs:
    """Whoever unpickles this runs code: it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_no_code_of_a_file_is_run(tmp_path: Path, show: Show) -> None:
    mark = tmp_path / "was_run"
    path = saved({"w": torch.ones(2, 2), "x": Runs(mark)}, tmp_path)
    assert ".mkdir, which is more than tensors and plain containers" in show(path)[2]
    (tmp_path / "bare.pkl").write_bytes(pickle.dumps(Runs(mark)))
    assert "it is a bare pickle" in show(tmp_path / "bare.pkl")[2]
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "load it and save it again" in show(tmp_path / "old.pt")[2]
    checkpoint = saved_dcp({"w": torch.ones(2, 2), "x": 3}, tmp_path)
    whole = (checkpoint / ".metadata").read_bytes()
    for foreign in (pickle.dumps(Runs(mark)), whole[:-1] + pickle.dumps(Runs(mark), 4)[2:]):
        (checkpoint / ".metadata").write_bytes(foreign)
        assert ".mkdir, which torch.distributed.checkpoint does not write there" in show(checkpoint)[2]
    assert not mark.exists()


def test_code_in_the_items_of_a_directory_is_not_run(tmp_path: Path, show: Show) -> None:
    mark = tmp_path / "was_run"
    path = saved_dcp({"w": torch.ones(2, 2), "x": 3}, tmp_path)
    for key, code in (("x", 0), ("w", 1)):
        file = io.BytesIO()
        torch.save(Runs(mark), file)
        (path / "evil.distcp").write_bytes(file.getvalue())
        edit(path, partial(point, key=key, file="evil.distcp", offset=0, length=len(file.getvalue())))
        assert show(path)[0] == code
    assert not mark.exists()


def edit(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def point(metadata: Metadata, key: str, file: str, offset: int | None = None, length: int | None = None) -> None:
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    place.relative_path = file
    place.offset = place.offset if offset is None else offset
    place.length = place.length if length is None else length


def test_a_directory_does_not_reach_outside_of_itself(tmp_path: Path, show: Show) -> None:
    path = saved_dcp({"w": torch.ones(2, 2)}, tmp_path)
    shutil.copy(path / "__0_0.distcp", tmp_path / "outside.distcp")
    (path / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    for name in (
        "../outside.distcp",
        str(tmp_path / "outside.distcp"),
        "link.distcp",
        "x/../../outside.distcp",
        "a\0b",
    ):
        edit(path, partial(point, key="w", file=name))
        assert "expected a file inside the directory" in show(path)[2]
    edit(path, lambda metadata: point(metadata, "w", "missing.distcp"))
    assert "missing.distcp: No such file" in show(path)[2]
    edit(path, lambda metadata: point(metadata, "w", "."))
    assert "is a directory; expected a regular file" in show(path)[2]


def test_a_directory_that_claims_more_than_it_has(tmp_path: Path, show: Show) -> None:
    path = saved_dcp({"w": torch.ones(2, 2)}, tmp_path)
    whole = (path / ".metadata").read_bytes()

    def resize(metadata: Metadata, size: int) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([size, 2])  # type: ignore[union-attr]

    def take_off_a_chunk(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([1 << 50, 2])  # type: ignore[union-attr]

    for change, reason in (
        (lambda metadata: resize(metadata, 1 << 50), "not the tensor that .metadata describes"),
        (lambda metadata: point(metadata, "w", "__0_0.distcp", 0, 1 << 40), "where .metadata has an item end"),
        (lambda metadata: point(metadata, "w", "__0_0.distcp", 0, 30), "File is not a zip file"),
        (lambda metadata: point(metadata, "w", "__0_0.distcp", -5), "expected such a tuple"),
        (lambda metadata: metadata.storage_data.clear(), "expected one for each chunk"),
    ):
        (path / ".metadata").write_bytes(whole)
        edit(path, change)
        assert reason in show(path)[2]
    (path / ".metadata").write_bytes(whole)
    edit(path, take_off_a_chunk)
    assert "its pieces are not all of it" in show(path)[1]


class Lie:
    """A tensor of this shape and these strides, over a storage of three numbers."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        hooks: OrderedDict[str, Tensor] = OrderedDict()
        self.arguments = torch.zeros(3).storage(), 0, shape, strides, False, hooks  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.arguments


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_tensors_that_claim_more_than_the_file_has(tmp_path: Path, show: Show) -> None:
    for shape, strides in (((1 << 40, 4), (4, 1)), ((2, 2), (1 << 50, 1)), ((4,), (1,))):
        message = show(saved({"w": Lie(shape, strides)}, tmp_path))[2]
        assert "a tensor claims more numbers than its storage has" in message
    assert "its numbers share memory" in show(saved({"w": Lie((1 << 40, 2), (0, 1))}, tmp_path))[1]
    many = torch.ones(1 << 20)
    message = show(saved([many[number:] for number in range(60)], tmp_path))[2]
    assert "expected at most 16 times as many" in message


def test_archives_that_claim_more_than_the_file_has(tmp_path: Path, show: Show) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\0" * (1 << 24))
    assert "is compressed; expected an uncompressed entry" in show(path)[2]
    header = b'{"w":{"dtype":"F32","shape":[1099511627776,4],"data_offsets":[0,17592186044416]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    assert "expected 17592186044" in show(path)[2]


def test_what_is_no_file_is_refused(tmp_path: Path, show: Show) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello, checkpoint")
    (tmp_path / "folder").mkdir()
    assert "is a pipe; expected a regular file" in show(tmp_path / "pipe")[2]
    assert "it begins with b''; expected a file of torch.save" in show(tmp_path / "empty")[2]
    assert "it begins with b'hello, ch'; expected" in show(tmp_path / "text")[2]
    assert "No such file" in show(tmp_path / "missing")[2]
    assert "directory without .metadata" in show(tmp_path / "folder")[2]
    path = saved({"w": torch.ones(2, 2)}, tmp_path)
    assert main(["inspect", str(path), "--plot", str(tmp_path / "text" / "picture.png")]) == 1


# Damaged files


def checkpoints(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Of each format the file that is damaged, and the path that is inspected."""
    net = model()
    optimizer = stepped(net, SparseAdam(net.parameters(), bias_correction="row"))
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    arrays = Adam()
    arrays.step("table", np.ones((6, 2), np.float32), np.ones((6, 2)))
    for suffix in (".npz", ".safetensors"):
        arrays.save(folder / f"state{suffix}")
    path = saved_dcp(state, folder)
    plain = [saved(state, folder), folder / "state.npz", folder / "state.safetensors"]
    files = {file.suffix: (file, file) for file in plain}
    return {**files, "metadata": (path / ".metadata", path), "items": (path / "__0_0.distcp", path)}


@pytest.mark.parametrize("kind", [".pt", ".npz", ".safetensors", "metadata", "items"])
def test_damaged_files_are_shown_or_refused(kind: str, tmp_path: Path, show: Show) -> None:
    file, path = checkpoints(tmp_path)[kind]
    whole, random, refused = file.read_bytes(), Random(kind), 0
    assert show(path)[0] == 0
    for number in range(FILES // 5):
        file.write_bytes(DAMAGES[number % len(DAMAGES)](whole, random))
        refused += show(path)[0]
    assert refused > FILES / 5 / 4
