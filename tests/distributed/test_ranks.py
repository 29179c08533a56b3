"""The helper that starts ranks says what went wrong on them, and ends them."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from tests.helpers.ranks import RankError, Ranks


def test_a_rank_that_raises_or_dies_is_reported_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    ranks = Ranks()
    try:
        with pytest.raises(RankError, match=r"(?s)rank 0:.*ZeroDivisionError"):
            ranks.run(1, divmod, 0)
        assert ranks.run(1, divmod, 2) == [(0, 0)]  # goes on: rank 0 divided by 2
        with pytest.raises(RankError, match="rank 0 of 1 exited unexpectedly"):
            ranks.run(1, os._exit)
        assert set(multiprocessing.active_children()) == before
    finally:
        ranks.close()
