"""What is trained in the suite `lazy`, and what was found about it, as tables for the terminal and the docs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch

from benchmarks.quality.comparison import Difference, difference
from benchmarks.quality.interactions import Interactions
from benchmarks.quality.models import STEP, TRAINING, Shape, batches_of
from benchmarks.quality.ranking import FULL_NDCG, HIT_RATE, METRICS, NDCG, TAIL_FULL_NDCG, TAIL_NDCG
from benchmarks.quality.rules import ADAM, BESIDE_ADAM, TWINS, Rule
from benchmarks.quality.tuning import Entry
from benchmarks.report import Grid

EQUAL = 1e-4


@dataclass(frozen=True)
class Problem:
    name: str
    title: str
    shape: Shape

    @property
    def about(self) -> str:
        epochs = f"{self.shape.epochs} epoch{'s' * (self.shape.epochs > 1)}"
        return f"{self.title}, batches of {self.shape.batch:,}, {epochs}"


BPR = "Matrix factorisation, BPR"
FULL = (
    Problem("bpr-1024", BPR, Shape(dim=64, batch=1_024, epochs=8)),
    Problem("bpr-64", BPR, Shape(dim=64, batch=64, epochs=1)),
    Problem("towers-256", "Two towers", Shape(dim=64, batch=256, epochs=2, hidden=64)),
)
QUICK = tuple(
    replace(problem, shape=replace(problem.shape, dim=8, epochs=1, hidden=problem.shape.hidden // 8))
    for problem in FULL
)


@dataclass(frozen=True)
class Rarity:
    """How much of the tables a step touches, and how many steps a row waits for its next gradient."""

    steps: int
    share_of_users: float
    share_of_items: float
    gap_of_users: float
    gap_of_tail: float


def rarity(shape: Shape, data: Interactions) -> Rarity:
    torch.manual_seed(0)
    counts = [torch.zeros(rows, dtype=torch.int64) for rows in (data.users, data.items)]
    steps = 0
    for batch in batches_of(data, shape):
        steps += 1
        for count, ids in zip(counts, (batch[0], batch[1:]), strict=True):
            count[ids.unique()] += 1  # type: ignore[no-untyped-call]
    users, items = counts
    shares = [count.sum().item() / len(count) / steps for count in counts]
    gaps = [
        statistics.median((steps / count.double().clamp(min=1)).tolist()) for count in (users, items[~data.is_head])
    ]
    return Rarity(steps, *shares, *gaps)


@dataclass(frozen=True)
class Finding:
    problem: str
    about: str
    rarity: Rarity
    entries: Sequence[Entry]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def adam(self) -> Entry:
        return self.entry(ADAM.name)

    def against_adam(self, entry: Entry, metric: str) -> Difference:
        return difference(entry.figures[metric], self.adam.figures[metric])

    def apart(self, twins: str, metric: str) -> float:
        """The largest difference that any seed shows."""
        one, other = (self.entry(rule.name).figures[metric] for rule in TWINS[twins])
        return difference(other, one).largest

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"entries": [entry.as_json() for entry in self.entries]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        entries = [Entry.from_json(entry) for entry in found["entries"]]
        return cls(found["problem"], found["about"], Rarity(**found["rarity"]), entries)


Cell: TypeAlias = Callable[[Finding, Entry], str]  # what a table says of a rule in a problem


def grids(findings: Sequence[Finding]) -> Iterator[tuple[str, Grid]]:
    """By the names of their places in docs/quality.md."""
    for name, metric in (("ndcg", NDCG), ("tail", TAIL_FULL_NDCG)):
        yield name, _per_rule(f"{METRICS[metric]} beside Adam's", findings, _against_adam(metric))
    yield "twins", _twins(findings)
    yield "cost", _per_rule("Processor time of the tables' step, share of Adam's training", findings, _cost)
    yield "rarity", _rarity(findings)
    tuned = [rule for rule in BESIDE_ADAM if not rule.like]
    yield "rates", _per_rule("Rates chosen, and tried", findings, lambda _, entry: entry.tuned.tried, tuned)
    for finding in findings:
        entries = [finding.entry(rule.name) for rule in BESIDE_ADAM]
        lines = [
            [entry.name, entry.tuned.about, *(entry.figures[name].spread for name in METRICS)] for entry in entries
        ]
        yield finding.problem, _grid(finding.about, ["tables' rule", "rate", *METRICS.values()], lines)


def _grid(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Grid:
    return Grid(f"MovieLens-100K: {title}", headings, lines, words=len(headings))


def _per_rule(title: str, findings: Sequence[Finding], cell: Cell, rules: Sequence[Rule] = BESIDE_ADAM) -> Grid:
    """A column per problem."""
    lines = [[rule.name, *(cell(finding, finding.entry(rule.name)) for finding in findings)] for rule in rules]
    return _grid(title, ["tables' rule", *(finding.about for finding in findings)], lines)


def _against_adam(metric: str) -> Cell:
    """In percent of Adam's mean; bold if 0 is not in the interval. Adam itself is there with its own figure."""

    def cell(finding: Finding, entry: Entry) -> str:
        of_adam = finding.adam.figures[metric]
        if entry is finding.adam:
            return of_adam.spread
        found = finding.against_adam(entry, metric)
        if found.largest <= EQUAL:
            return "equal"
        mean, low, high, _ = found.over(of_adam.mean / 100)
        bold = "**" * (not low <= 0 <= high)
        return f"{bold}{mean:+.1f}%{bold} [{low:+.1f}, {high:+.1f}]"

    return cell


def _cost(finding: Finding, entry: Entry) -> str:
    """Medians over seeds: the two ran one after the other in each of them."""
    pairs = zip(entry.figures[TRAINING].values, finding.adam.figures[TRAINING].values, strict=True)
    share = statistics.median(seconds / of_adam for seconds, of_adam in pairs)
    return f"{statistics.median(entry.figures[STEP].values):.2f} ms, {share:.2f}"


def _twins(findings: Sequence[Finding]) -> Grid:
    shown = (NDCG, HIT_RATE, FULL_NDCG, TAIL_NDCG)
    lines = []
    for twins in TWINS:
        for finding in findings:
            apart = [finding.apart(twins, metric) for metric in shown]
            lines.append([twins, finding.about, *(f"{value:.1e}" if value else "0" for value in apart)])
    headings = ["largest difference in any seed", "problem", *(METRICS[name] for name in shown)]
    return _grid("rules that compute the same", headings, lines)


def _rarity(findings: Sequence[Finding]) -> Grid:
    headings = ["", "steps", "users touched per step", "items", "steps between gradients: user", "tail item"]
    lines = []
    for finding in findings:
        found = finding.rarity
        shares = [f"{share:.0%}" for share in (found.share_of_users, found.share_of_items)]
        gaps = [f"{gap:.1f}" for gap in (found.gap_of_users, found.gap_of_tail)]
        lines.append([finding.about, f"{found.steps:,}", *shares, *gaps])
    return _grid("how rare rows are", headings, lines)
