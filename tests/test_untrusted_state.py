"""A state that is wrong in a way that has a name: refused with what was found and expected, before anything changes.

Each flaw is tried where it comes in: in a state dict that is loaded, and in a state that is edited in mid-run.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from deferred_cases import embedding
from gradients import Snapshot, rows_of, step_with, table
from rowstep import DeferredAdam, DeferredAdamW, SparseAdam

pytestmark = pytest.mark.usefixtures("backend")

KINDS = pytest.mark.parametrize("kind", [SparseAdam, DeferredAdam, DeferredAdamW])
Kind = type[SparseAdam | DeferredAdam]
State = dict[str, Any]


class Run:
    """Two tables and a dense parameter after a step, the second table last in line."""

    def __init__(self, kind: Kind) -> None:
        self.params = [("first", table(6, 3)), ("dense", table(2, 3)), ("last", table(6, 3))]
        options: dict[str, Any] = {"bias_correction": "row"} if kind is SparseAdam else {}
        self.optimizer: Any = kind(self.params, lr=0.1, amsgrad=True, **options)
        self.last = self.params[-1][1]
        self.step()

    def step(self) -> None:
        for name, param in self.params:
            if isinstance(self.optimizer, DeferredAdam) and name != "dense":
                self.optimizer.catch_up(param, torch.tensor([1, 4]))
            param.grad = torch.ones_like(param) if name == "dense" else rows_of(param, [1, 4], 1.0)
        self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        """Its state dict, by way of a file."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded


def put(**values: Any) -> Callable[[State], None]:
    return lambda state: state.update(values)


def drop(*keys: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key in keys:
            del state[key]

    return change


def alter(key: str, how: Callable[[Tensor], Any]) -> Callable[[State], None]:
    return lambda state: state.update({key: how(state[key])})


COUNTS: list[Any] = [
    -1, -1.0, math.nan, math.inf, -math.inf, None, 2.5, 2**53, 2**60, 10**400, True, "3", [1], 1j,
    torch.tensor(-1.0), torch.tensor(math.nan), torch.tensor(math.inf), torch.tensor(2.5), torch.tensor(2**60),
    torch.tensor(True), torch.tensor([]), torch.tensor([1.0, 2.0]), torch.tensor(1j), torch.empty((), device="meta"),
    torch.tensor(3.0).to_sparse(),
]  # fmt: skip

MOMENT_FLAWS: dict[str, Callable[[Tensor], Any]] = {
    "truncated": lambda moment: moment[:-1].clone(),
    "longer": lambda moment: torch.cat([moment, moment]),
    "flat": lambda moment: moment.reshape(-1),
    "of another rank": lambda moment: moment.unsqueeze(0),
    "transposed": lambda moment: moment.t(),
    "integers": lambda moment: moment.to(torch.int32),
    "booleans": lambda moment: moment != 0,
    "complex": lambda moment: moment.to(torch.complex64),
    "8 bits": lambda moment: moment.to(torch.float8_e4m3fn),
    "sparse": lambda moment: moment.to_sparse(),
    "on meta": lambda moment: moment.to("meta"),
    "expanded": lambda moment: moment[:1].expand(6, 3),
    "overlapping": lambda moment: torch.ones(8).as_strided((6, 3), (1, 1)),
    "None": lambda moment: None,
    "a number": lambda moment: 0.5,
    "a list": lambda moment: moment.tolist(),
    "an array": lambda moment: moment.numpy(),
}

FLAWS: dict[str, tuple[Callable[[State], None], str]] = {
    **{f"step is {count!r}"[:40]: (put(step=count), "'step' is .*expected a count of steps") for count in COUNTS},
    **{
        f"{key} {name}": (alter(key, how), f"'{key}' is .*(expected|the parameter is)")
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        for name, how in MOMENT_FLAWS.items()
    },
    "no exp_avg": (drop("exp_avg"), "has 'exp_avg_sq' but no 'exp_avg'; expected both"),
    "no exp_avg_sq": (drop("exp_avg_sq"), "has 'exp_avg' but no 'exp_avg_sq'; expected both"),
    "no step": (drop("step"), "has 'exp_avg' but no 'step'; expected both"),
    "nothing but a maximum": (drop("step", "exp_avg", "exp_avg_sq"), "has 'max_exp_avg_sq' but no 'exp_avg'"),
    "one moment for both": (
        lambda state: state.update(exp_avg_sq=state["exp_avg"]),
        r"'exp_avg.*(share memory|lies in memory).*expected",
    ),
    "a maximum that is the second moment": (
        lambda state: state.update(max_exp_avg_sq=state["exp_avg_sq"]),
        r"exp_avg_sq'.*(share memory|lies in memory).*expected",
    ),
}


def assert_refused(run: Run, action: Callable[[], object], message: str) -> None:
    before, groups = Snapshot(run.optimizer), copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        action()
    before.assert_unchanged()
    assert run.optimizer.state_dict()["param_groups"] == groups


@KINDS
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_refused_when_it_is_loaded(kind: Kind, flaw: str) -> None:
    run = Run(kind)
    saved = run.saved()
    change, message = FLAWS[flaw]
    change(saved["state"][2])
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), f"the loaded state.*{message}")
    run.step()


@KINDS
@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_refused_by_the_next_step(kind: Kind, flaw: str) -> None:
    """Before the parameters that come first have moved, and with the name of the one whose state it is."""
    run = Run(kind)
    change, message = FLAWS[flaw]
    state = run.optimizer.state[run.last]
    whole = dict(state)
    if isinstance(run.optimizer, DeferredAdam):
        run.optimizer.flush()  # what waits would be settled before a state that somebody has replaced is looked at
    change(state)
    weights = [param.detach().clone() for _, param in run.params]
    with pytest.raises(ValueError, match=rf"parameter 2 of group 0 \('last'\): .*{message}"):
        run.step()
    for (_, param), before in zip(run.params, weights, strict=True):
        assert torch.equal(param, before)
    assert int(run.optimizer.state[run.params[0][1]]["step"]) == 1
    state.clear()
    state.update(whole)
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [2, 2, 2]


@KINDS
@pytest.mark.parametrize("name", ["dense", "last"])
def test_a_moment_whose_memory_is_freed_is_refused_by_the_next_step(kind: Kind, name: str) -> None:
    """As packages do that move a state out of the way between two steps."""
    run = Run(kind)
    run.optimizer.state_dict()  # no row waits
    before = run.params[0][1].detach().clone()
    run.optimizer.state[dict(run.params)[name]]["exp_avg"].untyped_storage().resize_(0)
    for param in (param for _, param in run.params):
        param.grad = rows_of(param, [1], 1.0) if param.shape == (6, 3) else torch.ones_like(param)
    with pytest.raises(ValueError, match=rf"\('{name}'\): .*'exp_avg' lies in memory that was freed; expected memory"):
        run.optimizer.step()
    assert torch.equal(run.params[0][1], before)


COUNTS_PER_ROW: dict[str, tuple[Tensor, str]] = {
    "bool": (torch.ones(6, dtype=torch.bool), "whole numbers"),
    "float16": (torch.ones(6, dtype=torch.float16), "whole numbers"),
    "complex": (torch.ones(6, dtype=torch.complex64), "whole numbers"),
    "negative": (torch.tensor([0, 1, -1, 0, 0, 0]), "from 0 to"),
    "negative int8": (torch.full((6,), -1, dtype=torch.int8), "from 0 to"),
    "NaN": (torch.tensor([0, 1, math.nan, 0, 0, 0]), "from 0 to"),
    "inf": (torch.full((6,), math.inf), "from 0 to"),
    "halves": (torch.full((6,), 0.5), "from 0 to"),
    "2**60": (torch.full((6,), 2**60), "from 0 to"),
    "too many": (torch.ones(7, dtype=torch.int64), "leading dimensions"),
    "too few": (torch.ones(5, dtype=torch.int64), "leading dimensions"),
    "sparse": (torch.ones(6, dtype=torch.int64).to_sparse(), "dense"),
    "meta": (torch.ones(6, dtype=torch.int64, device="meta"), "dense"),
}


@pytest.mark.parametrize("flaw", COUNTS_PER_ROW)
def test_counts_per_row_that_are_none_are_refused(flaw: str) -> None:
    run = Run(SparseAdam)
    saved = run.saved()
    saved["state"][2]["row_step"], message = COUNTS_PER_ROW[flaw]
    expected = f"the loaded state of parameter 2: 'row_step' is .*expected .*{message}"
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, torch.float64])
def test_counts_per_row_of_other_widths_are_the_same_counts(dtype: torch.dtype) -> None:
    run, twin = Run(SparseAdam), Run(SparseAdam)
    with torch.no_grad():
        for (_, param), (_, other) in zip(run.params, twin.params, strict=True):
            other.copy_(param)
    saved = run.saved()
    twin.optimizer.load_state_dict(copy.deepcopy(saved))
    saved["state"][2]["row_step"] = saved["state"][2]["row_step"].to(dtype)
    run.optimizer.load_state_dict(saved)
    for each in (run, twin):
        each.step()
    assert run.optimizer.state[run.last]["row_step"].tolist() == [0, 2, 0, 0, 2, 0]
    assert run.optimizer.state[run.last]["row_step"].dtype == torch.int64
    assert torch.equal(run.last, twin.last)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float32])
def test_counts_per_row_of_other_widths_are_refused_in_mid_run(dtype: torch.dtype) -> None:
    run = Run(SparseAdam)
    state = run.optimizer.state[run.last]
    state["row_step"] = state["row_step"].to(dtype)
    message = rf"parameter 2 of group 0 \('last'\): its state 'row_step' is .*{dtype}.*expected a dense tensor of int64"
    assert_refused(run, run.step, message)


SHARED: dict[str, Callable[[Run, dict[int, State]], Tensor]] = {
    "the moment of another": lambda run, states: states[0]["exp_avg"],
    "another moment of another": lambda run, states: states[0]["exp_avg_sq"].view(3, 6).view(6, 3),
    "the weights of another": lambda run, states: run.params[0][1].detach(),
    "its own weights": lambda run, states: run.last.detach(),
    "its own weights in another order": lambda run, states: run.last.detach().view(3, 6).t(),
}


@KINDS
@pytest.mark.parametrize("owner", SHARED)
def test_memory_of_others_is_refused(kind: Kind, owner: str) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["state"][2]["exp_avg"] = SHARED[owner](run, saved["state"])
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), "share memory; expected")


@KINDS
def test_parameters_that_are_loaded_with_one_counter_count_for_themselves(kind: Kind) -> None:
    run = Run(kind)
    saved = run.saved()
    counter = torch.tensor(1.0)
    for state in saved["state"].values():
        state["step"] = counter
    run.optimizer.load_state_dict(saved)
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [2, 2, 2]
    assert counter.item() == 1


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq", "row_step", "of another version"])
def test_freed_memory_is_refused(key: str) -> None:
    run = Run(SparseAdam)
    saved = run.saved()
    saved["state"][2][key] = torch.zeros(6, 3, dtype=torch.int64)
    saved["state"][2][key].untyped_storage().resize_(0)
    message = f"the loaded state of parameter 2: the storage of '{key}' is smaller"
    assert_refused(run, lambda: run.optimizer.load_state_dict(saved), message)


STRUCTURES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda saved: saved.pop("state"), "expected a state dict with 'state' and 'param_groups'"),
    "no groups": (lambda saved: saved.pop("param_groups"), "expected a state dict with 'state' and 'param_groups'"),
    "a list of states": (lambda saved: saved.update(state=[]), "'state' is a list; expected a dict"),
    "a state that is a list": (lambda saved: saved["state"].update({0: []}), "expected a dict that holds a dict"),
    "a state that is None": (lambda saved: saved["state"].update({0: None}), "expected a dict that holds a dict"),
    "a group that is None": (lambda saved: saved.update(param_groups=[None]), "expected a list of dicts"),
    "groups in a dict": (lambda saved: saved.update(param_groups={}), "'param_groups' is a dict; expected a list"),
    "no params": (lambda saved: saved["param_groups"][0].pop("params"), "has params None; expected a list of"),
    "params in lists": (
        lambda saved: saved["param_groups"][0].update(params=[[0], [1], [2]]),
        r"has params \[\[0\], \[1\], \[2\]\]; expected a list of parameter numbers",
    ),
    "one number for two": (
        lambda saved: saved["param_groups"][0].update(params=[0, 1, 0]),
        "list parameter 0 twice; expected a number for each",
    ),
    "names that are none": (
        lambda saved: saved["param_groups"][0].update(param_names=None),
        "expected a name for each",
    ),
    "too few names": (lambda saved: saved["param_groups"][0].update(param_names=["a"]), "expected a name for each"),
    "fewer params": (lambda saved: saved["param_groups"][0].update(params=[0], param_names=["a"]), "match the size"),
    "another group": (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "different number of"),
    "no group": (lambda saved: saved["param_groups"].clear(), "different number of"),
    "an order of rows that is none": (
        lambda saved: saved["state"][2].update(rowstep_row_order=torch.tensor([6, 3, 0])),
        "the loaded order of the rows is .*expected one of 6 rows",
    ),
    "an order of other rows": (
        lambda saved: saved["state"][2].update(rowstep_row_order=torch.tensor([7, 1, 0])),
        "the loaded order of the rows is .*expected one of 6 rows",
    ),
    "an order that is no list": (
        lambda saved: saved["state"][2].update(rowstep_row_order=3),
        "the loaded order of the rows is 3; expected three numbers",
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
    *[("eps", value) for value in ("1e-8", None, math.inf, torch.tensor(1e-8), torch.ones(2), [1e-8])],
    *[("betas", value) for value in (None, 0.9, "00", {0.8: 0, 0.9: 1}, torch.tensor([0.9, 0.99]), torch.tensor(0.9))],
    *[("betas", value) for value in ((None, 0.9), ("0", "0"), (torch.ones(2), 0.9), (0.9, 10**400))],
    *[("weight_decay", value) for value in ("0", None, math.nan, torch.tensor(0.1), 10**400)],
    *[("amsgrad", value) for value in ("", None, 0.0, torch.tensor(True), torch.ones(2), [True])],
    ("maximize", 1.0),
]


@KINDS
@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=lambda value: repr(value)[:30])
def test_options_that_are_none_are_refused(kind: Kind, name: str, value: Any) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["param_groups"][0][name] = value
    assert_refused(
        run, lambda: run.optimizer.load_state_dict(saved), "Invalid .* in group 0 of the loaded state; expec"
    )


@KINDS
def test_flags_and_betas_of_other_types_are_taken(kind: Kind) -> None:
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
def test_what_is_unknown_stays(kind: Kind) -> None:
    run = Run(kind)
    saved = run.saved()
    saved["param_groups"][0].update(initial_lr=0.1, momentum=None)
    saved["state"][2]["of another version"] = torch.ones(2)
    run.optimizer.load_state_dict(saved)
    run.step()
    again = run.optimizer.state_dict()
    assert again["param_groups"][0]["initial_lr"] == 0.1
    assert again["state"][2]["of another version"].tolist() == [1, 1]


@KINDS
@pytest.mark.parametrize("inner", [False, True])
def test_a_cleared_state_begins_anew(kind: Kind, inner: bool) -> None:
    run = Run(kind)
    if inner:
        for state in run.optimizer.state.values():
            state.clear()
    else:
        run.optimizer.state.clear()
    run.step()
    assert [int(run.optimizer.state[param]["step"]) for _, param in run.params] == [1, 1, 1]


@pytest.mark.parametrize("way", ["all", "one", "moments"])
def test_what_waits_is_settled_when_a_state_is_cleared_or_replaced(way: str) -> None:
    """Rows that wait do so under the moments they had, whatever is written into the state."""
    runs = []
    for edited in (False, True):
        torch.manual_seed(0)
        module = embedding(6, 3)
        optimizer = DeferredAdamW(module, lr=0.1, weight_decay=0.1)
        for ids in ([0, 1, 2, 3, 4, 5], [1], [1], [1]):
            optimizer.zero_grad()
            module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        state = optimizer.state[module.weight]
        if not edited:
            optimizer.flush()
        elif way == "all":
            optimizer.state.clear()
        elif way == "one":
            state.clear()
        else:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(module.weight), torch.ones_like(module.weight)
        runs.append(module(torch.arange(6)).detach())
    torch.testing.assert_close(runs[0], runs[1])


@pytest.mark.parametrize("count", [7, torch.tensor(7.0)])
def test_a_count_that_is_set_while_rows_wait_is_the_one_from_which_the_next_step_goes_on(count: Any) -> None:
    """As with torch.optim.Adam; what rows have waited for so far, they take with the old one."""
    module, dense = embedding(6, 3), table(6, 3, dtype=torch.float64)
    dense.data.copy_(module.weight.data)
    ours, theirs = DeferredAdam(module, lr=0.1), torch.optim.Adam([dense], lr=0.1)
    for number, ids in enumerate([[0, 1, 2, 3, 4, 5], [1], [1], [1], [2], [2]]):
        if number == 4:
            ours.state[module.weight]["step"] = copy.deepcopy(count)
            theirs.state[dense]["step"] = torch.tensor(7.0)
        grad = rows_of(dense, ids)
        ours.catch_up(module.weight, torch.tensor(ids))
        step_with(ours, module.weight, grad)
        step_with(theirs, dense, grad.to_dense())
    ours.flush()
    torch.testing.assert_close(module.weight, dense, rtol=1e-13, atol=1e-13)
    assert int(ours.state[module.weight]["step"]) == 9


def test_a_refused_state_dict_leaves_rows_waiting() -> None:
    module = embedding(6, 3)
    optimizer = DeferredAdam(module, lr=0.1)
    for ids in ([0, 1, 2, 3, 4, 5], [1], [1]):
        optimizer.zero_grad()
        module(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
    saved = copy.deepcopy(DeferredAdam(embedding(6, 3)).state_dict())
    saved["state"][0] = {"step": -1}
    before = Snapshot(optimizer)
    with pytest.raises(ValueError, match="expected a count of steps"):
        optimizer.load_state_dict(saved)
    before.assert_unchanged()


@KINDS
def test_a_parameter_of_integers_may_be_in_the_list(kind: Kind) -> None:
    """But it cannot be stepped."""
    frozen, weights = Parameter(torch.arange(6), requires_grad=False), table(6, 3)
    optimizer: Any = kind([frozen, weights], lr=0.1)
    step_with(optimizer, weights, rows_of(weights, [1]))
    assert frozen.tolist() == list(range(6))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = weights.detach().clone()
    frozen.grad = torch.ones(6, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"parameter 0 of group 0: .*dtype torch.int64; expected a floating-point type"):
        optimizer.step()
    assert torch.equal(weights, before)


@KINDS
@pytest.mark.parametrize("sparse", [False, True])
def test_a_parameter_of_8_bits_cannot_be_stepped(kind: Kind, sparse: bool) -> None:
    small = nn.Parameter(torch.ones(6, 3).to(torch.float8_e4m3fn), requires_grad=False)
    weights = table(6, 3)
    optimizer: Any = kind([weights, small], lr=0.1)
    small.grad_dtype = None
    small.grad = rows_of(weights, [1]) if sparse else torch.ones(6, 3)
    weights.grad = rows_of(weights, [2])
    before = weights.detach().clone()
    with pytest.raises(TypeError, match=r"parameter 1 of group 0: .*float8_e4m3fn; expected a floating-point type"):
        optimizer.step()
    assert torch.equal(weights, before)


@KINDS
def test_complex_parameters_are_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"Complex params at indices \[\[0, 1\]\]"):
        kind([table(6, 3), Parameter(torch.ones(2, dtype=torch.complex64))])
