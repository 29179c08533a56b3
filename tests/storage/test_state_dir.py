"""The state of an optimizer in files: the same steps, and the next optimizer goes on with them."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rowstep import SparseAdam, storage

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by row": {"second_moment": "row", "betas": (0, 0.9)},
    "bfloat16, counts by row": {"state_dtype": torch.bfloat16, "bias_correction": "row"},
    "amsgrad": {"amsgrad": True},
}


class Run:
    """A table, a layer, and an optimizer over both."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
        self.optimizer = SparseAdam(self.model.named_parameters(), lr=0.1, **options)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.model(torch.tensor([step % 20, (3 * step) % 20, 7])).square().sum().backward()
            self.optimizer.step()

    def states(self) -> list[dict[str, Any]]:
        return [{k: torch.as_tensor(v) for k, v in self.optimizer.state[p].items()} for p in self.model.parameters()]


def assert_same(one: Run, other: Run) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for mine, yours in zip(one.states(), other.states(), strict=True):
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[name], yours[name].to(mine[name].dtype)) for name in mine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_optimizer_goes_on(kind: str, tmp_path: Path) -> None:
    plain, ours = Run(**KINDS[kind]), Run(**KINDS[kind], state_dir=tmp_path / "state")
    plain.train(0, 10)
    ours.train(0, 10)
    storage.sync()
    assert_same(plain, ours)
    weights = ours.model.state_dict()
    del ours
    next_run = Run(**KINDS[kind], state_dir=str(tmp_path / "state"))
    next_run.model.load_state_dict(weights)
    assert_same(plain, next_run)
    plain.train(10, 20)
    next_run.train(10, 20)
    assert_same(plain, next_run)


def test_others_read_the_files(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 5)
    storage.sync()
    assert load_file(tmp_path / "0.weight.step.safetensors")["step"].tolist() == [5]
    moment = run.optimizer.state[run.model[0].weight]["exp_avg"]  # type: ignore[index]
    assert torch.equal(load_file(tmp_path / "0.weight.exp_avg.safetensors")["exp_avg"], moment)


def test_nothing_is_allocated_in_memory(tmp_path: Path) -> None:
    """15 TB would not be there."""
    weight = storage.create(tmp_path / "table.safetensors", 10**10, 256, torch.bfloat16)
    table = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)  # type: ignore[no-untyped-call]
    optimizer = SparseAdam(table.parameters(), state_dir=tmp_path)
    table(torch.tensor([3, 10**10 - 1])).sum().backward()
    optimizer.step()
    assert (tmp_path / "0.0.exp_avg.safetensors").stat().st_size > 5 * 10**12


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 2)
    storage.sync()
    saved = run.optimizer.state_dict()
    with pytest.raises(ValueError, match=r"is in the files of .*; expected no state dict"):
        run.optimizer.load_state_dict(saved)
    del run
    with pytest.raises(ValueError, match=r"lies beside exp_avg of torch\.float32, .*; expected what the options"):
        Run(state_dir=tmp_path, amsgrad=True)
    with pytest.raises(ValueError, match=r"are not this parameter's: .* expected shape \(30, 4\)"):
        SparseAdam([("0.weight", nn.Parameter(torch.zeros(30, 4)))], state_dir=tmp_path)
    with pytest.raises(ValueError, match="Invalid state_dir: 3; expected a path or None"):
        SparseAdam(nn.Linear(2, 2).parameters(), state_dir=3)  # type: ignore[arg-type]
    (tmp_path / "0.weight.step.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step\.safetensors is missing; expected it beside"):
        Run(state_dir=tmp_path)


def test_copies_are_in_memory_and_saved_states_name_no_folder(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 3)
    plain = Run()
    plain.optimizer.load_state_dict(run.optimizer.state_dict())
    copied = copy.deepcopy(run.optimizer)
    assert [group["state_dir"] for group in (*plain.optimizer.param_groups, *copied.param_groups)] == [None, None]


def test_rows_of_files_are_neither_added_nor_dropped(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path)
    run.train(0, 3)
    weight: Any = run.model[0].weight
    with pytest.raises(RuntimeError, match=r"is in a file, .*; expected a table in memory"):
        run.optimizer.grow(weight, 2)
    with pytest.raises(RuntimeError, match=r"is in a file, .*; expected a table in memory"):
        run.optimizer.keep_rows(weight, torch.arange(5))
    assert len(weight) == len(run.states()[0]["exp_avg"]) == 20
    run.train(3, 6)


def test_the_state_of_a_scalar_is_in_files_too(tmp_path: Path) -> None:
    scale, other = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    plain = SparseAdam([other], lr=0.1)
    for _ in range(2):  # each with an optimizer of its own
        optimizer = SparseAdam([scale], lr=0.1, state_dir=tmp_path)
        for _ in range(3):
            for param, its in ((scale, optimizer), (other, plain)):
                param.grad = param.detach().clone()
                its.step()
        storage.sync()
        del optimizer, its
    assert torch.equal(scale, other)


def test_a_group_that_is_refused_leaves_no_state(tmp_path: Path) -> None:
    Run(state_dir=tmp_path).train(0, 2)
    optimizer = SparseAdam([("other", nn.Parameter(torch.zeros(3)))])
    named = [("0.weight", nn.Parameter(torch.zeros(20, 4))), ("1.weight", nn.Parameter(torch.zeros(9, 9)))]
    with pytest.warns(UserWarning, match="not clean"), pytest.raises(ValueError, match="are not this parameter's"):
        optimizer.add_param_group({"params": named, "state_dir": tmp_path})
    assert not optimizer.state_dict()["state"]


def test_a_count_that_has_not_changed_is_not_written(tmp_path: Path) -> None:
    run = Run(state_dir=tmp_path / "state")
    weight = storage.create(tmp_path / "other.safetensors", 3, 2)
    run.train(0, 2)
    storage.sync()
    time.sleep(0.05)
    storage.sync(weight)
    assert storage.status(tmp_path / "state" / "0.weight.step.safetensors").clean
