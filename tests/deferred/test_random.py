"""Any order of lookups, steps, flushes, copies and changes of options leaves what dense AdamW leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.deferred_cases import BAR, LONG, Twins, distance, embedding
from tests.helpers.gradients import rows_of, step_with

ROWS = 6

ids = st.lists(st.integers(0, ROWS - 1), max_size=4)
actions = st.one_of(
    st.tuples(st.just("step"), ids),
    st.tuples(st.just("step"), ids),
    st.tuples(st.just("wait"), st.sampled_from([1, 5, 70])),
    st.tuples(st.just("read"), ids),
    st.tuples(st.just("catch_up"), ids),
    st.tuples(st.just("dense step"), ids),
    st.tuples(st.just("lr"), st.sampled_from([0.0, 1e-4, 0.01, 0.5])),
    st.tuples(st.just("weight_decay"), st.sampled_from([0.0, 0.01, 1.0])),
    st.tuples(st.just("betas"), st.sampled_from([(0.9, 0.999), (0.5, 0.99), (0.0, 0.9), (0.9, 0.95)])),
    st.tuples(st.just("eps"), st.sampled_from([1e-8, 1e-3])),
    st.tuples(st.sampled_from(["flush", "eval", "copy", "reload", "whole"]), st.none()),
)


def act(twins: Twins, action: str, what: Any, scale: float) -> None:
    model, weight = twins.model, twins.model.weight
    if action in ("step", "dense step"):
        model.sparse = action == "step"
        rows = torch.tensor(what, dtype=torch.int64)
        twins.step(lambda model: model(rows), scale if what else 0.0)
    elif action == "wait":
        for _ in range(what):
            step_with(twins.ours, weight, rows_of(weight, []))
            step_with(twins.theirs, twins.twin.weight, torch.zeros_like(weight))
    elif action == "read":
        rows = torch.tensor(what, dtype=torch.int64)
        assert distance(twins.model(rows), twins.twin(rows)) <= BAR
    elif action == "catch_up":
        rows = torch.tensor(what, dtype=torch.int64)
        twins.ours.catch_up(weight, rows)
        assert distance(weight[rows], twins.twin.weight[rows]) <= BAR
    elif action == "flush":
        twins.ours.flush()
        assert distance(weight, twins.twin.weight) <= BAR
    elif action == "eval":
        model.eval()
        assert distance(weight, twins.twin.weight) <= BAR
        model.train()
    elif action == "copy":
        twins.model, twins.ours = copy.deepcopy((twins.model, twins.ours))
    elif action == "reload":
        twins.each(lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    elif action == "whole":
        with twins.ours.up_to_date(weight):
            twins.step(lambda model: model.weight, scale)
    else:
        for optimizer in (twins.ours, twins.theirs):
            optimizer.param_groups[0][action] = what


@pytest.mark.parametrize("backend_name", ["reference", "numba"])
@settings(max_examples=2000 if LONG else 120, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=st.lists(actions, min_size=1, max_size=25),
    scale=st.sampled_from([1.0, 1e-3, 1e-8]),
    seed=st.integers(0, 2**31),
    decay=st.sampled_from([0.0, 0.01, 1.0]),
    amsgrad=st.booleans(),
)
def test_any_history_is_dense_adamws(
    backend_name: str, history: list[tuple[str, Any]], scale: float, seed: int, decay: float, amsgrad: bool
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROWSTEP_BACKEND", backend_name)
        torch.manual_seed(seed)
        twins = Twins(embedding(ROWS, 2), lr=0.01, weight_decay=decay, amsgrad=amsgrad)
        twins.step(lambda model: model(torch.arange(ROWS)), scale)
        for action, what in history:
            act(twins, action, what, scale)
        twins.assert_same()
