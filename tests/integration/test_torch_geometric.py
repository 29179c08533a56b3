"""PyTorch Geometric: its models with sparse=True, in the loops of its own examples."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import MetaPath2Vec, TransE

from tests.helpers.ratings import rivals

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 0.02

RIVALS = {name: each for name, each in rivals(RATE).items() if name != "DeferredAdamW"}


def assert_learn_alike(
    name: str,
    build: Callable[[bool], Any],
    batches: Callable[[Any], Any],
    metric: Callable[[Any], float],
    epochs: int,
    gain: float,
) -> None:
    """Train the model that ``build(sparse)`` makes with both optimizers: both end better, and the same."""
    ours, theirs, theirs_sparse = RIVALS[name]
    trained = []
    for make, sparse in ((ours, True), (theirs, theirs_sparse)):
        torch.manual_seed(0)
        model = build(sparse).double()
        optimizer = make(model)
        before = metric(model)
        for _ in range(epochs):
            model.train()
            for batch in batches(model):
                optimizer.zero_grad()
                model.loss(*batch).backward()
                optimizer.step()
        assert metric(model) > before + gain
        trained.append(model)
    for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


CLUB = KarateClub()[0]


def faction_of(model: Any, embeddings: Callable[[], Tensor]) -> float:
    """How often a linear classifier tells a member's faction from the embedding."""
    model.eval()
    with torch.no_grad():
        z = embeddings()
    order = torch.randperm(34, generator=torch.Generator().manual_seed(0))
    seen, unseen = order[:17], order[17:]
    return float(model.test(z[seen], CLUB.y[seen], z[unseen], CLUB.y[unseen], max_iter=1000))


@pytest.mark.parametrize("name", RIVALS)
def test_metapath2vec(name: str) -> None:
    # Members and their ties as two kinds of nodes: from a member over a tie to another member.
    member, other = CLUB.edge_index
    tie = torch.arange(len(member))
    edges = {("member", "has", "tie"): torch.stack([member, tie]), ("tie", "with", "member"): torch.stack([tie, other])}
    assert_learn_alike(
        name,
        lambda sparse: MetaPath2Vec(edges, 16, [*edges], walk_length=10, context_size=5, sparse=sparse),
        lambda model: model.loader(batch_size=4, shuffle=True),
        lambda model: faction_of(model, lambda: model("member")),
        epochs=20,
        gain=0.2,
    )


@pytest.mark.parametrize("name", RIVALS)
def test_transe(name: str) -> None:
    # The fields of a board, and the one to the right of, above and diagonal from each.
    side = 8
    field = torch.arange(side * side).view(side, side)
    pairs = [(field[:, :-1], field[:, 1:]), (field[:-1], field[1:]), (field[:-1, :-1], field[1:, 1:])]
    head, tail = (torch.cat([pair[end].flatten() for pair in pairs]) for end in (0, 1))
    relation = torch.cat([torch.full((pair[0].numel(),), kind) for kind, pair in enumerate(pairs)])

    def hits(model: Any) -> float:
        model.eval()
        return float(model.test(head, relation, tail, batch_size=100, k=10, log=False)[2])

    assert_learn_alike(
        name,
        lambda sparse: TransE(side * side, 3, 16, sparse=sparse),
        lambda model: model.loader(head, relation, tail, batch_size=16, shuffle=True),
        hits,
        epochs=20,
        gain=0.2,
    )


def test_the_example() -> None:
    before, after = runpy.run_path(str(EXAMPLES / "graph.py"))["main"](epochs=30)
    assert after > before + 0.3
