"""The tables of the suite `lazy`, as rows of text: for the terminal, and in `page` for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.quality.comparison import Difference
from benchmarks.quality.lazy.contestants import CONTESTANTS, TWINS
from benchmarks.quality.lazy.findings import EQUAL, Finding
from benchmarks.quality.lazy.race import Entry
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, NDCG, TAIL_FULL_NDCG, TAIL_HIT_RATE, TAIL_NDCG
from benchmarks.quality.training import STEP, TRAINING
from benchmarks.quality.tuning import Figure
from benchmarks.report import table_of_numbers

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("tables' rule", "rate", "NDCG@10", "HR@10", "NDCG", "tail: NDCG@10", "tail: HR@10", "tail: NDCG")
FIGURES = (NDCG, HIT_RATE, FULL_NDCG, TAIL_NDCG, TAIL_HIT_RATE, TAIL_FULL_NDCG)
TWIN_HEADINGS = ("largest difference in any seed", "problem", "NDCG@10", "HR@10", "NDCG", "tail: NDCG@10")
CAPTION = (
    "Mean ± standard deviation over seeds. Below: difference from Adam over the same seeds, as a share of Adam's mean, "
    "with its 95% interval. Processor time of the training as a share of Adam's. *: an end of the rates tried."
)


def shown(finding: Finding) -> Table:
    compared = {NDCG: "NDCG@10", HIT_RATE: "HR@10", FULL_NDCG: "NDCG", TAIL_FULL_NDCG: "tail: NDCG"}
    headings = ["tables' rule", "rate", *compared.values(), "time"]
    table = table_of_numbers(headings, title=f"MovieLens-100K: {finding.about}", caption=CAPTION)
    for contestant in CONTESTANTS:
        entry = finding.entry(contestant.name)
        cells = [f"{spread(entry.figures[name])}\n{against_adam(finding, entry, name)}" for name in compared]
        row = [entry.name, settings(entry), *cells, f"{share_of_time(finding, entry):.2f}"]
        table.add_row(*(cell.replace("**", "") for cell in row), end_section=True)
    return table


def rows(finding: Finding) -> Iterator[list[str]]:
    for contestant in CONTESTANTS:
        entry = finding.entry(contestant.name)
        yield [entry.name, settings(entry), *(spread(entry.figures[name]) for name in FIGURES)]


def settings(entry: Entry) -> str:
    """A star stands for an end of what was tried."""
    return entry.tuned.settings.about + "*" * entry.tuned.at_edge


def tried(entry: Entry) -> str:
    """What was chosen, and between which ends."""
    found = [(entry.tuned.settings.rate, entry.tuned.rates), (entry.tuned.settings.decay, entry.tuned.decays)]
    return "; ".join(f"{chosen:g} ({min(among):g} to {max(among):g})" for chosen, among in found if among)


def spread(figure: Figure) -> str:
    return f"{figure.mean:.4f} ± {figure.deviation:.4f}"


def against_adam(finding: Finding, entry: Entry, metric: str) -> str:
    """In percent of Adam's mean; bold if 0 is not in the interval. Empty for Adam itself."""
    if entry is finding.adam:
        return ""
    found = finding.against_adam(entry, metric)
    return "equal" if found.largest <= EQUAL else percent(found.over(finding.adam.figures[metric].mean))


def percent(found: Difference) -> str:
    mean = f"{100 * found.mean:+.1f}%"
    interval = f"({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return f"{mean} {interval}" if found.low <= 0 <= found.high else f"**{mean}** {interval}"


def cost(finding: Finding, entry: Entry) -> str:
    return f"{statistics.median(entry.figures[STEP].values):.2f} ms, {share_of_time(finding, entry):.2f}"


def share_of_time(finding: Finding, entry: Entry) -> float:
    """The median over seeds: the two ran one after the other in each of them."""
    pairs = zip(entry.figures[TRAINING].values, finding.adam.figures[TRAINING].values, strict=True)
    return statistics.median(seconds / of_adam for seconds, of_adam in pairs)


def shown_twins(findings: Sequence[Finding]) -> Table:
    table = table_of_numbers(TWIN_HEADINGS, title="Rules that compute the same", words=2)
    for row in twin_rows(findings):
        table.add_row(*row)
    return table


def twin_rows(findings: Sequence[Finding]) -> Iterator[list[str]]:
    for twins in TWINS:
        for finding in findings:
            apart = [finding.apart(twins, metric) for metric in (NDCG, HIT_RATE, FULL_NDCG, TAIL_NDCG)]
            yield [twins.about, finding.about, *(f"{value:.1e}" if value else "0" for value in apart)]
