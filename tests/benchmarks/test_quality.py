"""The suite `quality` runs, and its rankings, splits and comparisons are what they would be by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.command import main
from benchmarks.quality import interactions, planted, tuning
from benchmarks.quality.adagrad import RowwiseAdagrad
from benchmarks.quality.comparison import Difference, Ratio, difference, ratio, student
from benchmarks.quality.interactions import HEADINGS, DataError, Interactions
from benchmarks.quality.ranking import HIT_RATE, TAIL_HIT_RATE, figures_of, rank
from benchmarks.quality.rules import ADAGRAD, ADAM, RULES, Rule
from benchmarks.quality.sizes import QUICK
from benchmarks.quality.tuning import Figure, Outcome
from tests.helpers.made_up_wheel import write_wheel
from tests.helpers.pictures import is_png


def test_quality_bench_writes_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # no kernel is compiled for each of the rules
    tiny = planted.Problem(rows=50, dim=4, batch=16, steps=5)
    monkeypatch.setattr(quality, "QUICK", dataclasses.replace(QUICK, problem=tiny))
    monkeypatch.setattr(planted, "HELD_OUT", 100)
    wheel = write_wheel(tmp_path / "made_up.whl")
    assert main(["quality", "--quick", "--data", str(wheel), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "NDCG@10" in shown
    assert "error of the tail" in shown
    assert is_png(tmp_path / "quality.png")

    document = json.loads((tmp_path / "quality.json").read_text())
    for part, names in (
        ("movielens", ("ndcg_at_10", "hit_rate_at_10", "ndcg")),
        ("planted", (planted.HEAD, planted.TAIL)),
    ):
        assert [result["rule"] for result in document[part]] == [rule.name for rule in RULES]
        for result in document[part]:
            for name in names:
                figure = result[name]
                assert len(figure["all"]) == document["seeds"] == 2
                assert 0 <= figure["min"] <= figure["mean"]
                assert result[f"{name}_over_sparse_adam"]["mean"] > 0
    assert document["bars"] == []


def test_quality_bench_says_what_is_wrong_with_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["quality", "--quick", "--only", "movielens", "--data", str(tmp_path / "none.whl"), "--out", str(tmp_path)]
    assert main(line) == 1
    assert "expected the wheel of recbole" in capsys.readouterr().err
    with pytest.raises(DataError, match="the columns are"):
        list(interactions.parse(["user\titem", "1\t2"]))


def test_quality_bench_takes_no_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "--threads", "2", "--out", str(tmp_path)]) == 2
    assert "quality trains on one thread" in capsys.readouterr().err


def test_ranking_is_as_by_hand() -> None:
    scores = torch.arange(12.0).repeat(4, 1)  # the best item is 11, then 10, ...
    met = torch.tensor([[0, 11], [0, 10], [1, 3]])
    # User 0 has met the two best, so item 9 comes first; 8 comes fourth, 2 tenth, and 1 eleventh for the others.
    found = rank(scores, torch.tensor([[0, 9], [1, 8], [2, 2], [3, 1]]), met)
    assert found.hit_rate == 3 / 4
    assert found.ndcg == pytest.approx((1 + 1 / math.log2(5) + 1 / math.log2(11)) / 4)
    assert found.full_ndcg == pytest.approx(found.ndcg + 1 / math.log2(12) / 4)


def test_equal_scores_rank_nothing() -> None:
    assert rank(torch.zeros(1, 12), torch.tensor([[0, 4]]), torch.empty(0, 2, dtype=torch.int64)).hit_rate == 0


def test_the_last_interaction_is_for_testing_and_the_one_before_for_validation() -> None:
    text = ["\t".join(HEADINGS), "a\tx\t5\t3", "a\ty\t1\t1", "b\tx\t2\t9", "a\tz\t4\t2", "b\tz\t4\t8", "a\tw\t4\t3"]
    data = interactions.split(interactions.parse(text))
    assert (data.users, data.items) == (2, 4)
    # Items are numbered as they come: x, y, z, w. Of those of one time, the later in the file is the last.
    assert data.train.tolist() == [[0, 1], [0, 2], [1, 2], [1, 0]]
    assert data.validation.tolist() == [[0, 0]]
    assert data.test.tolist() == [[0, 3]]


def test_the_head_are_the_popular_items_that_make_up_half_of_the_training_part() -> None:
    def is_head(*counts: int) -> list[bool]:
        items = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        train = torch.stack([torch.zeros_like(items), items], dim=1)
        nothing = torch.empty(0, 2, dtype=torch.int64)
        return Interactions(1, len(counts), train, nothing, nothing).is_head.tolist()

    assert is_head(1, 5, 3, 1) == [False, True, False, False]  # 5 of 10
    assert is_head(1, 5, 4, 1) == [False, True, True, False]  # 5 of 11 is less than half
    assert is_head(2, 2, 0) == [True, False, False]  # of equals, the first


def test_figures_of_the_tail_are_those_of_users_whose_item_is_rare() -> None:
    train = torch.tensor([[0, 11], [1, 11], [2, 11], [0, 10], [1, 9]])  # item 11 is the head
    wanted = torch.tensor([[0, 9], [2, 10], [3, 11]])
    found = figures_of(torch.arange(12.0).repeat(4, 1), Interactions(4, 12, train, wanted[:0], wanted))
    # Each comes first in its list, since what is better has been met. With the scores turned round, all come last:
    assert found[TAIL_HIT_RATE] == found[HIT_RATE] == 1
    found = figures_of(-torch.arange(12.0).repeat(4, 1), Interactions(4, 12, train, wanted[:0], wanted))
    assert found[HIT_RATE] == 1 / 3  # only the list of user 0 has no more than ten places
    assert found[TAIL_HIT_RATE] == 1 / 2


def test_the_best_rate_on_validation_is_taken_and_other_seeds_are_reported() -> None:
    asked: list[tuple[float, int]] = []

    def trial(_rule: Rule, rate: float, seed: int) -> Outcome:
        asked.append((rate, seed))
        figures: Mapping[str, float] = {"figure": seed + rate}
        return Outcome({0.1: 1.0, 0.2: 2.0, 0.4: math.nan}[rate], figures, 8.0)

    (found,) = tuning.results([ADAM], trial, (0.1, 0.2, 0.4), tuning_seeds=2, seeds=3)
    assert (found.rate, found.is_at_edge) == (0.2, False)
    assert found.figures["figure"].values == (0.2, 1.2, 2.2)
    assert found.figures["figure"].deviation == pytest.approx(1)
    assert not {seed for _, seed in asked[:6]} & {seed for _, seed in asked[6:]}


def test_ratio_is_of_the_means_and_its_interval_of_pairs() -> None:
    doubled = ratio(Figure((2.0, 4.0, 12.0)), Figure((1.0, 2.0, 6.0)))
    assert (doubled.mean, doubled.low, doubled.high) == pytest.approx((2, 2, 2))
    assert [Ratio(1, low, high).within_one_percent for low, high in ((0.99, 1.1), (0.9, 0.98), (0.98, 1))] == [
        "yes",
        "no",
        "open",
    ]


def test_difference_is_of_pairs_and_its_interval_of_students_t() -> None:
    found = difference(Figure((1.0, 4.0, 8.0)), Figure((1.0, 2.0, 4.0)))  # 0, 2 and 4: deviation 2
    around = 4.3027 * 2 / math.sqrt(3)
    assert (found.mean, found.low, found.high, found.largest) == pytest.approx((2, 2 - around, 2 + around, 4), rel=1e-4)
    assert found.over(2).high == pytest.approx(found.high / 2)
    verdicts = [Difference(0, low, high, 0).verdict for low, high in ((1, 2), (-2, -1), (-1, 1))]
    assert verdicts == ["higher", "lower", "no difference seen"]


def test_students_t_is_that_of_the_tables() -> None:
    assert [student(freedom) for freedom in (1, 2, 9, 30)] == pytest.approx([12.706, 4.3027, 2.2622, 2.0423], rel=1e-4)


def test_the_head_makes_up_half_of_the_draws() -> None:
    # 1, 1/2, 1/3, ... add up to 2.93 over ten rows; the first row makes up a third of that, the first two half.
    assert planted.Problem(rows=10, dim=1, batch=1, steps=1).head == 2


def test_planted_vectors_are_found() -> None:
    problem = planted.Problem(rows=50, dim=4, batch=64, steps=200)
    for rule in (ADAM, ADAGRAD):
        found = planted.learn(problem, rule, 0.1, seed=0).figures
        assert found[planted.HEAD] < found[planted.TAIL] < 0.3


def test_rowwise_adagrad_is_as_by_hand() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True, _weight=torch.zeros(3, 2))
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.5, eps=0.0)
    for gradient in ([1.0, 7.0], [3.0, 1.0]):
        table.zero_grad()
        (table(torch.tensor([1])) * torch.tensor([gradient])).sum().backward()
        optimizer.step()
    # Mean squares: 25, then 25 + 5.
    expected = [-0.5 * (1 / 5 + 3 / math.sqrt(30)), -0.5 * (7 / 5 + 1 / math.sqrt(30))]
    assert table.weight.tolist() == [[0, 0], pytest.approx(expected), [0, 0]]
