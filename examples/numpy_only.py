"""Matrix factorisation with NumPy alone, no framework: predict how a user would rate an item from other ratings.

    python examples/numpy_only.py

A batch names few users and items, so their tables step by rows. The mean rating steps as a whole. All three steps are
one iteration and share its bias correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowstep.arrays import Adam

USERS, ITEMS, TASTES, BATCH = 2_000, 500, 4, 1_000

Array = NDArray[Any]


def planted_ratings(random: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
    """Users, items and ratings: each user likes each of a few tastes, of which each item has more or less."""
    likes, has = random.standard_normal((USERS, TASTES)), random.standard_normal((ITEMS, TASTES))
    user, item = random.integers(USERS, size=count), random.integers(ITEMS, size=count)
    return user, item, 3 + (likes[user] * has[item]).sum(axis=1) / TASTES**0.5


def main(epochs: int = 20) -> list[float]:
    """Train; return the mean squared error on unseen ratings, before and after each epoch."""
    random = np.random.default_rng(0)
    ratings = planted_ratings(random, 60_000)
    unseen = [column[50_000:] for column in ratings]
    users = random.normal(0, 0.3, (USERS, TASTES)).astype(np.float32)
    items = random.normal(0, 0.3, (ITEMS, TASTES)).astype(np.float32)
    mean = np.zeros(1, np.float32)
    optimizer = Adam(lr=0.03)

    def errors(user: Array, item: Array, rating: Array) -> Array:
        return np.asarray(mean + (users[user] * items[item]).sum(axis=1) - rating)

    losses = [float((errors(*unseen) ** 2).mean())]
    print(f"before:   {losses[0]:.3f}")
    for epoch in range(1, epochs + 1):
        for batch in np.split(random.permutation(50_000), 50_000 // BATCH):
            user, item, rating = (column[batch] for column in ratings)
            slope = errors(user, item, rating)[:, None] / BATCH
            user_gradient, item_gradient = slope * items[item], slope * users[user]
            optimizer.step_rows("users", users, user, user_gradient)
            optimizer.step_rows("items", items, item, item_gradient)
            optimizer.step("mean", mean, slope.sum(axis=0))
            optimizer.end_iteration()
        losses.append(float((errors(*unseen) ** 2).mean()))
        print(f"epoch {epoch:2}: {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
