"""The examples run and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_are_learned_with_and_without_force_sparse() -> None:
    accuracies = runpy.run_path(str(EXAMPLES / "digits.py"))["main"](epochs=4)
    assert accuracies.keys() == {False, True}
    assert min(accuracies.values()) > 0.9


def test_ratings_are_learned_with_numpy_alone() -> None:
    losses = runpy.run_path(str(EXAMPLES / "numpy_only.py"))["main"](epochs=8)
    assert len(losses) == 9
    assert losses[-1] < losses[0] / 10


def test_a_recommender_finds_the_next_pick() -> None:
    before, after = runpy.run_path(str(EXAMPLES / "recommender.py"))["main"](users=1000, items=500, epochs=3)
    assert before < 0.05
    assert after > 0.35


def test_a_sharded_model_learns_ratings_in_a_single_process() -> None:
    loss, _ = runpy.run_path(str(EXAMPLES / "sharded.py"))["main"]()
    assert loss < 0.25  # guessing the mean gives 0.40


def test_word_vectors_tell_true_contexts_from_drawn_ones() -> None:
    before, after = runpy.run_path(str(EXAMPLES / "word2vec.py"))["main"](epochs=3)
    assert before < 0.55
    assert after > 0.65
