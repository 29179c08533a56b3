"""The tables of a run as Markdown, from its JSON file: the whole of them, or one by its name, for docs/peers.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.sizes import LABELS
from benchmarks.timing import Measurement, Timing


def measurements_of(document: Mapping[str, Any]) -> list[Measurement]:
    return [
        Measurement(
            measured["kind"],
            measured["name"],
            measured["about"],
            measured["threads"],
            {name: Timing(tuple(seconds["all"])) for name, seconds in measured["seconds"].items()},
            measured["left_out"],
            measured["share_of_machine_taken_by_others"],
        )
        for measured in document["measurements"]
    ]


def blocks(document: Mapping[str, Any]) -> dict[str, str]:
    """What can be put into a page, by name."""
    measurements = measurements_of(document)
    made = {"machine": _machine(document)}
    for kind in report.PEERS:
        if any(measured.kind == kind for measured in measurements):
            made[f"{kind}-ratios"] = report.ratios(kind, measurements).markdown()
            made[f"{kind}-times"] = report.times(kind, measurements).markdown()
            made[f"{kind}-left-out"] = "\n".join(f"- {line}" for line in report.left_out(kind, measurements))
    if any(measured.kind == "loop" for measured in measurements):
        made["loop-short"] = report.loops_in_short(measurements).markdown()
    for axis in LABELS:
        if of_axis := [measured for measured in measurements if measured.kind == axis]:
            made[f"by-{axis}"] = report.curve(axis, of_axis).markdown()
    made["contestants"] = report.contestants(document["versions"], document["missing"]).markdown()
    if document["bars"]:
        made["bars"] = report.bars(document["bars"]).markdown()
    return made


def whole(document: Mapping[str, Any]) -> str:
    return "\n\n".join(f"## {name}\n\n{block}".rstrip() for name, block in blocks(document).items()) + "\n"


def _machine(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return "\n".join(_sentences(document, machine))


def _sentences(document: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[str]:
    yield f"Measured by `{document['command']}` on {machine['cores']} cores of {machine['cpu']}, {machine['system']},"
    yield f"Python {machine['python']}, torch {machine['torch']}, numba {machine['numba']}, numpy {machine['numpy']}."
    busy = _disturbed(measurements_of(document))
    if busy:
        yield f"Other work took more than a tenth of the machine during {busy} of the measurements (*)."


def _disturbed(measurements: Sequence[Measurement]) -> int:
    return sum(measured.disturbed for measured in measurements)
