"""The suites `quality` and `lazy` run, and their rankings, searches and comparisons are what they would be by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.command import main
from benchmarks.quality import interactions, planted, rules, tuning
from benchmarks.quality.comparison import difference, ratio
from benchmarks.quality.interactions import HEADINGS, MEMBER, Interactions
from benchmarks.quality.lazy import RATES, findings, rounding
from benchmarks.quality.lazy.findings import QUICK, Finding, rarity
from benchmarks.quality.models import STEP, TRAINING, Shape, batches_of, train
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, METRICS, NDCG, TAIL_HIT_RATE, figures_of, rank
from benchmarks.quality.rules import ADAGRAD, ADAM, BESIDE_ADAM, CONTROLS, DEFERRED, SPARSE, Rule, Settings
from benchmarks.quality.tuning import FIRST_TUNING_SEED, Figure, Outcome, Search, Tuned, outward

DOCS = Path(__file__).parents[2] / "docs"
SMALL = Shape(dim=8, batch=16, epochs=8)


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is compiled for each of the rules."""
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


def two_tastes() -> Interactions:
    """Twenty users like the first six of twelve items, twenty like the others; each has met four of the six."""
    pairs = torch.tensor(
        [(user, 6 * (user % 2) + (user // 2 + at) % 6) for user in range(40) for at in range(6)], dtype=torch.int64
    ).reshape(40, 6, 2)
    return Interactions(40, 12, pairs[:, :4].reshape(-1, 2), pairs[:, 4], pairs[:, 5])


def write_wheel(path: Path, users: int = 12, items: int = 30) -> Path:
    """User n has met every second item from n on."""
    rows = [
        f"u{user}\ti{(user + 2 * at) % items}\t3\t{880_000_000 + at}"
        for user in range(users)
        for at in range(items // 3)
    ]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER, "\n".join(["\t".join(HEADINGS), *rows]) + "\n")
    return path


def test_quality_bench_writes_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = planted.Problem(rows=50, dim=4, batch=16, steps=5)
    monkeypatch.setattr(quality, "QUICK", dataclasses.replace(quality.QUICK, problem=tiny))
    monkeypatch.setattr(planted, "HELD_OUT", 100)
    wheel = write_wheel(tmp_path / "made_up.whl")
    assert main(["quality", "--quick", "--data", str(wheel), "--out", str(tmp_path)]) == 0
    assert "error of the tail" in capsys.readouterr().out
    document = json.loads((tmp_path / "quality.json").read_text())
    for part, names in (("movielens", METRICS), ("planted", (planted.HEAD, planted.TAIL))):
        assert [entry["name"] for entry in document[part]] == [rule.name for rule in rules.BY_STATE]
        for entry in document[part]:
            for name in names:
                assert len(entry["figures"][name]["all"]) == document["seeds"] == 2
                assert entry["over_sparse_adam"][name]["mean"] > 0


def test_lazy_bench_writes_all_figures_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = QUICK[::2]  # one of each title
    monkeypatch.setattr(findings, "QUICK", problems)
    wheel = write_wheel(tmp_path / "made_up.whl")
    assert main(["lazy", "--quick", "--data", str(wheel), "--out", str(tmp_path)]) == 0
    assert "fused" in capsys.readouterr().out
    document = json.loads((tmp_path / "lazy.json").read_text())
    assert [found["problem"] for found in document["problems"]] == [problem.name for problem in problems]
    for found in document["problems"]:
        assert [entry["name"] for entry in found["entries"]] == [rule.name for rule in (*BESIDE_ADAM, *CONTROLS)]
        for entry in found["entries"]:
            for name in (*METRICS, STEP, TRAINING):
                assert len(entry["figures"][name]["all"]) == document["seeds"] == 2
        finding = Finding.from_json(found)
        assert {finding.apart("DeferredAdam and dense Adam, float64", metric) for metric in METRICS} == {0.0}
        assert json.loads(json.dumps(finding.as_json())) == found

    grids = dict(findings.grids([Finding.from_json(found) for found in document["problems"]]))
    assert grids.keys() >= {"ndcg", "tail", "twins", "cost", "rarity", "rates", *(problem.name for problem in problems)}
    adam = document["problems"][0]["entries"][0]["figures"][NDCG]["mean"]
    assert grids["ndcg"].lines[0][0] == ADAM.name
    assert grids["ndcg"].lines[0][1].startswith(f"{adam:.4f} ±")


def test_ranking_is_as_by_hand() -> None:
    scores = torch.arange(12.0).repeat(4, 1)  # the best item is 11, then 10, ...
    met = torch.tensor([[0, 11], [0, 10], [1, 3]])
    # User 0 has met the two best, so item 9 comes first; 8 comes fourth, 2 tenth, and 1 eleventh for the others.
    found = rank(scores, torch.tensor([[0, 9], [1, 8], [2, 2], [3, 1]]), met)
    assert found[HIT_RATE] == 3 / 4
    assert found[NDCG] == pytest.approx((1 + 1 / math.log2(5) + 1 / math.log2(11)) / 4)
    assert found[FULL_NDCG] == pytest.approx(found[NDCG] + 1 / math.log2(12) / 4)
    # Equal scores rank nothing.
    assert rank(torch.zeros(1, 12), torch.tensor([[0, 4]]), torch.empty(0, 2, dtype=torch.int64))[HIT_RATE] == 0


def test_the_last_interaction_is_for_testing_and_the_one_before_for_validation() -> None:
    text = ["\t".join(HEADINGS), "a\tx\t5\t3", "a\ty\t1\t1", "b\tx\t2\t9", "a\tz\t4\t2", "b\tz\t4\t8", "a\tw\t4\t3"]
    data = interactions.split(interactions.parse(text))
    assert (data.users, data.items) == (2, 4)
    # Items are numbered as they come: x, y, z, w. Of those of one time, the later in the file is the last.
    assert data.train.tolist() == [[0, 1], [0, 2], [1, 2], [1, 0]]
    assert data.validation.tolist() == [[0, 0]]
    assert data.test.tolist() == [[0, 3]]


def test_the_head_are_the_popular_items_that_make_up_half_of_the_data() -> None:
    def is_head(*counts: int) -> list[bool]:
        items = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        train = torch.stack([torch.zeros_like(items), items], dim=1)
        return Interactions(1, len(counts), train, train[:0], train[:0]).is_head.tolist()

    assert is_head(1, 5, 3, 1) == [False, True, False, False]  # 5 of 10
    assert is_head(1, 5, 4, 1) == [False, True, True, False]  # 5 of 11 is less than half
    assert is_head(2, 2, 0) == [True, False, False]  # of equals, the first
    # Planted: 1, 1/2, 1/3, ... add up to 2.93 over ten rows; the first row makes up a third of that, two of them half.
    assert planted.Problem(rows=10, dim=1, batch=1, steps=1).head == 2


def test_figures_of_the_tail_are_those_of_users_whose_item_is_rare() -> None:
    train = torch.tensor([[0, 11], [1, 11], [2, 11], [0, 10], [1, 9]])  # item 11 is the head
    wanted = torch.tensor([[0, 9], [2, 10], [3, 11]])
    scores, data = torch.arange(12.0).repeat(4, 1), Interactions(4, 12, train, wanted[:0], wanted)
    # Each comes first in its list, since what is better has been met. With the scores turned round, all come last:
    assert figures_of(scores, data)[TAIL_HIT_RATE] == figures_of(scores, data)[HIT_RATE] == 1
    assert figures_of(-scores, data)[HIT_RATE] == 1 / 3  # only the list of user 0 has no more than ten places
    assert figures_of(-scores, data)[TAIL_HIT_RATE] == 1 / 2


def test_search_goes_on_until_the_best_has_a_worse_one_on_both_sides() -> None:
    def peak_at(best: float) -> dict[float, float]:
        return outward(lambda rate: -abs(math.log(rate / best)), RATES, beyond=6)

    assert set(peak_at(0.01)) == set(RATES)
    assert set(peak_at(0.04)) == {*RATES, 0.04, 0.08}
    assert set(peak_at(0.0025)) == {*RATES, 0.0025, 0.00125}
    endless = peak_at(1e9)
    assert len(endless) == len(RATES) + 6
    assert Tuned(Settings(max(endless)), endless, {}).at_edge


def test_rules_are_tuned_on_other_seeds_take_turns_and_share_the_settings_of_their_twin() -> None:
    asked: list[tuple[str, Settings, int]] = []
    decaying = Rule("decaying", torch.optim.AdamW, decays=True)

    def trial(rule: Rule, settings: Settings, seed: int) -> Outcome:
        asked.append((rule.name, settings, seed))
        score = -abs(math.log(settings.rate / 0.02)) - abs(settings.decay - 0.4)
        return Outcome(score if settings.rate < 0.03 else math.nan, {"figure": float(seed)}, 8.0)

    found = tuning.compete((ADAM, DEFERRED, decaying), trial, Search(RATES, beyond=6, seeds=2), seeds=2)
    assert [entry.tuned.settings for entry in found] == [Settings(0.02), Settings(0.02), Settings(0.02, 0.4)]
    assert found[0].figures["figure"].values == (0.0, 1.0)
    reported = [(name, seed) for name, _, seed in asked if seed < FIRST_TUNING_SEED]
    assert reported == [(name, seed) for seed in range(2) for name in (ADAM.name, DEFERRED.name, "decaying")]
    assert {name for name, _, seed in asked if seed >= FIRST_TUNING_SEED} == {ADAM.name, "decaying"}
    assert all(settings.decay == 0 for name, settings, _ in asked if name == ADAM.name)


def test_comparisons_are_of_pairs() -> None:
    assert ratio(Figure((2.0, 4.0, 12.0)), Figure((1.0, 2.0, 6.0))) == pytest.approx((2, 2, 2))
    found = difference(Figure((1.0, 4.0, 8.0)), Figure((1.0, 2.0, 4.0)))  # 0, 2 and 4: deviation 2
    around = 4.3027 * 2 / math.sqrt(3)
    assert found == pytest.approx((2, 2 - around, 2 + around, 4), rel=1e-4)
    assert found.over(2).high == pytest.approx(found.high / 2)


@pytest.mark.parametrize("rule", BESIDE_ADAM, ids=lambda rule: rule.name)
def test_rules_learn_whom_users_have_not_met_yet(rule: Rule) -> None:
    # Of the seven items in a user's list, only the right one is of the user's own kind.
    assert train(two_tastes(), SMALL, rule, Settings(0.1, 0.01), seed=0).figures[NDCG] > 0.9
    if rule is ADAM:
        assert train(two_tastes(), SMALL, rule, Settings(1e-6), seed=0).figures[NDCG] < 0.7


def test_negatives_are_drawn_from_all_items_that_the_user_has_not_met() -> None:
    torch.manual_seed(0)
    data = two_tastes()
    users, items, others = torch.cat(list(batches_of(data, Shape(dim=1, batch=50, epochs=40))), dim=1).tolist()
    met, drawn = set(zip(users, items, strict=True)), set(zip(users, others, strict=True))
    assert met == set(map(tuple, data.train.tolist()))
    assert not drawn & met
    assert len(drawn) == 40 * 12 - len(met)


def test_distances_are_those_of_the_weights_after_so_many_steps() -> None:
    assert max(rounding.distances(SMALL, two_tastes(), *CONTROLS[1:], steps=(1, 15)).values()) < 1e-10
    assert rounding.distances(SMALL, two_tastes(), ADAM, SPARSE, steps=(15,))[15] > 1e-3


def test_rarity_counts_the_rows_that_get_a_gradient() -> None:
    train = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1]])
    found = rarity(Shape(dim=1, hidden=1, batch=1, epochs=2), Interactions(2, 4, train, train[:1], train[:1]))
    assert (found.steps, found.share_of_users, found.share_of_items) == (8, 1 / 2, 1 / 4)
    assert found.gap_of_users == (4 / 3 + 4) / 2
    assert found.gap_of_tail == 8  # of the gaps 4, 8 and 8: rows that never come count as coming once


def test_planted_vectors_are_found() -> None:
    problem = planted.Problem(rows=50, dim=4, batch=64, steps=200)
    for rule in (SPARSE, ADAGRAD):
        found = planted.learn(problem, rule, Settings(0.1), seed=0).figures
        assert found[planted.HEAD] < found[planted.TAIL] < 0.3


def test_rowwise_adagrad_is_as_by_hand() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True, _weight=torch.zeros(3, 2))
    optimizer = rules.RowwiseAdagrad(table.parameters(), lr=0.5, eps=0.0)
    for gradient in ([1.0, 7.0], [3.0, 1.0]):
        table.zero_grad()
        (table(torch.tensor([1])) * torch.tensor([gradient])).sum().backward()
        optimizer.step()
    # Mean squares: 25, then 25 + 5.
    expected = [-0.5 * (1 / 5 + 3 / math.sqrt(30)), -0.5 * (7 / 5 + 1 / math.sqrt(30))]
    assert table.weight.tolist() == [[0, 0], pytest.approx(expected), [0, 0]]
