"""The tables of a collection as modules of a model: looked up together, once announced; errors on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from rowstep.distributed import PeerError, ddp
from rowstep.distributed import ShardedEmbeddingCollection as Collection
from rowstep.distributed._traffic import count_traffic
from tests.helpers.ranks import Ranks

DTYPE = torch.float64


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Any = nn.EmbeddingBag(41, 5, mode="sum", dtype=DTYPE)
        self.shop: Any = nn.Embedding(7, 5, padding_idx=0, dtype=DTYPE)


class Model(nn.Module):
    """As people write it: dense gradients by default, a table used twice, one whose weight a layer shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user: Any = nn.Embedding(103, 5, dtype=DTYPE)
        self.item = Item()
        self.friend: Any = self.user
        self.words = nn.Embedding(13, 5, dtype=DTYPE)
        self.head = nn.Linear(5, 13, bias=False, dtype=DTYPE)
        self.head.weight = self.words.weight

    def forward(self, users: Tensor, tags: Tensor, offsets: Tensor, shops: Tensor) -> Tensor:
        read = self.user(users) + self.item.tags(tags, offsets) + self.item.shop(shops)
        loss: Tensor = (self.head(read) + self.head(self.words(users % 13))).sin().sum()
        return loss


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)

    def draw(rows: int, count: int) -> Tensor:
        return torch.randint(rows, (count,), generator=generator)

    return draw(103, 4), draw(41, 8), torch.arange(0, 8, 2), draw(7, 4)


def sharded(model: Model, plan: dict[str, str] | None = None) -> Collection:
    """Put the tables of a collection in the place of the model's own."""
    collection = Collection({"user": model.user, "tags": model.item.tags, "shop": model.item.shop}, plan=plan)
    model.user = model.friend = collection["user"]
    model.item.tags, model.item.shop = collection["tags"], collection["shop"]
    return collection


def train(rank: int, ahead: bool) -> dict[str, Tensor]:
    model = Model()
    collection = sharded(model, plan={"tags": "divided"})
    assert "table 'shop': 7 x 5, torch.float64, everywhere" in str(collection)
    wrapped: Any = ddp(model)
    optimizer = rowstep.DeferredAdamW(model, lr=0.01)
    for step in range(8):
        ids = batch(step, rank)
        optimizer.zero_grad()
        announced: Any = {"user": ids[0], "tags": (ids[1], ids[2]), "shop": ids[3]}
        with count_traffic() as traffic, collection.ahead(announced) if ahead else contextlib.nullcontext():
            loss = wrapped(*ids)
        assert not ahead or traffic.collectives == {"headers": 1, "ids": 1, "votes": 1, "rows": 1}
        loss.backward()
        optimizer.step()
    model.eval()
    names = {"user": "user", "tags": "item.tags", "shop": "item.shop"}
    whole = {names[name]: collection[name].full_weight() for name in collection}
    return whole | {"words": model.words.weight.detach()}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_trains_as_in_one_process(ranks: Ranks, ahead: bool) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        for rank in range(2):
            torch.autograd.backward(model(*batch(step, rank)) / 2)
        optimizer.step()
    for found in ranks.run(2, train, ahead):
        for name, weight in found.items():
            torch.testing.assert_close(weight, model.get_parameter(f"{name}.weight").detach(), rtol=0, atol=1e-12)


def test_what_was_announced_can_be_looked_up_once_inside_the_block() -> None:
    model = Model()
    collection = sharded(model)
    ids = torch.tensor([1, 2])
    with collection.ahead({"user": ids, "tags": ids.view(1, 2)}):
        assert torch.equal(model.user(ids.clone()), collection["user"].full_weight()[ids])
        with pytest.raises(ValueError, match="table 'user' was called with other ids than were announced"):
            model.user(ids)
        with pytest.raises(ValueError, match=r"table 'tags' was called with other ids"):
            model.item.tags(ids.view(2, 1))
        model.item.tags(ids.view(1, 2))
        model.item.shop(ids)  # nothing was announced for it
    assert torch.equal(model.user(ids), collection["user"].full_weight()[ids])
    with collection.ahead({"user": ids}):
        ids += 1
        with pytest.raises(ValueError, match="other ids than were announced"):
            model.user(ids)
    with pytest.raises(KeyError, match="no table is called 'usr'"), collection.ahead({"usr": ids}):
        pass
    model.user(ids)


def call_wrongly(rank: int) -> None:
    torch.manual_seed(0)
    tables = Collection({"user": nn.Embedding(11, 4), "tags": nn.EmbeddingBag(11, 3)})
    good = {"user": torch.arange(3)}
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"usr": torch.arange(3)}, KeyError, "no table is called 'usr'; there are 'user', 'tags'"),
        ({"user": torch.tensor([11])}, IndexError, "table 'user': id 11 is outside the table"),
        ({"tags": torch.arange(3)}, ValueError, "offsets"),
        ({"user": (torch.arange(3), torch.arange(3))}, TypeError, "table 'user'"),
        ([1, 2], TypeError, "the ids are a list; expected a dict"),
    ]
    for given, kind, text in wrong:
        with pytest.raises(kind if rank == 1 else PeerError, match=text):
            tables(given if rank == 1 else good)
        assert tables(good)["user"].shape == (3, 4)


def test_what_is_wrong_on_one_rank_is_heard_on_all(ranks: Ranks) -> None:
    ranks.run(2, call_wrongly)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Collection({}), "there are no tables"),
        (lambda: Collection({"user": (3, 2)}, plan={"item": "divided"}), "plan names 'item'; expected"),
        (lambda: Collection({"user": (3, 2)}, gradient="max"), "Invalid gradient value: 'max'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_built_is_refused(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
    for name in ("a.b", "type"):
        with pytest.raises(KeyError, match=name):  # torch's own words
            Collection({name: (3, 2)})
    with pytest.raises(TypeError, match=r"table 'user' is a Linear; expected an nn\.Embedding"):
        Collection({"user": nn.Linear(2, 2)})  # type: ignore[dict-item]
