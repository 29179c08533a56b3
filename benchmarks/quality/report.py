"""The tables of the suite `quality`: a line per rule, with what it keeps, what it reaches, and how Adam compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.quality.comparison import Ratio, ratio
from benchmarks.quality.planted import HEAD, TAIL
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, NDCG
from benchmarks.quality.tuning import Figure, Result
from benchmarks.report import table_of_numbers

if TYPE_CHECKING:
    from rich.table import Table

_WHAT = ["rule of the tables", "state: bytes\nper weight", "learning\nrate"]
_CAPTION = (
    "Mean ± standard deviation (minimum) over {} seeds. Below: ratio to SparseAdam's mean, 95% interval by a paired "
    "bootstrap{}. *: an end of the rates tried."
)
_VERDICT = ", and whether the interval is at or above 0.99 (yes), below (no) or around it (open)"


def movielens(results: Sequence[Result]) -> Table:
    names = {NDCG: "NDCG@10", HIT_RATE: "HR@10", FULL_NDCG: "NDCG of the whole list"}
    return _table("MovieLens-100K, two towers", results, names, higher_is_better=True)


def planted(results: Sequence[Result], about: str) -> Table:
    names = {HEAD: "error of the head", TAIL: "error of the tail"}
    return _table(f"Planted vectors: {about}", results, names, higher_is_better=False)


def _table(title: str, results: Sequence[Result], names: Mapping[str, str], *, higher_is_better: bool) -> Table:
    adam = results[0].figures
    seeds = len(next(iter(adam.values())).values)
    caption = _CAPTION.format(seeds, _VERDICT * higher_is_better)
    table = table_of_numbers([*_WHAT, *names.values()], title=title, caption=caption)
    for result in results:
        rate = f"{result.rate:g}" + "*" * result.is_at_edge
        shown = [_figure(result.figures[name], adam[name], with_verdict=higher_is_better) for name in names]
        table.add_row(result.rule, f"{result.state_bytes_per_weight:.2f}", rate, *shown, end_section=True)
    return table


def _figure(figure: Figure, adam: Figure, *, with_verdict: bool) -> str:
    over = "" if figure is adam else "\n" + _ratio(ratio(figure, adam), with_verdict=with_verdict)
    return f"{figure.mean:.4f} ± {figure.deviation:.4f} ({min(figure.values):.4f}){over}"


def _ratio(found: Ratio, *, with_verdict: bool) -> str:
    verdict = f", {found.within_one_percent}" * with_verdict
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f}){verdict}"
