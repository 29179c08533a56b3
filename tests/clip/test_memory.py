"""Clipping gradients that share memory: each is scaled once, and what is not a gradient is left alone.

Autograd passes memory on: the gradients of these models are views of each other, of what the caller passed to
``backward``, or of a single number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Embedding, Parameter

from rowstep import clip_grad_norm_, clip_grad_value_
from tests.helpers.gradients import rows_of, table

pytestmark = pytest.mark.usefixtures("backend")


def embedding(rows: int = 7, columns: int = 2) -> Embedding:
    return Embedding(rows, columns, sparse=True, dtype=torch.float64)


def dense(*shape: int) -> Parameter:
    return table(*shape, dtype=torch.float64)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def parts_of_another() -> tuple[list[Tensor], Tensor]:
    a, b, c = (embedding() for _ in range(3))
    return [a.weight, b.weight, c.weight], a(ids(1, 1, 5)) + torch.cat([b(ids(0)), c(ids(3, 3))])


def another_shape() -> tuple[list[Tensor], Tensor]:
    a, b = embedding(columns=2), embedding(columns=4)
    return [a.weight, b.weight], a(ids(1, 2, 3, 1)).view(2, 4) + b(ids(6, 6))


def a_dense_parameter_through_a_view() -> tuple[list[Tensor], Tensor]:
    a, w = embedding(), dense(6)
    return [a.weight, w], a(ids(1, 1, 5)) + w.view(3, 2)


def one_table_twice() -> tuple[list[Tensor], Tensor]:
    a = embedding()
    return [a.weight], a(ids(1, 2, 3)) + a(ids(2, 2, 0))


def a_parameter_listed_twice() -> tuple[list[Tensor], Tensor]:
    a, w = embedding(), dense(3, 2)
    return [a.weight, w, a.weight, w], a(ids(1, 2, 3)) * w


MODELS: list[Callable[[], tuple[list[Tensor], Tensor]]] = [
    parts_of_another,
    another_shape,
    a_dense_parameter_through_a_view,
    one_table_twice,
    a_parameter_listed_twice,
]
WAYS_BACK: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda out: torch.autograd.backward(out.sum()),
    "keeps its graph": lambda out: torch.autograd.backward(out.square().sum(), retain_graph=True),
    "with a gradient": lambda out: torch.autograd.backward(out, torch.randn(out.shape, dtype=out.dtype)),
}


def full_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for param in params:
        assert param.grad is not None
        found.append(param.grad.to_dense().clone())
    return found


def norm_of(grads: list[Tensor]) -> Tensor:
    norm: Tensor = torch.cat([grad.flatten() for grad in grads]).norm()
    return norm


@pytest.mark.parametrize("way", WAYS_BACK)
@pytest.mark.parametrize("model", MODELS)
def test_every_gradient_is_scaled_once_and_clamped_by_its_own_sums(
    model: Callable[[], tuple[list[Tensor], Tensor]], way: str
) -> None:
    params, out = model()
    WAYS_BACK[way](out)
    objects = [param.grad for param in params]
    before = full_gradients(params)
    norm = clip_grad_norm_(params, 0.1)
    torch.testing.assert_close(norm, norm_of(before))
    for param, grad, old in zip(params, objects, before, strict=True):
        assert param.grad is grad
        assert grad is not None
        torch.testing.assert_close(grad.to_dense(), old * (0.1 / (norm + 1e-6)))
    torch.testing.assert_close(clip_grad_norm_(params, 1e9), torch.tensor(0.1, dtype=torch.float64), rtol=1e-4, atol=0)
    before = full_gradients(params)
    clip_grad_value_(params, 0.03)
    for param, grad, old in zip(params, objects, before, strict=True):
        assert param.grad is grad
        assert grad is not None
        torch.testing.assert_close(grad.to_dense(), old.clamp(-0.03, 0.03))


def test_gradients_of_tied_parameters_are_one() -> None:
    one, other, plain, twin = table(5, 2), table(5, 2), table(3), table(3)
    one.grad = other.grad = rows_of(one, [1, 1, 4])
    plain.grad = twin.grad = torch.randn(3)
    params = [one, other, plain, twin]
    before = full_gradients(params)
    norm = clip_grad_norm_(params, 0.1)
    for now, old in zip(full_gradients(params), before, strict=True):
        torch.testing.assert_close(now, old * (0.1 / (norm + 1e-6)))


CLIPS = [lambda params: clip_grad_norm_(params, 1e-3), lambda params: clip_grad_value_(params, 1e-3)]


@pytest.mark.parametrize("clip", CLIPS)
def test_what_the_caller_passed_to_backward_is_the_callers(clip: Callable[[list[Tensor]], object]) -> None:
    for share in (torch.Tensor.clone, torch.Tensor.numpy):
        module, given = embedding(), torch.randn(3, 2, dtype=torch.float64)
        kept = share(given)
        module(ids(1, 2, 1)).backward(torch.as_tensor(kept))
        clip([module.weight])
        assert np.array_equal(np.asarray(kept), np.asarray(given))
        assert norm_of(full_gradients([module.weight])) < 0.01


def test_a_dense_gradient_keeps_its_memory() -> None:
    """DistributedDataParallel's buckets and users hold it."""
    layer, bucket = nn.Linear(3, 2), torch.randn(8)
    layer.weight.grad, layer.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    before = bucket.clone()
    norm = clip_grad_norm_([*layer.parameters()], 0.1, foreach=True)
    torch.testing.assert_close(bucket, before * (0.1 / (norm + 1e-6)))


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_later_backward_adds_to_the_clipped_gradient(coalesced: bool, own: bool) -> None:
    module = embedding()
    given = torch.randn(3, 2, dtype=torch.float64)
    module(ids(1, 2, 1)).backward(given.clone() if own else given)
    assert module.weight.grad is not None
    if coalesced:
        module.weight.grad = module.weight.grad.coalesce()
    for _ in range(2):
        assert module.weight.grad is not None
        assert module.weight.grad.is_coalesced() == coalesced
        before = module.weight.grad.to_dense()
        factor = 0.1 / (clip_grad_norm_(module.weight, 0.1) + 1e-6)
        assert module.weight.grad.is_coalesced() == coalesced
        module(ids(5, 1)).sum().backward()
        added = torch.zeros(7, 2, dtype=torch.float64).index_add_(0, ids(5, 1), torch.ones(2, 2, dtype=torch.float64))
        torch.testing.assert_close(module.weight.grad.to_dense(), before * factor + added)
        coalesced = module.weight.grad.is_coalesced()
