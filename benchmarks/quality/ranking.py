"""How high the one right item comes in a user's list of all items that the user has not met.

NDCG is the mean of 1 / log2(1 + place) of the right items. Of the first ten places an item beyond them counts 0; of the
whole list every user counts, so chance moves it less. The hit rate is how many right items are among the first ten.
Items of the tail, outside the most popular ones that make up half of the data, are also looked at apart: their rows are
the rare ones, and few of them get into a list of ten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.quality.interactions import Interactions

LENGTH = 10

NDCG, HIT_RATE, FULL_NDCG = "ndcg_at_10", "hit_rate_at_10", "ndcg"
TAIL_NDCG, TAIL_HIT_RATE, TAIL_FULL_NDCG = (f"tail_{name}" for name in (NDCG, HIT_RATE, FULL_NDCG))
METRICS = {
    NDCG: "NDCG@10",
    HIT_RATE: "HR@10",
    FULL_NDCG: "NDCG",
    TAIL_NDCG: "tail: NDCG@10",
    TAIL_HIT_RATE: "tail: HR@10",
    TAIL_FULL_NDCG: "tail: NDCG",
}


def rank(scores: Tensor, wanted: Tensor, met: Tensor) -> dict[str, float]:
    """``scores`` of all users and items; ``wanted`` and ``met`` are pairs of a user and an item.

    Every user has at most one wanted item. Of items with the same score, those that are not wanted come first, so that
    a model which gives all items the same score gets nothing.
    """
    users, items = wanted.unbind(1)
    scores = scores.clone()
    right = scores[users, items].unsqueeze(1)
    scores[met[:, 0], met[:, 1]] = -torch.inf
    scores[users, items] = -torch.inf
    places = 1 + (scores[users] >= right).sum(1)
    is_hit, gains = places <= LENGTH, 1 / torch.log2(1 + places)
    found = {NDCG: is_hit * gains, HIT_RATE: is_hit, FULL_NDCG: gains}
    return {name: figure.mean(dtype=torch.float64).item() for name, figure in found.items()}


def figures_of(scores: Tensor, data: Interactions) -> dict[str, float]:
    """Of all users, and of those whose item is one of the tail."""
    met = torch.cat([data.train, data.validation])
    tail = rank(scores, data.test[~data.is_head[data.test[:, 1]]], met)
    return rank(scores, data.test, met) | {f"tail_{name}": figure for name, figure in tail.items()}
