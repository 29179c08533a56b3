"""The tables: made once, and shown on the screen or as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import ROOFLINE, ROWSTEP, TORCH
from benchmarks.peers.catalogue import IN_README, LOOPS, STEPS, Peer
from benchmarks.peers.sizes import LABELS, THREADS
from benchmarks.report import table_of_numbers
from benchmarks.timing import Measurement, Timing

if TYPE_CHECKING:
    from rich.table import Table

PEERS = {"step": STEPS, "loop": LOOPS}
TITLES = {"step": "One step", "loop": "Whole loop: forward pass, backward pass and step"}


@dataclass(frozen=True)
class Grid:
    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    words: int = 1  # columns that hold words, not numbers

    def markdown(self) -> str:
        rule = ["---"] * self.words + ["---:"] * (len(self.headings) - self.words)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.headings, rule, *self.lines))

    def table(self) -> Table:
        table = table_of_numbers([*self.headings], title=self.title, words=self.words)
        for line in self.lines:
            table.add_row(*line)
        return table


@dataclass(frozen=True)
class Entry:
    """One peer in one case, beside the first one of the same group."""

    timing: Timing
    first: Timing

    @property
    def by_median(self) -> float:
        return self.timing.median / self.first.median

    @property
    def by_minimum(self) -> float:
        return self.timing.min / self.first.min


class Outcome:
    """All groups of one case and one number of threads, as one."""

    def __init__(self, measurements: Sequence[Measurement], first: str) -> None:
        self.about = measurements[0].about
        self.threads = measurements[0].threads
        self.disturbed = any(measured.disturbed for measured in measurements)
        self.entries: dict[str, Entry] = {}
        self.left_out: dict[str, str] = {}
        for measured in measurements:
            self.left_out |= measured.left_out
            for name, timing in measured.timings.items():
                self.entries.setdefault(name, Entry(timing, measured.timings[first]))


def outcomes(kind: str, measurements: Sequence[Measurement]) -> list[Outcome]:
    """Cases in the order measured, and for each the numbers of threads, ascending."""
    of_kind = [measured for measured in measurements if measured.kind == kind]
    keys = sorted(
        {(measured.name, measured.threads) for measured in of_kind},
        key=lambda key: ([measured.name for measured in of_kind].index(key[0]), key[1]),
    )
    first = PEERS[kind][0].name
    return [Outcome([m for m in of_kind if (m.name, m.threads) == key], first) for key in keys]


def grids(measurements: Sequence[Measurement]) -> Iterator[Grid]:
    """All that a run has measured."""
    for kind in PEERS:
        if any(measured.kind == kind for measured in measurements):
            yield ratios(kind, measurements)
            yield times(kind, measurements)
    for axis in LABELS:
        if of_axis := [measured for measured in measurements if measured.kind == axis]:
            yield curve(axis, of_axis)


def all_left_out(measurements: Sequence[Measurement]) -> list[str]:
    return [sentence for kind in PEERS for sentence in left_out(kind, measurements)]


def ratios(kind: str, measurements: Sequence[Measurement]) -> Grid:
    """How many times as long as rowstep every peer takes."""
    first, *others = PEERS[kind]
    return _by_peer(kind, measurements, others, _ratio, f"times as long as {first.name}, by medians (by minima)")


def times(kind: str, measurements: Sequence[Measurement]) -> Grid:
    return _by_peer(kind, measurements, PEERS[kind], _time, "median (min) in ms")


def loops_in_short(measurements: Sequence[Measurement]) -> Grid:
    """A line per case and number of threads, with the medians of those in the README alone."""
    lines, about = [], ""
    for outcome in outcomes("loop", measurements):
        medians = [_cell(outcome, peer.name, lambda entry: milliseconds(entry.timing.median)) for peer in IN_README]
        lines.append([outcome.about if outcome.about != about else "", str(outcome.threads), *medians])
        about = outcome.about
    headings = ["whole loop, median ms", "threads", *(peer.name for peer in IN_README)]
    return Grid(f"{TITLES['loop']}: median ms", headings, lines)


def _by_peer(
    kind: str,
    measurements: Sequence[Measurement],
    peers: Sequence[Peer],
    cell: Callable[[Entry], str],
    title: str,
) -> Grid:
    """A line per peer and number of threads, a column per case."""
    found = {(outcome.about, outcome.threads): outcome for outcome in outcomes(kind, measurements)}
    cases, counts = (list(dict.fromkeys(of_all)) for of_all in zip(*found, strict=True))
    lines = []
    for peer in peers:
        for count in sorted(counts):
            words = [peer.name, peer.rule.value] if count == min(counts) else ["", ""]
            cells = [_cell(found.get((about, count)), peer.name, cell) for about in cases]
            lines.append([*words, str(count), *cells])
    return Grid(f"{TITLES[kind]}: {title}", ["", "rule", "threads", *cases], lines, words=2)


def _cell(outcome: Outcome | None, name: str, cell: Callable[[Entry], str]) -> str:
    if outcome is None or name not in outcome.entries:
        return "left out" if outcome and name in outcome.left_out else ""
    return cell(outcome.entries[name]) + " *" * outcome.disturbed


def _ratio(entry: Entry) -> str:
    return f"{multiple(entry.by_median)} ({multiple(entry.by_minimum)})"


def _time(entry: Entry) -> str:
    return f"{milliseconds(entry.timing.median)} ({milliseconds(entry.timing.min)})"


def left_out(kind: str, measurements: Sequence[Measurement]) -> Iterator[str]:
    """A sentence per peer and reason."""
    seen: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes(kind, measurements):
        for name, reason in outcome.left_out.items():
            seen.setdefault((name, reason), []).append(f"{outcome.about} on {threads(outcome.threads)}")
    for (name, reason), where in seen.items():
        yield f"{name} was left out of {', '.join(where)}: {reason}."


def contestants(versions: Mapping[str, Mapping[str, str]], missing: Mapping[str, str]) -> Grid:
    """Who was asked, with which versions, and what is to be known about each."""
    peers: dict[str, Peer] = {peer.name: peer for peer in (*STEPS, *LOOPS)}
    lines = []
    for name, peer in peers.items():
        if name in versions:
            found = ", ".join(f"{package} {version}" for package, version in versions[name].items())
        elif name in missing:
            found = f"missing: {missing[name]}"
        else:
            continue
        lines.append([name, peer.rule.value, found, peer.remark])
    return Grid("Contestants", ["", "rule", "with", "remark"], lines, words=4)


def curve(axis: str, measurements: Sequence[Measurement]) -> Grid:
    """A line per point and number of threads."""
    lines = []
    for measured in measurements:
        point = [f"{int(measured.name):,}", *([] if axis == THREADS else [str(measured.threads)])]
        cells = [
            milliseconds(measured.timings[name].median) if name in measured.timings else measured.left_out.get(name, "")
            for name in (ROWSTEP, TORCH, ROOFLINE)
        ]
        lines.append([*point, *cells, *(_over(measured, *pair) for pair in ((TORCH, ROWSTEP), (ROWSTEP, ROOFLINE)))])
    point = [LABELS[axis], *([] if axis == THREADS else ["threads"])]
    headings = [*point, ROWSTEP, TORCH, "memory traffic alone", "torch / rowstep", "rowstep / traffic"]
    return Grid(f"By {LABELS[axis]}: median ms", headings, lines, words=0)


def _over(measured: Measurement, slow: str, fast: str) -> str:
    ratio = measured.ratio(slow, fast)
    return "" if ratio is None else multiple(ratio) + " *" * measured.disturbed


def bars(reached: Sequence[Mapping[str, Any]]) -> Grid:
    lines = [
        [
            bar["measure"],
            f"at least {bar['limit']:g}{bar['unit']}",
            f"{bar['reached']:.2f}{bar['unit']}",
            "disturbed" if bar["disturbed"] else "yes" if bar["met"] else "**no**",
        ]
        for bar in reached
    ]
    return Grid("Bars", ["measure", "bar", "reached", "met"], lines)


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def multiple(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def milliseconds(seconds: float) -> str:
    """Three digits that count."""
    time = seconds * 1e3
    return f"{time:,.{0 if time >= 100 else 1 if time >= 10 else 2 if time >= 1 else 3}f}"
