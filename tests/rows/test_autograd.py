"""Row surgery beside autograd: graphs that are still alive, backward passes that come too late, hooks, DDP."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rowstep import DeferredAdam, SparseAdam
from rowstep.distributed import ddp
from rowstep.distributed._traffic import count_traffic

pytestmark = pytest.mark.usefixtures("backend")

Optimizer = SparseAdam | DeferredAdam
Surgery = Callable[[Optimizer, Tensor], None]

TOO_LATE = r"of a table of shape \(10, 4\) were moved, added or dropped after this forward pass"
SURGERIES: dict[str, Surgery] = {
    "grow": lambda optimizer, weight: optimizer.grow(weight, 3),
    "keep": lambda optimizer, weight: optimizer.keep_rows(weight, torch.tensor([9, 1, 5])),
    "permute": lambda optimizer, weight: optimizer.permute_rows(weight, torch.arange(9, -1, -1)),
}
IDS = torch.tensor([1, 2, 1])


@pytest.fixture(params=[SparseAdam, DeferredAdam])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=list(SURGERIES))
def surgery(request: pytest.FixtureRequest) -> Surgery:
    return SURGERIES[request.param]


def made(
    cls: type[Optimizer], rows: int = 10, *, sparse: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[nn.Embedding, Optimizer]:
    module = nn.Embedding(rows, 4, sparse=sparse, dtype=dtype)
    return module, cls(module)


def train(module: nn.Embedding, optimizer: Optimizer, ids: Tensor = IDS) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = module(ids).square().sum()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


@pytest.mark.parametrize(("sparse", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_the_usual_loop_that_still_holds_its_loss(cls: Any, sparse: bool, dtype: torch.dtype) -> None:
    module, optimizer = made(cls, sparse=sparse, dtype=dtype)
    losses = [train(module, optimizer)]
    for rows in (13, 16, 4, 1, 5):
        if rows > len(module.weight):
            optimizer.grow(module.weight, rows - len(module.weight))
        else:
            optimizer.keep_rows(module.weight, torch.arange(rows))
        ids = torch.arange(rows).repeat(2)
        losses.append(train(module, optimizer, ids))
        grad = module.weight.grad
        assert grad is not None
        assert grad.shape == (rows, 4)
        assert grad.dtype == dtype
        assert grad.to_dense().ne(0).all()


def test_a_backward_pass_that_comes_too_late(cls: Any, surgery: Surgery) -> None:
    """Of the table, of a second module that shares it, and of a graph that is used again."""
    module, optimizer = made(cls)
    bag = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    bag.weight = module.weight
    train(module, optimizer)
    losses = [module(IDS).square().sum(), bag(IDS[None]).sum(), module(IDS).sum()]
    losses[2].backward(retain_graph=True)
    surgery(optimizer, module.weight)
    for loss in losses:
        with pytest.raises(RuntimeError, match=TOO_LATE):
            loss.backward()
    assert module.weight.grad is None
    train(module, optimizer)
    assert module.weight.grad is not None


def test_a_table_that_a_graph_has_saved(cls: Any) -> None:
    """The gradient of the input needs the rows as they were."""
    module, optimizer = made(cls)
    hidden = torch.randn(2, 4, requires_grad=True)
    scores = functional.linear(hidden, module.weight)
    optimizer.permute_rows(module.weight, torch.arange(9, -1, -1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(scores.sum(), hidden)


def test_every_graph_of_several_surgeries(cls: Any) -> None:
    """Each of the old graphs raises, whichever is tried first; a later surgery does not make an older one good."""
    module, optimizer = made(cls)
    losses = []
    for _ in range(4):
        losses.append(module(IDS).sum())
        optimizer.permute_rows(module.weight, torch.arange(9, -1, -1))
    for loss in (losses[2], losses[0], losses[3], losses[1]):
        with pytest.raises(RuntimeError, match=TOO_LATE):
            loss.backward()
    train(module, optimizer)


def test_activations_that_would_be_computed_again(cls: Any, surgery: Surgery) -> None:
    module, optimizer = made(cls)
    loss = checkpoint(module, IDS, use_reentrant=False).sum()
    surgery(optimizer, module.weight)
    with pytest.raises(RuntimeError, match=TOO_LATE):
        loss.backward()


def test_rows_that_are_reset_have_not_moved(cls: Any) -> None:
    module, optimizer = made(cls)
    loss = train(module, optimizer)
    loss = module(IDS).square().sum()
    optimizer.reset_rows(module.weight, torch.tensor([1, 3]))
    loss.backward()
    optimizer.step()
    assert module.weight.grad is not None


def test_hooks_on_the_parameter_stay(cls: Any, surgery: Surgery) -> None:
    module, optimizer = made(cls)
    calls: list[str] = []
    weight: Any = module.weight
    weight.register_hook(lambda grad: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    loss = train(module, optimizer)
    surgery(optimizer, module.weight)
    calls.clear()
    train(module, optimizer)
    assert calls == ["gradient", "accumulated"]
    del loss


def test_nothing_is_kept_alive(cls: Any, surgery: Surgery) -> None:
    module, optimizer = made(cls)
    loss = train(module, optimizer)
    surgery(optimizer, module.weight)
    gone = weakref.ref(module.weight)
    del module, optimizer, loss
    gc.collect()
    assert gone() is None


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def is_reduced(wrapped: nn.Module) -> bool:
    """Train once; whether the gradient went through DDP."""
    with count_traffic() as traffic:
        wrapped(IDS).sum().backward()
    return "gathered" in traffic.collectives


@pytest.mark.usefixtures("group")
def test_ddp_still_reduces_a_permuted_table(cls: Any) -> None:
    module, optimizer = made(cls)
    wrapped = ddp(module)
    loss = wrapped(IDS).sum()
    loss.backward()
    optimizer.step()
    optimizer.permute_rows(module.weight, torch.arange(9, -1, -1))
    assert is_reduced(wrapped)
    optimizer.step()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["grow", "keep"])
def test_ddp_keeps_the_shape_it_was_made_with(cls: Any, name: str) -> None:
    module, optimizer = made(cls)
    wrapped = ddp(module)
    wrapped(IDS).sum().backward()
    optimizer.step()
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match="DistributedDataParallel that was created when it had 10 rows; expected"):
        SURGERIES[name](optimizer, module.weight)
    assert torch.equal(module.weight, before)
    del wrapped
    SURGERIES[name](optimizer, module.weight)
    assert is_reduced(ddp(module))
    optimizer.step()
