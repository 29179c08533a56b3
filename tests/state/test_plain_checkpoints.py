"""Every way that torch has to save a run of whole tables, on one process: the run goes on with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

import rowstep
from rowstep import distributed
from tests.helpers.copies import through_a_file
from tests.helpers.deferred_cases import LONG
from tests.helpers.gradients import rows_of, same_bits, step_with, table

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

ROWS, WIDTH = 23, 3


class Model(nn.Module):
    """Tables, which will get sparse gradients, and a dense layer, which will not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.bags = nn.EmbeddingBag(5, WIDTH, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(WIDTH, 2, dtype=torch.float64)


def train(model: Model, optimizer: Optimizer, steps: range, *, dense_tables: bool = False) -> None:
    """Steps with gradients that depend on the step only: of a matrix product, bits may depend on where memory lies.

    Later steps reach rows that earlier ones do not.
    """
    for step in steps:
        torch.manual_seed(step)
        ids = torch.randint(2 * step + 3, (4,))
        for reads in (model.words, model.bags):
            if not dense_tables:
                reads(ids.view(1, -1) % len(reads.weight))  # rows that wait are brought up to date
                reads.weight.grad = rows_of(reads.weight, ids % len(reads.weight))
            else:
                reads.weight.grad = torch.randn_like(reads.weight)
        for param in model.dense.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        optimizer.zero_grad()


def groups(model: Model, **of_tables: Any) -> list[dict[str, Any]]:
    """The tables, with options of their own, and the layer."""
    tables = [model.words.weight, model.bags.weight]
    return [{"params": tables, **of_tables}, {"params": list(model.dense.parameters())}]


OPTIMIZERS: dict[str, Callable[[Model], Any]] = {
    "global": lambda model: rowstep.SparseAdam(groups(model), lr=0.1),
    "row, amsgrad": lambda model: rowstep.SparseAdam(
        groups(model, bias_correction="row"), lr=0.1, amsgrad=True, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "row, force_sparse": lambda model: rowstep.SparseAdam(
        groups(model, bias_correction="row", force_sparse=True), lr=0.1
    ),
    "deferred, amsgrad": lambda model: rowstep.DeferredAdamW(groups(model), lr=0.1, amsgrad=True),
}

Run = tuple[Model, Any]


def torch_save(old: Run, new: Run, path: Path) -> None:
    for part, state in zip(new, through_a_file([part.state_dict() for part in old]), strict=True):
        part.load_state_dict(state)


def dcp_objects(old: Run, new: Run, path: Path) -> None:
    state_dict_saver.save(dict(zip("mo", old, strict=True)), checkpoint_id=path)
    new[1].allocate_state()
    state_dict_loader.load(dict(zip("mo", new, strict=True)), checkpoint_id=path)


def dcp_state_dicts(old: Run, new: Run, path: Path) -> None:
    state_dict_saver.save({"m": old[0].state_dict(), "o": old[1].state_dict()}, checkpoint_id=path)
    new[1].allocate_state()
    read = {"m": new[0].state_dict(), "o": new[1].state_dict()}
    state_dict_loader.load(read, checkpoint_id=path)
    new[0].load_state_dict(read["m"])
    new[1].load_state_dict(read["o"])


def our_load(old: Run, new: Run, path: Path) -> None:
    state_dict_saver.save(dict(zip("mo", old, strict=True)), checkpoint_id=path)
    distributed.load(dict(zip("mo", new, strict=True)), path)


def our_load_allocated(old: Run, new: Run, path: Path) -> None:
    new[1].allocate_state()
    our_load(old, new, path)


def by_name(**options: Any) -> Callable[[Run, Run, Path], None]:
    def hand_over(old: Run, new: Run, path: Path) -> None:
        chosen = StateDictOptions(**options)
        model_state, optimizer_state = get_state_dict(*old, options=chosen)
        set_state_dict(*new, model_state_dict=model_state, optim_state_dict=optimizer_state, options=chosen)

    return hand_over


def by_name_in_a_file(load: Callable[..., None], **options: Any) -> Callable[[Run, Run, Path], None]:
    def hand_over(old: Run, new: Run, path: Path) -> None:
        chosen = StateDictOptions(**options)
        state_dict_saver.save(dict(zip("mo", get_state_dict(*old, options=chosen), strict=True)), checkpoint_id=path)
        read: dict[str, Any] = dict(zip("mo", get_state_dict(*new, options=chosen), strict=True))
        load(read, checkpoint_id=path)
        set_state_dict(*new, model_state_dict=read["m"], optim_state_dict=read["o"], options=chosen)

    return hand_over


def through_torchs_class(old: Run, new: Run, path: Path) -> None:
    between = torch.optim.Adam(groups(Model(2)))
    between.load_state_dict(old[1].state_dict())
    new[0].load_state_dict(old[0].state_dict())
    new[1].load_state_dict(between.state_dict())


WAYS: dict[str, Callable[[Run, Run, Path], None]] = {
    "torch.save": torch_save,
    "dcp, objects": dcp_objects,
    "dcp, state dicts": dcp_state_dicts,
    "our load": our_load,
    "our load, allocated": our_load_allocated,
    "by name": by_name(),
    "by name, flat": by_name(flatten_optimizer_state_dict=True),
    "by name, cpu": by_name(full_state_dict=True, cpu_offload=True),
    "by name, dcp": by_name_in_a_file(state_dict_loader.load),
    "by name, flat, dcp": by_name_in_a_file(state_dict_loader.load, flatten_optimizer_state_dict=True),
    "by name, our load": by_name_in_a_file(distributed.load),
    "by name, flat, our load": by_name_in_a_file(distributed.load, flatten_optimizer_state_dict=True),
    "through torch.optim.Adam": through_torchs_class,
}


def started(name: str, seed: int = 0) -> Run:
    model = Model(seed)
    return model, OPTIMIZERS[name](model)


def uninterrupted(name: str) -> Run:
    """A run that goes on after a save. (Saving brings waiting rows up to date, which rounds them once more.)"""
    run = started(name)
    train(*run, range(5))
    run[1].state_dict()
    train(*run, range(5, 10))
    return run


def assert_same_runs(found: Run, expected: Run) -> None:
    """The same bits in every weight and every state, and the same count of steps."""
    states = [optimizer.state_dict()["state"] for _, optimizer in (found, expected)]
    for number, (ours, theirs) in enumerate(zip(found[0].parameters(), expected[0].parameters(), strict=True)):
        assert same_bits(ours, theirs)
        assert states[0][number].keys() == states[1][number].keys()
        for key, value in states[1][number].items():
            kept = states[0][number][key]
            assert int(kept) == int(value) if key == "step" else same_bits(kept, value), (number, key)


# Every way with two of the optimizers. `make stress` tries all of them.
PAIRS = [(way, name) for i, way in enumerate(WAYS) for j, name in enumerate(OPTIMIZERS) if LONG or (i + j) % 2 == 0]


@pytest.mark.parametrize(("way", "name"), PAIRS)
def test_a_run_goes_on_with_the_same_bits(way: str, name: str, tmp_path: Path) -> None:
    old, new = started(name), started(name, seed=1)
    train(*old, range(5))
    WAYS[way](old, new, tmp_path)
    train(*new, range(5, 10))
    assert_same_runs(new, uninterrupted(name))


@pytest.mark.parametrize("way", ["our load", "our load, allocated", "torch.save", "by name"])
def test_options_and_their_state_come_from_the_checkpoint(way: str, tmp_path: Path) -> None:
    old, new = started("row, amsgrad"), started("global", seed=1)
    train(*old, range(5))
    WAYS[way](old, new, tmp_path)
    train(*new, range(5, 10))
    assert_same_runs(new, uninterrupted("row, amsgrad"))


@pytest.mark.parametrize(
    ("saved", "way", "option", "slot"),
    [
        *(
            ("row, amsgrad", way, "bias_correction='row'", "row_step")
            for way in ("dcp, objects", "dcp, state dicts", "by name, flat", "by name, dcp")
        ),
        ("deferred, amsgrad", "dcp, objects", "amsgrad=True", "max_exp_avg_sq"),
    ],
)
def test_options_without_their_state_are_refused(saved: str, way: str, option: str, slot: str, tmp_path: Path) -> None:
    old, model = started(saved), Model(1)
    new = model, type(old[1])(groups(model))
    train(*old, range(5))
    expected = f"{option} was saved in group 0 of the loaded state, but no loaded state has '{slot}'"
    before = copy.deepcopy(new[1].state_dict()["param_groups"])
    with pytest.raises(ValueError, match=expected):
        WAYS[way](old, new, tmp_path)
    assert new[1].state_dict()["param_groups"] == before


@pytest.mark.parametrize("written_by", ["torch.optim.Adam", "global"])
@pytest.mark.parametrize("fresh", [True, False])
def test_counts_that_a_checkpoint_lacks_begin_with_the_history_of_the_moments(
    written_by: str, fresh: bool, tmp_path: Path
) -> None:
    model = Model(0)
    is_torchs = written_by == "torch.optim.Adam"
    old: Run = model, torch.optim.Adam(groups(model)) if is_torchs else OPTIMIZERS["global"](model)
    train(*old, range(5), dense_tables=is_torchs)
    new = started("row, force_sparse", seed=1)
    if not fresh:
        train(*new, range(9, 12))
    our_load(old, new, tmp_path)
    new[1].param_groups[0]["bias_correction"] = "row"  # the checkpoint of a global run says global
    seen = new[1].state[new[0].words.weight]["exp_avg_sq"].ne(0).any(dim=1)
    new[0].words.weight.grad = rows_of(new[0].words.weight, [0, 22])
    new[1].step()
    counts = seen.to(torch.int64) * 5
    counts[[0, 22]] += 1
    assert same_bits(new[1].state[new[0].words.weight]["row_step"], counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_come_back_from_torchs_classes_or_are_refused(dtype: torch.dtype) -> None:
    """torch casts all state to the parameter's dtype, and bfloat16 cannot tell 256 from 257."""
    params = [table(3, 2, dtype=dtype) for _ in range(2)]
    first, second = (rowstep.SparseAdam([param], bias_correction="row") for param in params)
    between = torch.optim.SparseAdam([table(3, 2, dtype=dtype)])
    step_with(first, params[0], rows_of(params[0], [1]))
    for count in (255, 257):
        first.state[params[0]]["row_step"][1] = count
        between.load_state_dict(first.state_dict())
        if count == 257 and dtype == torch.bfloat16:
            with pytest.raises(ValueError, match=r"'row_step' is .* torch.bfloat16 .*expected integers in \[0, 256\)"):
                second.load_state_dict(between.state_dict())
        else:
            second.load_state_dict(between.state_dict())
            assert same_bits(second.state[params[1]]["row_step"], torch.tensor([0, count, 0]))
