"""The examples run and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_digits_are_learned_with_and_without_force_sparse() -> None:
    accuracies = runpy.run_path(str(EXAMPLES / "digits.py"))["main"](epochs=4)
    assert accuracies.keys() == {False, True}
    assert min(accuracies.values()) > 0.9


def test_ratings_are_learned_with_numpy_alone() -> None:
    losses = runpy.run_path(str(EXAMPLES / "numpy_only.py"))["main"](epochs=8)
    assert len(losses) == 9
    assert losses[-1] < losses[0] / 10
