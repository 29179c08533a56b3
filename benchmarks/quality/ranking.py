"""How high the one right item comes in a user's list of all items that the user has not met.

Items of the tail, outside the most popular ones that make up half of the data, are also looked at apart: their rows are
the rare ones, and few of them get into a list of ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.interactions import Interactions

LENGTH = 10

NDCG, HIT_RATE, FULL_NDCG = "ndcg_at_10", "hit_rate_at_10", "ndcg"
TAIL_NDCG, TAIL_HIT_RATE, TAIL_FULL_NDCG = (f"tail_{name}" for name in (NDCG, HIT_RATE, FULL_NDCG))


@dataclass(frozen=True)
class Ranking:
    ndcg: float
    """Mean of 1 / log2(1 + place) of the right items within the first ten; an item beyond them counts 0."""
    hit_rate: float
    """How many of the right items are among the first ten."""
    full_ndcg: float
    """The same without an end of the list. Every user counts, so chance moves it less than the other two."""


def rank(scores: Tensor, wanted: Tensor, met: Tensor) -> Ranking:
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
    return Ranking(*(figure.mean(dtype=torch.float64).item() for figure in (is_hit * gains, is_hit, gains)))


def validation_score(scores: Tensor, data: Interactions) -> float:
    """What chooses learning rates."""
    return rank(scores, data.validation, data.train).full_ndcg


def figures_of(scores: Tensor, data: Interactions) -> dict[str, float]:
    """Of all users, and of those whose item is one of the tail."""
    met = torch.cat([data.train, data.validation])
    whole = rank(scores, data.test, met)
    tail = rank(scores, data.test[~data.is_head[data.test[:, 1]]], met)
    return {
        NDCG: whole.ndcg,
        HIT_RATE: whole.hit_rate,
        FULL_NDCG: whole.full_ndcg,
        TAIL_NDCG: tail.ndcg,
        TAIL_HIT_RATE: tail.hit_rate,
        TAIL_FULL_NDCG: tail.full_ndcg,
    }
