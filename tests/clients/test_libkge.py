"""LibKGE's way with knowledge graphs: https://github.com/uma-pi1/kge, its LookupEmbedder with ``normalize.p: 2``.

After every batch a hook replaces ``weight.data`` by its normalised rows: new memory under the same parameter, written
without autograd or the optimizer seeing it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Seen, assert_same_as_adam, assert_same_run

ENTITIES, RELATIONS, WIDTH, NEGATIVES = 200, 4, 8, 6


class TransE(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, WIDTH, sparse=sparse, dtype=torch.float64)
        self.relations = nn.Embedding(RELATIONS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.normalise()

    def normalise(self) -> None:
        with torch.no_grad():
            self.entities.weight.data = functional.normalize(self.entities.weight.data, p=2, dim=-1)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        return -(self.entities(head) + self.relations(relation) - self.entities(tail)).norm(dim=-1)


def triples() -> list[Tensor]:
    """In this world a relation r leads from entity e to e + r + 1. A batch has few of the entities."""
    head = torch.randint(ENTITIES, (35, 24), generator=torch.Generator().manual_seed(1))
    relation = head % RELATIONS
    return list(torch.stack([head, relation, (head + relation + 1) % ENTITIES], 2))


def train(make: Any, sparse: bool, seen: Seen) -> None:
    model = TransE(sparse)
    optimizer = make(model.parameters(), lr=0.05)
    for batch in triples():
        head, relation, tail = batch.T
        wrong = torch.randint(ENTITIES, (len(batch), NEGATIVES))
        optimizer.zero_grad()
        scores = torch.cat([model(head, relation, tail)[:, None], model(head[:, None], relation[:, None], wrong)], 1)
        loss = functional.cross_entropy(scores, torch.zeros(len(batch), dtype=torch.long))
        loss.backward()
        optimizer.step()
        model.normalise()
        seen.after_step(loss.detach(), model, optimizer)


def test_sparse_adam() -> None:
    assert_same_run("LibKGE, SparseAdam", train, torch.optim.SparseAdam, SparseAdam)


def test_deferred_adam() -> None:
    assert_same_as_adam("LibKGE, DeferredAdam", train, DeferredAdam)
