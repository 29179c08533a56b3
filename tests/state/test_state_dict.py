"""State dicts pass both ways with torch.optim.SparseAdam and torch.optim.Adam, and the run goes on as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rowstep import SparseAdam
from tests.helpers.copies import objects_through_a_file, pickled, through_a_file
from tests.helpers.gradients import copy_of, ids_at_most_twice, rows_of, same_bits, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def run(optimizer: Optimizer, param: Tensor, steps: range, *, dense: bool = False) -> None:
    """Steps with gradients that depend on the step's number only."""
    for step in steps:
        torch.manual_seed(step)
        grad = torch.randn_like(param) if dense else rows_of(param, ids_at_most_twice(len(param), len(param)))
        step_with(optimizer, param, grad)


def handed_over(first: Optimizer, second: Optimizer) -> None:
    """Load the first optimizer's state into the second, through a file as a user would."""
    second.load_state_dict(through_a_file(first.state_dict()))


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("options", [{}, {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "maximize": True}], ids=str)
def test_sparse_adam_hands_over_in_the_middle_of_a_run(to_ours: bool, options: dict[str, Any]) -> None:
    classes = (torch.optim.SparseAdam, SparseAdam) if to_ours else (SparseAdam, torch.optim.SparseAdam)
    param, whole = table(30, 4), table(30, 4)
    whole.data.copy_(param.data)
    first, reference = classes[0]([param], **options), torch.optim.SparseAdam([whole], **options)
    run(first, param, range(8))
    second = classes[1]([param])
    handed_over(first, second)
    run(second, param, range(8, 16))
    run(reference, whole, range(16))
    assert second.state[param]["step"] == 16
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(second.state[param][key], reference.state[whole][key])
    torch.testing.assert_close(param, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("to_ours", "fused"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "amsgrad": True}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    ids=str,
)
def test_adam_hands_over_in_the_middle_of_a_run(to_ours: bool, fused: bool, options: dict[str, Any]) -> None:
    param, whole = table(10, 4), table(10, 4)
    whole.data.copy_(param.data)
    adam, ours = torch.optim.Adam([param], fused=fused, **options), SparseAdam([param], **options)
    first, second = (adam, SparseAdam([param])) if to_ours else (ours, torch.optim.Adam([param]))
    run(first, param, range(8), dense=True)
    handed_over(first, second)
    run(second, param, range(8, 16), dense=True)
    run(torch.optim.Adam([whole], fused=fused, **options), whole, range(16), dense=True)
    assert int(second.state[param]["step"]) == 16
    torch.testing.assert_close(param, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor([3.0])], ids=repr)
@pytest.mark.parametrize("dense", [False, True])
def test_a_loaded_step_may_be_any_number(step: float | Tensor, dense: bool) -> None:
    param, whole = table(10, 4), table(10, 4)
    whole.data.copy_(param.data)
    first, reference = SparseAdam([param]), SparseAdam([whole])
    run(first, param, range(3), dense=dense)
    saved = through_a_file(first.state_dict())
    saved["state"][0]["step"] = step.clone() if isinstance(step, Tensor) else step
    second = SparseAdam([param])
    second.load_state_dict(saved)
    run(second, param, range(3, 6), dense=dense)
    run(reference, whole, range(6), dense=dense)
    assert int(second.state[param]["step"]) == 6
    torch.testing.assert_close(param, whole, rtol=1e-6, atol=1e-6)


OURS: dict[str, Any] = {
    "weight_decay": 0.1, "amsgrad": True, "bias_correction": "row", "nonfinite": "skip", "maximize": True,
}  # fmt: skip


def loaded_into_another(optimizer: SparseAdam) -> SparseAdam:
    second = SparseAdam([copy_of(optimizer.param_groups[0]["params"][0])])
    handed_over(optimizer, second)
    return second


@pytest.mark.parametrize("options", [{}, OURS], ids=["plain", "all"])
@pytest.mark.parametrize("way", [loaded_into_another, pickled, copy.deepcopy, objects_through_a_file])
def test_a_run_goes_on_after_every_way_of_copying(way: Callable[[Any], Any], options: dict[str, Any]) -> None:
    param = table(10, 4, dtype=torch.float64)
    whole = copy_of(param)
    first, reference = SparseAdam([param], **options), SparseAdam([whole], **options)
    run(first, param, range(4))
    second = way(first)
    (twin,) = second.param_groups[0]["params"]
    before = param.detach().clone()
    run(second, twin, range(4, 8))
    run(reference, whole, range(8))
    assert same_bits(twin, whole)
    assert second.state[twin].keys() == reference.state[whole].keys()
    assert same_bits(param, before)
    assert first.state[param]["step"] == 4
    second.add_param_group({"params": [table(2, 2)]})
    assert len(second.param_groups) == 2


def test_large_moments_can_be_shared_copied_and_saved() -> None:
    # Moments from 8 MiB on are allocated in another way.
    param = Parameter(torch.zeros(2**20, 3))
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [2**20 - 1], 1.0))
    moment = optimizer.state[param]["exp_avg"]
    assert moment.nonzero()[:, 0].unique().tolist() == [2**20 - 1]
    for twin in (copy.deepcopy(moment), pickled(moment), through_a_file({"m": moment})["m"]):
        assert same_bits(twin, moment)
    moment.share_memory_()
    step_with(optimizer, param, rows_of(param, [0], 1.0))
    assert moment[0].tolist() == pytest.approx([0.1, 0.1, 0.1])
