"""Plans: who gets which table, how evenly, and what a plan says of itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rowstep.distributed import Plan, ShardedEmbeddingCollection, Size, Use, count_traffic, plan_tables
from rowstep.distributed._placement import Placement
from tests.helpers.ranks import Ranks


def random_tables(count: int, seed: int) -> tuple[dict[str, Size], dict[str, float], dict[str, float]]:
    dice = np.random.default_rng(seed)
    rows = np.exp(dice.uniform(np.log(3), np.log(1e7), count)).astype(int)
    names = [f"table {number}" for number in range(count)]
    sizes = {name: Size(int(n), int(dice.choice([4, 16, 64]))) for name, n in zip(names, rows, strict=True)}
    ids = {name: float(dice.integers(1, 8192)) for name in names}
    return sizes, ids, {name: float(dice.uniform(0, 1.3)) for name in names}


def simulated(plan: Plan, popularity: dict[str, float], steps: int, seed: int) -> tuple[float, float]:
    """Bytes held, and bytes sent and received by owners, of the fullest rank over the mean; ids are drawn."""
    dice = np.random.default_rng(seed)
    held, load = np.zeros(plan.ranks), np.zeros(plan.ranks)
    for name, (rows, width, element) in plan.sizes.items():
        placement = Placement(rows, plan.ranks, plan[name])
        held += [len(placement.of(rank)) * width * element for rank in range(plan.ranks)]
        weights = np.arange(1, rows + 1) ** -popularity[name]
        cumulative = np.cumsum(weights) / weights.sum()
        for _ in range(steps):
            for _asker in range(plan.ranks):
                drawn = np.searchsorted(cumulative, dice.random(round(plan.use[name].ids))).clip(max=rows - 1)
                wanted = np.unique(drawn)
                if plan[name] == "everywhere":
                    load += len(wanted) * (4 + width * element)
                    continue
                positions = placement.order.positions(torch.from_numpy(wanted)).numpy()
                owners = positions // placement.span if plan[name] == "divided" else np.full(len(wanted), plan[name])
                load += np.bincount(owners, minlength=plan.ranks) * (4 + 2 * width * element)
    return held.max() / held.mean(), load.max() / load.mean()


@pytest.mark.parametrize(("count", "ranks_count"), [(1, 8), (5, 8), (40, 8), (12, 64)])
def test_ranks_are_loaded_evenly(count: int, ranks_count: int) -> None:
    sizes, ids, popularity = random_tables(count, seed=count)
    sizes = {name: size._replace(rows=min(size.rows, 200_000)) for name, size in sizes.items()}
    plan = plan_tables(sizes, ranks_count, ids=ids, popularity=popularity)
    by_bytes, by_load = simulated(plan, popularity, steps=2, seed=1)
    assert by_bytes <= 1.1
    assert by_load <= 1.1


@pytest.mark.parametrize("count", [1, 2, 26, 300])
@pytest.mark.parametrize("ranks_count", [1, 2, 3, 8, 64, 1000])
def test_any_number_of_tables_and_ranks_has_a_balanced_plan(count: int, ranks_count: int) -> None:
    for seed in range(3):
        sizes, ids, popularity = random_tables(count, seed)
        plan = plan_tables(sizes, ranks_count, ids=ids, popularity=popularity)
        assert list(plan) == list(sizes)
        assert max(plan.balance()) <= 1.1
        assert plan == plan_tables(sizes, ranks_count, ids=ids, popularity=popularity), "ranks would differ"


def test_small_tables_are_on_one_rank_large_ones_divided_and_hot_ones_everywhere() -> None:
    tables = {f"small {number}": (1000, 16) for number in range(64)}
    plan = plan_tables(
        {**tables, "large": (10_000_000, 16), "hot": (50, 512)},
        8,
        ids=dict.fromkeys([*tables, "large"], 64) | {"hot": 65536},
    )
    assert plan["large"] == "divided"
    assert plan["hot"] == "everywhere"
    on_ranks = [plan[name] for name in tables]
    assert {on_ranks.count(rank) for rank in range(8)} == {8}
    alone = plan_tables(tables, 1)
    assert set(alone.values()) == {0}


def test_tables_of_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="table 'user' is -1 x 4; expected no negative size"):
        plan_tables({"user": (-1, 4)}, 2)


def test_a_plan_can_be_changed_and_says_what_it_is() -> None:
    tables: dict[str, nn.Module | tuple[int, ...]] = {"user": (1_000_000, 16), "country": nn.Embedding(200, 8)}
    plan = plan_tables(tables, 4, fixed={"country": 3})
    assert plan["country"] == 3
    plan["country"] = "everywhere"
    plan["user"] = "divided"
    text = str(plan)
    assert [line.split()[0] for line in text.splitlines()] == ["table", "user", "country", "4"]
    assert "1,000,000" in text
    assert "64.00" in text  # MB
    assert text.splitlines()[2].endswith("everywhere")
    assert "1.00 times the mean bytes" in text
    for place in ("rows", 4, -1, True, None, 1.0):
        with pytest.raises(ValueError, match="expected 'divided', 'everywhere' or the number of one of the 4 ranks"):
            plan["user"] = place  # type: ignore[assignment]
    with pytest.raises(KeyError, match="no table is called 'item'; there are 'user', 'country'"):
        plan["item"] = 0
    with pytest.raises(TypeError, match="a plan has a place for every table"):
        del plan["user"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ids": {"item": 3}}, "ids names 'item'; expected only user"),
        ({"popularity": {"item": 3.0}}, "popularity names 'item'"),
        ({"use": {"item": Use(1, 1)}}, "use names 'item'"),
        ({"fixed": {"item": 1}}, "fixed names 'item'"),
        ({"fixed": {"user": 9}}, "Invalid placement: 9"),
        ({"ranks": 0}, "ranks is 0; expected at least 1"),
        ({"ranks": True}, "ranks is True"),
        ({"popularity": float("nan")}, "the popularity of 'user' is not finite"),
        ({"popularity": {"user": torch.full((50,), float("inf"))}}, "the popularity of 'user' is not finite"),
        ({"use": {"user": Use(1, float("nan"))}}, r"the use of 'user' is \(1, nan\); expected finite numbers"),
        ({"use": {"user": Use(-1, 0)}}, r"the use of 'user' is \(-1, 0\)"),
        ({"ids": float("inf")}, "the use of 'user' is"),
        ({"ids": -1.0}, "ids is -1.0 for 'user'; expected 0 or more"),
        ({"popularity": {"user": torch.ones(4)}}, r"the popularity has shape \(4,\); expected \(50,\)"),
        ({"popularity": {"user": -torch.ones(50)}}, "expected counts, none of them negative"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_tables({"user": (50, 4)}, **({"ranks": 2} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("rows", [1, 2, 999, 1000, 1001, 30_000])
def test_as_many_ids_are_distinct_as_are_expected(rows: int, exponent: float) -> None:
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent)
    drawn = torch.multinomial(weights, 3000, replacement=True, generator=torch.Generator().manual_seed(0))
    distinct = len(torch.unique(drawn))
    for popularity in (exponent, weights):
        plan = plan_tables({"user": (rows, 4)}, 2, ids=3000, popularity={"user": popularity})
        assert plan.use["user"].distinct == pytest.approx(distinct, rel=0.1, abs=1.5)


def test_counts_that_are_all_zero_and_tables_without_rows_have_no_traffic() -> None:
    plan = plan_tables({"user": (50, 4), "none": (0, 4)}, 2, popularity={"user": torch.zeros(50)})
    assert plan.use["user"].distinct == plan.use["none"].distinct == 0
    assert max(plan.balance()) <= 1.1


def measured(rank: int) -> tuple[dict[str, Use], float, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    plan: dict[str, str | int] = {"user": "divided", "item": 1, "place": "everywhere"}
    tables = ShardedEmbeddingCollection({"user": (5000, 8), "item": (700, 16), "place": (90, 4)}, plan=plan)
    with count_traffic() as traffic:
        for _ in range(4):
            ids = {name: torch.randint(tables[name].num_embeddings, (300,), generator=generator) for name in tables}
            torch.autograd.backward([read.sum() for read in tables(ids).values()])
    use = tables.use()
    other = plan_tables({name: tables[name] for name in tables}, 3, use=use, fixed=plan)
    return use, traffic.total / 4, other.bytes_per_step()


def test_what_was_measured_makes_the_next_plan_and_tells_its_bytes(ranks: Ranks) -> None:
    results = ranks.run(3, measured)
    assert all(use == results[0][0] for use, _, _ in results)
    use = results[0][0]
    assert [each.ids for each in use.values()] == [300, 300, 300]
    assert use["user"].distinct == pytest.approx(5000 * (1 - (1 - 1 / 5000) ** 300), rel=0.02)
    sent = sum(total for _, total, _ in results) / 3
    assert sent == pytest.approx(results[0][2], rel=0.02)
