"""The suite `lazy` runs, its settings are searched as they should be, and its page shows what it found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.command import main
from benchmarks.quality import factors, towers
from benchmarks.quality.interactions import Interactions
from benchmarks.quality.lazy import page, race, rounding
from benchmarks.quality.lazy.contestants import (
    ADAM,
    CONTESTANTS,
    CONTROLS,
    DEFERRED,
    IN_DOUBLE,
    SPARSE,
    Contestant,
    Settings,
)
from benchmarks.quality.lazy.findings import METRICS, Finding
from benchmarks.quality.lazy.problems import QUICK, Problem, rarity
from benchmarks.quality.lazy.race import MOST_BEYOND, RATES, Tuned, search
from benchmarks.quality.ranking import NDCG
from benchmarks.quality.training import STEP, TRAINING
from benchmarks.quality.tuning import FIRST_TUNING_SEED, Outcome
from tests.helpers.made_up_wheel import write_wheel
from tests.helpers.pictures import is_png

DOCS = Path(__file__).parents[2] / "docs"
PLACES = ["ndcg", "tail", "twins", "cost", "rarity", "rates", *(problem.name for problem in QUICK)]


def two_tastes() -> Interactions:
    """Twenty users like the first six of twelve items, twenty like the others; each has met four of the six."""
    pairs = torch.tensor(
        [(user, 6 * (user % 2) + (user // 2 + at) % 6) for user in range(40) for at in range(6)], dtype=torch.int64
    ).reshape(40, 6, 2)
    return Interactions(40, 12, pairs[:, :4].reshape(-1, 2), pairs[:, 4], pairs[:, 5])


def with_places(*names: str) -> str:
    return "# Page\n" + "".join(f"\n<!-- table: {name} -->\nold\n<!-- end of table -->\n" for name in names)


def test_lazy_bench_writes_all_figures_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")  # no kernel is compiled for each of the rules
    monkeypatch.setattr(race, "MOST_BEYOND", 1)
    wheel = write_wheel(tmp_path / "made_up.whl")
    assert main(["lazy", "--quick", "--data", str(wheel), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "NDCG@10" in shown
    assert "fused" in shown
    assert is_png(tmp_path / "lazy.png")

    document = json.loads((tmp_path / "lazy.json").read_text())
    assert [found["problem"] for found in document["problems"]] == [problem.name for problem in QUICK]
    for found in document["problems"]:
        assert [entry["name"] for entry in found["entries"]] == [rule.name for rule in (*CONTESTANTS, *CONTROLS)]
        for entry in found["entries"]:
            for name in (*METRICS, STEP, TRAINING):
                assert len(entry["figures"][name]["all"]) == document["seeds"] == 2
        assert found["twins"][IN_DOUBLE.about] == dict.fromkeys(METRICS, 0.0)
        assert json.loads(json.dumps(Finding.from_json(found).as_json())) == found

    written = tmp_path / "page.md"
    written.write_text(with_places(*PLACES))
    assert page.main([str(written), str(tmp_path / "lazy.json")]) == 0
    assert "old" not in written.read_text()
    adam = document["problems"][0]["entries"][0]["figures"][NDCG]["mean"]
    assert f"| {ADAM.name} | {adam:.4f} ±" in written.read_text()
    assert is_png(written.with_suffix(".png"))
    assert json.loads(written.with_suffix(".json").read_text()) == document


def test_page_needs_a_place_for_every_table_and_parts_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "command": "a",
        "machine": "m",
        "seeds": 2,
        "tuning_seeds": 1,
        "quick": True,
        "problems": [],
        "bars": [],
    }
    text = tmp_path / "page.md"
    text.write_text(with_places("ndcg", "tail"))
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    file.write_text(json.dumps(document))
    assert page.main([str(text), str(file)]) == 1
    assert "has places for the tables ['ndcg', 'tail']; expected one for each of" in capsys.readouterr().err
    other.write_text(json.dumps(document | {"seeds": 3}))
    assert page.main([str(text), str(file), str(other)]) == 1
    assert "differ in 'seeds'" in capsys.readouterr().err
    assert page.merge([document, document])["command"] == "a && a"


def test_tables_of_the_docs_are_those_of_their_data() -> None:
    text, document = (DOCS / "quality.md").read_text(), json.loads((DOCS / "quality.json").read_text())
    assert page.fill(text, document) == text
    assert is_png(DOCS / "quality.png")


def test_search_goes_on_until_the_best_has_a_worse_one_on_both_sides() -> None:
    def peak_at(best: float) -> dict[float, float]:
        return search(lambda rate: -abs(math.log(rate / best)), RATES)

    assert set(peak_at(0.01)) == set(RATES)
    assert set(peak_at(0.04)) == {*RATES, 0.04, 0.08}
    assert set(peak_at(0.0025)) == {*RATES, 0.0025, 0.00125}
    endless = peak_at(1e9)
    assert len(endless) == len(RATES) + MOST_BEYOND
    assert Tuned(Settings(max(endless)), endless, {}).at_edge
    assert not Tuned(Settings(0.01), peak_at(0.01), {}).at_edge


def test_race_tunes_on_other_seeds_takes_turns_and_gives_twins_the_same_settings() -> None:
    asked: list[tuple[str, Settings, int]] = []
    decaying = Contestant("decaying", torch.optim.AdamW, decays=True)

    def trial(contestant: Contestant, settings: Settings, seed: int) -> Outcome:
        asked.append((contestant.name, settings, seed))
        score = -abs(math.log(settings.rate / 0.02)) - abs(settings.decay - 0.4)
        return Outcome(score if settings.rate < 0.03 else math.nan, {"figure": float(seed)}, 8.0)

    found = race.compete((ADAM, DEFERRED, decaying), trial, tuning_seeds=2, seeds=2)
    assert [entry.tuned.settings for entry in found] == [Settings(0.02), Settings(0.02), Settings(0.02, 0.4)]
    assert found[0].figures["figure"].values == (0.0, 1.0)
    reported = [(name, seed) for name, _, seed in asked if seed < FIRST_TUNING_SEED]
    assert reported == [(name, seed) for seed in range(2) for name in (ADAM.name, DEFERRED.name, "decaying")]
    tuned = {name for name, _, seed in asked if seed >= FIRST_TUNING_SEED}
    assert tuned == {ADAM.name, "decaying"}
    assert all(settings.decay == 0 for name, settings, _ in asked if name == ADAM.name)


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda contestant: contestant.name)
def test_contestants_learn_whom_users_have_not_met_yet(contestant: Contestant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    data = two_tastes()
    problem = Problem("small", "small", factors.Shape(dim=8, batch=16, epochs=8))
    # Of the seven items in a user's list, only the right one is of the user's own kind.
    assert problem.run(data, contestant, Settings(0.1, 0.01), seed=0).figures[NDCG] > 0.9


def test_nothing_is_learned_at_a_rate_of_next_to_nothing() -> None:
    problem = Problem("small", "small", factors.Shape(dim=8, batch=16, epochs=8))
    assert problem.run(two_tastes(), ADAM, Settings(1e-6), seed=0).figures[NDCG] < 0.7


def test_negatives_are_drawn_from_all_items_that_the_user_has_not_met() -> None:
    torch.manual_seed(0)
    data = two_tastes()
    met = set(map(tuple, data.train.tolist()))
    batches = list(factors.batches_of(data, factors.Shape(dim=1, batch=50, epochs=40)))
    assert [batch.shape[1] for batch in batches[:4]] == [50, 50, 50, 10]
    users, positives, negatives = torch.cat(batches, dim=1)
    assert set(zip(users.tolist(), positives.tolist(), strict=True)) == met
    drawn = set(zip(users.tolist(), negatives.tolist(), strict=True))
    assert not drawn & met
    assert len(drawn) == 40 * 12 - len(met)


def test_distances_are_those_of_the_weights_after_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")
    problem = Problem("small", "small", factors.Shape(dim=8, batch=16, epochs=2))
    twins = rounding.distances(problem, two_tastes(), *CONTROLS[1:], steps=(1, 15))
    assert max(twins.values()) < 1e-10
    assert rounding.distances(problem, two_tastes(), ADAM, SPARSE, steps=(15,))[15] > 1e-3


def test_rarity_counts_the_rows_that_get_a_gradient() -> None:
    train = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1]])
    data = Interactions(2, 4, train, train[:1], train[:1])
    found = rarity(Problem("one by one", "", towers.Shape(dim=1, hidden=1, batch=1, epochs=2)), data)
    assert (found.steps, found.share_of_users, found.share_of_items) == (8, 1 / 2, 1 / 4)
    assert found.gap_of_users == (4 / 3 + 4) / 2
    assert found.gap_of_tail == 8  # of the gaps 4, 8 and 8: rows that never come count as coming once
