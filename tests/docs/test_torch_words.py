"""Constructors take the words of torch.optim.Adam, AdamW and SparseAdam, in their places, and honour or refuse them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam
from rowstep._kernels import cache
from tests.helpers.gradients import copy_of, rows_of, same_bits, step_with, table

OPTIMIZERS: list[Any] = [SparseAdam, DeferredAdam, DeferredAdamW]
PAIRS: list[tuple[Any, Any]] = [(DeferredAdam, torch.optim.Adam), (DeferredAdamW, torch.optim.AdamW)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_signature_is_torchs(ours: Any, theirs: Any) -> None:
    own, torchs = (list(inspect.signature(cls).parameters.values()) for cls in (ours, theirs))
    positional = [p.name for p in torchs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    known = {p.name: p.default for p in own}
    for parameter in torchs:
        assert known[parameter.name] == parameter.default


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}, {"fused": False}], ids=str)
def test_dense_parameters_step_as_torch_is_told_to(ours: Any, theirs: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(50, 7))
    twin = copy_of(param)
    decay = 0.1 if ours is DeferredAdamW else 0.0
    optimizer = ours([param], 0.01, (0.8, 0.9), 1e-6, decay, True, **how)
    reference = theirs([twin], 0.01, (0.8, 0.9), 1e-6, decay, True, **(how or {"fused": True}))
    for _ in range(5):
        grad = torch.randn(50, 7)
        step_with(optimizer, param, grad)
        step_with(reference, twin, grad)
    assert same_bits(param, twin)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("word", ["capturable", "differentiable"])
def test_what_cannot_be_honoured_is_refused(cls: Any, word: str) -> None:
    with pytest.raises(ValueError, match=f"{word}=True is not supported: .*Use {word}=False"):
        cls([table(3, 2)], **{word: True})
    assert cls([table(3, 2)], **{word: False}).defaults[word] is False
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):  # as by torch
        cls([table(3, 2)], fused=True, foreach=True)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_options_may_be_tensors_of_one_number(cls: Any) -> None:
    torch.manual_seed(0)
    params = [table(6, 2, dtype=torch.float64) for _ in range(2)]
    params[1].data.copy_(params[0].data)
    numbers: dict[str, Any] = {"betas": (0.75, 0.875), "eps": 2.0**-10}
    tensors: dict[str, Any] = {"betas": tuple(map(torch.tensor, numbers["betas"])), "eps": torch.tensor(2.0**-10)}
    if cls is not DeferredAdam:
        numbers["weight_decay"], tensors["weight_decay"] = 0.125, torch.tensor(0.125)
    optimizers = [cls([param], **options) for param, options in zip(params, (numbers, tensors), strict=True)]
    for ids in ([1, 2], [2, 2, 5], [1]):
        grad = rows_of(params[0], ids)
        for param, optimizer in zip(params, optimizers, strict=True):
            nn.functional.embedding(torch.tensor(ids), param)  # as a forward pass does
            step_with(optimizer, param, grad)
    for param, optimizer in zip(params, optimizers, strict=True):
        param.sum()
        step_with(optimizer, param, torch.ones_like(param))
    assert same_bits(*params)


def test_numbers_of_other_types_are_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "numba")
    results = []
    kinds = [
        {"lr": 1.0, "betas": (0.0, 0.5), "eps": 1.0, "weight_decay": 0.0, "maximize": True, "amsgrad": True},
        {"lr": 1, "betas": (0, 0.5), "eps": 1, "weight_decay": 0, "maximize": 1, "amsgrad": 1},
        {
            "lr": np.float32(1), "betas": (np.float64(0), np.float32(0.5)), "eps": np.int64(1),
            "weight_decay": np.float16(0), "maximize": np.True_, "amsgrad": np.int8(1),
        },
    ]  # fmt: skip
    for options in kinds:
        torch.manual_seed(0)
        param = table(6, 2)
        optimizer: Any = SparseAdam([param], **options)  # type: ignore[arg-type]
        step_with(optimizer, param, rows_of(param, [1, 2]))  # random, from the same seed
        results.append((param, len(cache.records)))
    for param, compiled in results[1:]:
        assert same_bits(param, results[0][0])
        assert compiled == results[0][1]


@pytest.mark.usefixtures("backend")
def test_adams_state_goes_on_as_adamws() -> None:
    """As in torch: AdamW decays the weights, whatever the state it has loaded says."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))
    adam = torch.optim.Adam([param], lr=0.1, weight_decay=0.2, fused=True)
    step_with(adam, param, torch.randn(6, 2, dtype=torch.float64))
    twin = copy_of(param)
    ours, theirs = DeferredAdamW([param]), torch.optim.AdamW([twin])
    for optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert ours.param_groups[0]["decoupled_weight_decay"] is True
    assert ours.param_groups[0]["weight_decay"] == 0.2
    assert ours.param_groups[0]["fused"] is None  # how this optimizer was told to step
    grad = rows_of(param, [1, 4])
    step_with(ours, param, grad)
    step_with(theirs, twin, grad.to_dense())
    ours.flush()
    torch.testing.assert_close(param, twin, rtol=0, atol=1e-15)


@pytest.mark.usefixtures("backend")
def test_a_rate_of_0_and_an_eps_of_0() -> None:
    param, dense = table(6, 2), nn.Parameter(torch.ones(3))
    optimizer = DeferredAdam([param, dense], lr=0.0)
    before = dense.detach().clone()
    step_with(optimizer, dense, torch.ones(3))
    assert torch.equal(dense, before)
    with pytest.raises(ValueError, match=r"Invalid epsilon value: 0.0; expected a finite number > 0"):
        DeferredAdam([param, dense], eps=0.0)
