"""The tables of the suite `peers`, for the screen and for docs/peers.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.contenders import ROOFLINE, ROWSTEP, TORCH
from benchmarks.peers.catalogue import LOOPS, STEPS, Peer
from benchmarks.peers.curves import LABELS, THREADS
from benchmarks.report import Grid, milliseconds, multiple, threads, time
from benchmarks.timing import Measurement, Timing

PEERS = {"step": STEPS, "loop": LOOPS}
TITLES = {"step": "One step", "loop": "Whole loop: forward pass, backward pass and step"}


class Entry(NamedTuple):
    """One peer in one case, beside the first one of the same group."""

    timing: Timing
    first: Timing

    @property
    def by_median(self) -> float:
        return self.timing.median / self.first.median


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
    names = [measured.name for measured in of_kind]
    keys = {(measured.name, measured.threads) for measured in of_kind}
    return [
        Outcome([measured for measured in of_kind if (measured.name, measured.threads) == key], PEERS[kind][0].name)
        for key in sorted(keys, key=lambda key: (names.index(key[0]), key[1]))
    ]


def grids(measurements: Sequence[Measurement]) -> dict[str, Grid]:
    """All that a run has measured, by the names of their places in docs/peers.md."""
    made = {}
    for kind, peers in PEERS.items():
        if any(measured.kind == kind for measured in measurements):
            title = f"times as long as {peers[0].name}, by medians"
            made[f"{kind}-ratios"] = _by_peer(kind, measurements, peers[1:], _ratio, title)
            title = "median (min) in ms"
            made[f"{kind}-times"] = _by_peer(kind, measurements, peers, lambda entry: time(entry.timing), title)
    for axis in LABELS:
        if of_axis := [measured for measured in measurements if measured.kind == axis]:
            made[f"by-{axis}"] = _curve(axis, of_axis)
    return made


def _by_peer(
    kind: str, measurements: Sequence[Measurement], peers: Sequence[Peer], cell: Callable[[Entry], str], title: str
) -> Grid:
    """A line per peer, a column per case; a cell has each number of threads."""
    found = {(outcome.about, outcome.threads): outcome for outcome in outcomes(kind, measurements)}
    cases, counts = (list(dict.fromkeys(of_all)) for of_all in zip(*found, strict=True))
    lines = []
    for peer in peers:
        cells = [[_cell(found.get((about, count)), peer.name, cell) for count in sorted(counts)] for about in cases]
        lines.append([peer.name, peer.rule.value, *(", ".join(filter(None, of_case)) for of_case in cells)])
    title += f" (threads: {', '.join(map(str, sorted(counts)))})"
    return Grid(f"{TITLES[kind]}: {title}", ["", "rule", *cases], lines, words=2)


def _cell(outcome: Outcome | None, name: str, cell: Callable[[Entry], str]) -> str:
    if outcome is None or name not in outcome.entries:
        return "left out" if outcome and name in outcome.left_out else ""
    return cell(outcome.entries[name]) + " *" * outcome.disturbed


def _ratio(entry: Entry) -> str:
    return multiple(entry.by_median)


def left_out(kind: str, measurements: Sequence[Measurement]) -> Iterator[str]:
    """A sentence per peer and reason."""
    seen: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes(kind, measurements):
        for name, reason in outcome.left_out.items():
            seen.setdefault((name, reason), []).append(f"{outcome.about} on {threads(outcome.threads)}")
    for (name, reason), where in seen.items():
        yield f"{name} was left out of {', '.join(where)}: {reason}."


def contestants(versions: Mapping[str, Mapping[str, str]], missing: Mapping[str, str]) -> Grid:
    """Which versions the peers have that come from elsewhere, and what is to be known about each."""
    lines = []
    for peer in (*STEPS, *LOOPS):
        packages = peer.packages if peer.environment else ()
        found = ", ".join(f"{name} {versions[peer.name][name]}" for name in packages if peer.name in versions)
        if peer.name in missing:
            found = f"missing: {missing[peer.name]}"
        if found or (peer.remark and peer.name in versions):
            lines.append([peer.name, found, peer.remark])
    return Grid("Contestants", ["", "with", "remark"], lines, words=3)


def _curve(axis: str, measurements: Sequence[Measurement]) -> Grid:
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


def blocks(document: Mapping[str, Any]) -> dict[str, str]:
    """What can be put into a page, by name: from the JSON file of a run."""
    measurements = [Measurement.from_json(measured) for measured in document["measurements"]]
    made = {name: grid.markdown() for name, grid in grids(measurements).items()}
    made |= {f"{kind}-left-out": "\n".join(f"- {line}" for line in left_out(kind, measurements)) for kind in PEERS}
    made["contestants"] = contestants(document["versions"], document["missing"]).markdown()
    return made


def _vectors(flags: str) -> str:
    """Whether a CPU has AVX-512, since two that differ in it put FBGEMM and rowstep in opposite orders."""
    return flags and f" ({'with' if 'avx512f' in flags.split() else 'without'} AVX-512)"


def sentences(document: Mapping[str, Any], measurements: Sequence[Measurement]) -> Iterator[str]:
    """Where and when a run was measured, for the page of any suite."""
    machine = document["machine"]
    cpu = machine["cpu"] + _vectors(machine.get("cpu_flags", ""))
    yield f"Measured on {document['date']} by `{document['command']}` on {machine['cores']} cores of {cpu},"
    packages = ", ".join(f"{package} {machine[package]}" for package in ("rowstep", "torch", "numba", "numpy"))
    yield f"{machine['system']}, Python {machine['python']}, {packages}."
    if busy := sum(measured.disturbed for measured in measurements):
        yield f"Other work took more than a tenth of the machine during {busy} of the measurements (*)."
