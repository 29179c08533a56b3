"""State in files is not lost unseen: not its count, nor by other options, names or folders, nor by steps that fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rowstep import SparseAdam, storage
from tests.storage.others import Others
from tests.storage.test_state_dir import Run, assert_same

# The weights of a run that ended are in a file that torch wrote; the state goes on where it was.
TRAIN = """
from tests.storage.test_state_dir import *
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
run = Run(state_dir=folder / "state")
if first:
    run.model.load_state_dict(torch.load(folder / "model.pt"))
run.train(first, last)
torch.save(run.model.state_dict(), folder / "model.pt")
"""


def steps_in(folder: Path, name: str = "0.weight") -> int:
    return int(load_file(folder / f"{name}.step.safetensors")["step"])


@pytest.mark.filterwarnings("ignore:.*is not clean")
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"], ids=["ended", "killed"])
def test_the_count_of_steps_is_that_of_the_moments(end: str, tmp_path: Path, others: Others) -> None:
    others.run(f"import os, warnings\nwarnings.simplefilter('ignore'){TRAIN}{end}", tmp_path, 0, 30)
    assert [steps_in(tmp_path / "state", name) for name in ("0.weight", "1.weight", "1.bias")] == [30, 30, 30]
    plain, ours = Run(), Run(state_dir=tmp_path / "state")
    plain.train(0, 30)
    ours.model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(plain, ours)
    for run in (plain, ours):
        run.train(30, 33)
    assert_same(plain, ours)


def test_a_dropped_optimizer_leaves_its_count(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 7)
    del run
    assert steps_in(tmp_path) == 7


def test_a_forked_process_leaves_the_count_to_its_parent(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 2)
    has_stepped, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(has_stepped, 1)
            storage.sync()
        finally:
            os._exit(0)
    run.train(2, 5)
    os.write(tell, b"1")
    os.waitpid(child, 0)
    assert steps_in(tmp_path) == 5
    assert not storage.status(tmp_path / "0.weight.step.safetensors").clean


@pytest.mark.filterwarnings("ignore:.*is not clean")
@pytest.mark.parametrize(
    "options", [{"second_moment": "row"}, {"state_dtype": torch.bfloat16}, {"second_moment": "row", "betas": (0, 0.9)}]
)
def test_other_options_are_refused_and_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    run, plain = Run(state_dir=tmp_path), Run()
    run.train(0, 3)
    plain.train(0, 3)
    del run
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = Run(**options, state_dir=tmp_path)
    weight: Any = other.model[0].weight
    was = weight.detach().clone()
    with pytest.raises(ValueError, match=r"'0.weight'.*: its files have exp_avg of .*, of 3 steps; expected exp_avg"):
        other.train(3, 4)
    assert torch.equal(weight, was)
    del other, weight
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()}.keys() == before.keys()
    again = Run(state_dir=tmp_path)
    again.model.load_state_dict(plain.model.state_dict())
    assert_same(plain, again)


def test_state_without_history_is_made_anew_in_files(tmp_path: Path) -> None:
    run, plain = (Run(second_moment="row", **where) for where in ({"state_dir": tmp_path}, {}))
    run.optimizer.allocate_state()
    assert (tmp_path / "0.weight.exp_avg_sq.safetensors").exists()
    for each in (run, plain):
        each.train(0, 3)
    assert_same(plain, run)
    storage.sync()
    assert not (tmp_path / "0.weight.exp_avg_sq.safetensors").exists()
    row = run.optimizer.state[next(run.model.parameters())]["exp_avg_sq_row"]
    assert torch.equal(load_file(tmp_path / "0.weight.exp_avg_sq_row.safetensors")["exp_avg_sq_row"], row)


# Who owns which files


def param(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), value))


def step(optimizer: SparseAdam, *params: nn.Parameter) -> None:
    for each in params:
        each.grad = each.detach().clone()
    optimizer.step()


@pytest.mark.parametrize(("one", "other"), [("a/b", "a_b"), ("a/b", "a%2Fb"), ("a%b", "a%25b"), ("a", "a.exp_avg")])
def test_names_that_differ_have_files_that_differ(one: str, other: str, tmp_path: Path) -> None:
    params = [param(), param(2.0)]
    optimizer = SparseAdam(list(zip([one, other], params, strict=True)), state_dir=tmp_path)
    step(optimizer, *params)
    moments = [optimizer.state[each]["exp_avg"] for each in params]
    assert moments[0].data_ptr() != moments[1].data_ptr()
    assert len(list(tmp_path.glob("*.safetensors"))) == 6


def test_files_that_another_optimizer_has_are_refused(tmp_path: Path) -> None:
    first, second = param(), param(2.0)
    optimizer = SparseAdam([first], state_dir=tmp_path)
    for has_stepped in (False, True):
        if has_stepped:
            step(optimizer, first)
        with pytest.raises(
            ValueError,
            match=r"the state of parameter 0 of group 0 would be in .*0\.0\.\*\.safetensors, which is for parameter 0 "
            "of group 0 of another optimizer that is still there; expected files of its own",
        ):
            SparseAdam([second], state_dir=tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="of another optimizer"):
        SparseAdam([second], state_dir=tmp_path / "link")
    storage.sync()
    optimizer.itself = optimizer  # type: ignore[attr-defined]  # only garbage collection finds out that it is gone
    del optimizer
    optimizer = SparseAdam([second], state_dir=tmp_path)
    assert optimizer.state[second]["step"] == 1


def test_a_name_of_another_group_is_refused(tmp_path: Path) -> None:
    first, second = param(), param(2.0)
    optimizer = SparseAdam([("a", first)], state_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"of parameter 0 of group 1 \('a'\) .* parameter 0 of group 0 \('a'\) of the same"
    ):
        optimizer.add_param_group({"params": [("a", second)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("b", second)]})
    step(optimizer, first, second)


def test_an_optimizer_that_could_not_be_made_owns_nothing(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [{"params": [param()]}, {"params": [param()], "betas": (2, 3)}]
    with pytest.raises(ValueError, match="Invalid beta"):
        SparseAdam(groups, state_dir=tmp_path)
    del groups[1]["betas"]
    SparseAdam(groups, state_dir=tmp_path)


def test_a_relative_folder_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = param(), param(2.0)
    optimizer = SparseAdam([("a", first)], state_dir="state")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    optimizer.add_param_group({"params": [("b", second)]})
    step(optimizer, first, second)
    assert len(list((tmp_path / "state").glob("*.step.safetensors"))) == 2
    assert not list((tmp_path / "elsewhere").iterdir())


# First steps that fail


def failing_at(number: int, error: BaseException, create: Callable[..., Any] = storage.create) -> Callable[..., Any]:
    calls: list[Path] = []

    def create_or_fail(path: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) == number:
            raise type(error)(*error.args)  # anew: a traceback keeps what is open
        return create(path, *arguments, **options)

    return create_or_fail


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 9])  # of three files for each of three parameters
def test_a_first_step_that_fails_leaves_no_files(
    number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run = Run(), Run(state_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", failing_at(number, error))
        with pytest.raises(type(error)):
            run.train(0, 1)
    assert list(tmp_path.iterdir()) == []
    for each in (plain, run):
        each.train(0, 3)
    assert_same(plain, run)
    assert steps_in(tmp_path) == 3


@pytest.mark.filterwarnings("ignore:.*is not clean")
@pytest.mark.parametrize("number", [1, 2, 3, 5, 9, 10])
def test_a_first_step_that_is_killed_is_begun_again(number: int, tmp_path: Path, others: Others) -> None:
    """In the middle of a file, and, at the last number, before the first step is counted."""
    program = f"""
import os
from rowstep import _optimizer
from rowstep.storage import _mapping
calls = []
def map_or_die(*arguments, map=_mapping._map):
    calls.append(arguments)
    return map(*arguments) if len(calls) < {number} else os.kill(os.getpid(), 9)
_mapping._map = map_or_die
SparseAdam._count = lambda *arguments: os.kill(os.getpid(), 9)
"""
    program = TRAIN.replace("folder, first", f"{program}\nfolder, first", 1)
    assert others.run(program, tmp_path, 0, 1) == "9"
    assert list((tmp_path / "state").iterdir())
    plain, run = Run(), Run(state_dir=tmp_path / "state")
    for each in (plain, run):
        each.train(0, 3)
    assert_same(plain, run)
    del run
    assert {path.name for path in (tmp_path / "state").iterdir()} == {
        f"{name}.{slot}.safetensors{ending}"
        for name in ("0.weight", "1.weight", "1.bias")
        for slot in ("exp_avg", "exp_avg_sq", "step")
        for ending in ("", ".rowstep.json")
    }


@pytest.mark.parametrize("length", [220, 230, 250])  # of which the step's file fits, without or with its record
def test_a_name_that_is_too_long_leaves_nothing(length: int, tmp_path: Path) -> None:
    params = [param(), param()]
    optimizer = SparseAdam(list(zip(["a", "b" * length], params, strict=True)), state_dir=tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="File name too long"):
            step(optimizer, *params)
        assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    one = param()
    optimizer = SparseAdam([("a", one)], state_dir=tmp_path)
    for slot in ("exp_avg", "step"):
        path = tmp_path / f"a.{slot}.safetensors"
        path.write_text("something")
        with pytest.raises(FileExistsError):
            step(optimizer, one)
        assert path.read_text() == "something"
        path.unlink()
    step(optimizer, one)
    with contextlib.suppress(FileExistsError):
        optimizer.state.clear()
        step(optimizer, one)
    assert steps_in(tmp_path, "a") == 1
    assert os.path.exists(tmp_path / "a.exp_avg.safetensors")
