"""State dicts of another structure, and groups with invalid options: refused before anything changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.state_runs import KINDS, Kind, Run, assert_refused

STRUCTURES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda saved: saved.pop("state"), "has no 'state'; expected 'state' and 'param_groups'"),
    "no groups": (lambda saved: saved.pop("param_groups"), "has no 'param_groups'; expected 'state' and"),
    "a list of states": (lambda saved: saved.update(state=[]), "'state' is a list; expected a dict"),
    "a state that is a list": (lambda saved: saved["state"].update({0: []}), "expected a dict with one dict per"),
    "a group that is None": (lambda saved: saved.update(param_groups=[None]), "expected a list of dicts"),
    "groups in a dict": (lambda saved: saved.update(param_groups={}), "'param_groups' is a dict; expected a list"),
    "no params": (lambda saved: saved["param_groups"][0].pop("params"), "has params None; expected a list of"),
    "params in lists": (
        lambda saved: saved["param_groups"][0].update(params=[[0], [1], [2]]),
        r"has params \[\[0\], \[1\], \[2\]\]; expected a list of parameter numbers",
    ),
    "a twin": (lambda saved: saved["param_groups"][0].update(params=[0, 1, 0]), "list parameter 0 twice; expected"),
    "a name": (lambda saved: saved["param_groups"][0].update(param_names=["a"]), "expected one name per parameter"),
    "fewer params": (lambda saved: saved["param_groups"][0].update(params=[0], param_names=["a"]), "match the size"),
    "another group": (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "different number of"),
    "no group": (lambda saved: saved["param_groups"].clear(), "different number of"),
    "an invalid row order": (
        lambda saved: saved["state"][2].update(rowstep_row_order=torch.tensor([6, 3, 0])),
        "the loaded row order is .*expected an order of 6 rows",
    ),
    "a row order that is no tensor": (
        lambda saved: saved["state"][2].update(rowstep_row_order=3),
        "the loaded row order is 3; expected an int64 tensor of three numbers",
    ),
}


@KINDS
@pytest.mark.parametrize("flaw", STRUCTURES)
def test_another_structure_is_refused(kind: Kind, flaw: str) -> None:
    run = Run(kind)
    saved = run.saved()
    change, message = STRUCTURES[flaw]
    change(saved)
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), message)
    run.step()


OPTIONS: list[tuple[str, Any]] = [
    *[
        ("lr", value)
        for value in ("0.1", None, math.nan, 10**400, 1j, torch.tensor(1j), torch.empty((), device="meta"))
    ],
    *[("eps", value) for value in ("1e-8", None, math.inf, torch.tensor(-1e-8), torch.ones(2), [1e-8])],
    *[("betas", value) for value in (None, 0.9, "00", {0.8: 0, 0.9: 1}, torch.tensor([0.9, 0.99]), torch.tensor(0.9))],
    *[("betas", value) for value in ((None, 0.9), ("0", "0"), (torch.ones(2), 0.9), (0.9, 10**400))],
    *[("weight_decay", value) for value in ("0", None, math.nan, torch.tensor(-0.1), 10**400)],
    *[("amsgrad", value) for value in ("", None, 0.0, torch.tensor(True), torch.ones(2), [True])],
    ("maximize", 1.0),
]


@KINDS
@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=lambda value: repr(value)[:30])
def test_invalid_options_are_refused(kind: Kind, name: str, value: Any) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["param_groups"][0][name] = value
    assert_refused(
        run, lambda: run.optimizer.load_state_dict(saved), "Invalid .* in group 0 of the loaded state; expec"
    )


@KINDS
def test_flags_and_betas_of_other_types_are_accepted(kind: Kind) -> None:
    run, twin = Run(kind), Run(kind)
    saved, _ = run.saved(), twin.saved()  # no row waits
    with torch.no_grad():
        for (_, param), (_, other) in zip(run.params, twin.params, strict=True):
            other.copy_(param)
    twin.optimizer.load_state_dict(copy.deepcopy(saved))
    beta = torch.tensor(0.999, dtype=torch.float64)
    saved["param_groups"][0].update(amsgrad=1, maximize=0, betas=[0.9, beta], lr=torch.tensor(0.1, dtype=torch.float64))
    run.optimizer.load_state_dict(saved)
    for each in (run, twin):
        each.step()
        each.optimizer.state_dict()
    for (_, param), (_, other) in zip(run.params, twin.params, strict=True):
        torch.testing.assert_close(param, other)


@KINDS
def test_unknown_keys_are_kept(kind: Kind) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["param_groups"][0].update(initial_lr=0.1, momentum=None)
    saved["state"][2]["of another version"] = torch.ones(2)
    saved["state"]["notes"] = {"exp_avg": 3, "step": None}  # of no parameter: a program may keep something there
    run.optimizer.load_state_dict(saved)
    run.step()
    again = run.optimizer.state_dict()
    assert again["state"]["notes"] == {"exp_avg": 3, "step": None}
    assert again["param_groups"][0]["initial_lr"] == 0.1
    assert again["state"][2]["of another version"].tolist() == [1, 1]
