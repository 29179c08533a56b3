"""A task that is learned in a hundred steps, and pairs of optimizers that must learn it alike: ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowstep import DeferredAdam, DeferredAdamW, SparseAdam

USERS, ITEMS, RATE = 30, 20, 0.1

Batch = tuple[Tensor, Tensor, Tensor]
Make = Callable[[nn.Module], Optimizer]


class Taste(nn.Module):
    """How much a user likes an item: two tables and a layer."""

    def __init__(self, *, sparse: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = nn.Embedding(USERS, 4, sparse=sparse, dtype=dtype)
        self.items = nn.Embedding(ITEMS, 4, sparse=sparse, dtype=dtype)
        self.layer = nn.Linear(4, 1, dtype=dtype)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        liking: Tensor = self.layer(self.users(users) * self.items(items)).squeeze(-1)
        return liking

    def loss(self, users: Tensor, items: Tensor, liking: Tensor) -> Any:
        return (self(users, items) - liking).square().mean()

    @torch.no_grad()
    def error(self) -> float:
        """How far it is from all ratings."""
        self.eval()
        error: float = self.loss(*ratings(self.layer.weight.dtype)).item()
        self.train()
        return error


def ratings(dtype: torch.dtype = torch.float64) -> Batch:
    """Ratings that users with two traits give to items with two traits."""
    random = torch.Generator().manual_seed(2)
    users = torch.randint(USERS, (640,), generator=random)
    items = torch.randint(ITEMS, (640,), generator=random)
    traits = [torch.randn(count, 2, generator=random, dtype=torch.float64) for count in (USERS, ITEMS)]
    return users, items, (traits[0][users] * traits[1][items]).sum(1).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> Iterator[Batch]:
    """Small batches, so that most rows of both tables wait at every step."""
    users, items, liking = ratings(dtype)
    for number in range(count):
        some = slice(16 * number % 640, 16 * number % 640 + 16)
        yield users[some], items[some], liking[some]


class TorchsTwo(Optimizer):
    """What torch has for a model with tables: SparseAdam for them, Adam for the rest. Here as one optimizer."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        tables = [
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        ]
        others = [param for param in model.parameters() if not any(param is table for table in tables)]
        parts = {torch.optim.SparseAdam: tables, torch.optim.Adam: others}
        self.parts: list[Any] = [cls(params, **options) for cls, params in parts.items() if params]
        super().__init__([*tables, *others], self.parts[0].defaults)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups = [group]  # loading a state makes new ones
            part.step()
        return loss


class Rivals(NamedTuple):
    """An optimizer of ours, and the one of torch that it equals; torch's may need dense gradients for that."""

    ours: Make
    theirs: Make
    sparse: bool

    def assert_learn_alike(
        self,
        train: Callable[[Taste, Make], None],
        *,
        tolerance: float | None = 1e-9,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Train a model with each. Both must end better by a quarter, and the same, unless ``tolerance`` is None."""
        trained: list[Taste] = []
        for make, sparse in ((self.ours, True), (self.theirs, self.sparse)):
            model = Taste(sparse=sparse, dtype=dtype)
            before = model.error()
            train(model, make)
            assert model.error() < 0.75 * before
            trained.append(model)
        if tolerance is None:
            return
        for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def rivals(rate: float) -> dict[str, Rivals]:
    """What our optimizers equal, at this learning rate."""
    decay: dict[str, Any] = {"lr": rate, "weight_decay": 0.1}
    return {
        "SparseAdam": Rivals(
            lambda model: SparseAdam(model.parameters(), lr=rate), lambda model: TorchsTwo(model, lr=rate), sparse=True
        ),
        "DeferredAdam": Rivals(
            lambda model: DeferredAdam(model, lr=rate),
            lambda model: torch.optim.Adam(model.parameters(), lr=rate),
            sparse=False,
        ),
        "DeferredAdamW": Rivals(
            lambda model: DeferredAdamW(model, **decay),
            lambda model: torch.optim.AdamW(model.parameters(), **decay),
            sparse=False,
        ),
    }


RIVALS = rivals(RATE)
