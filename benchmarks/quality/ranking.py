"""How high the one right item comes in a user's list of all items that the user has not met."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = 10


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
