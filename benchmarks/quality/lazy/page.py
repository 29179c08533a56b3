"""Put what the suite `lazy` found into a page, with its picture and its data beside it.

    python -m benchmarks.quality.lazy.page docs/quality.md out/lazy.json [more.json ...]

The page has a pair of comments around each table; what is between them is written anew. Several files are those of
parts that were run one by one (`--only`), on one machine with one number of seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.lazy import plot, report
from benchmarks.quality.lazy.contestants import CONTESTANTS, Contestant
from benchmarks.quality.lazy.findings import Finding
from benchmarks.quality.lazy.race import Entry
from benchmarks.quality.ranking import NDCG, TAIL_FULL_NDCG
from rowstep.cli import extras

_PLACE = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class PageError(Exception):
    """The page or the files are not what they should be."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.lazy.page", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args(argv)
    try:
        document = merge([json.loads(file.read_text()) for file in given.files])
        given.page.write_text(fill(given.page.read_text(), document))
    except (OSError, ValueError, PageError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 1
    given.page.with_suffix(".json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    figure = extras.figure(10, 7)
    plot.draw(figure, findings_of(document))
    figure.savefig(given.page.with_suffix(".png"))
    return 0


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document with the problems of all."""
    first = documents[0]
    for key in ("machine", "seeds", "tuning_seeds", "quick"):
        if any(document[key] != first[key] for document in documents):
            raise PageError(f"the files differ in {key!r}; expected parts of one run: run them again alike")
    return {
        **first,
        "command": " && ".join(document["command"] for document in documents),
        "problems": [problem for document in documents for problem in document["problems"]],
        "bars": [bar for document in documents for bar in document["bars"]],
    }


def findings_of(document: Mapping[str, Any]) -> list[Finding]:
    return [Finding.from_json(problem) for problem in document["problems"]]


def fill(page: str, document: Mapping[str, Any]) -> str:
    tables = {name: _markdown(rows) for name, rows in _tables(findings_of(document))}
    places = [found["name"] for found in _PLACE.finditer(page)]
    if sorted(places) != sorted(tables):
        raise PageError(f"the page has places for the tables {places}; expected one for each of {list(tables)}")
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found['name']]}\n{found[3]}", page)


def _tables(findings: Sequence[Finding]) -> Iterator[tuple[str, Iterable[Sequence[str]]]]:
    """A row of headings first."""
    yield "ndcg", _per_rule(findings, functools.partial(_against_adam, metric=NDCG))
    yield "tail", _per_rule(findings, functools.partial(_against_adam, metric=TAIL_FULL_NDCG))
    yield "twins", [report.TWIN_HEADINGS, *report.twin_rows(findings)]
    yield "cost", _per_rule(findings, report.cost)
    yield "rarity", _rarity(findings)
    tuned = [rule for rule in CONTESTANTS if not rule.like]
    yield "rates", _per_rule(findings, lambda _, entry: report.tried(entry), tuned)
    for finding in findings:
        yield finding.problem, [report.HEADINGS, *report.rows(finding)]


def _per_rule(
    findings: Sequence[Finding], cell: Callable[[Finding, Entry], str], rules: Sequence[Contestant] = CONTESTANTS
) -> Iterator[Sequence[str]]:
    """A column per problem."""
    yield ["tables' rule", *(finding.about for finding in findings)]
    for rule in rules:
        yield [rule.name, *(cell(finding, finding.entry(rule.name)) for finding in findings)]


def _against_adam(finding: Finding, entry: Entry, metric: str) -> str:
    """Adam itself is there with its own figure."""
    return report.against_adam(finding, entry, metric) or report.spread(entry.figures[metric])


def _rarity(findings: Sequence[Finding]) -> Iterator[Sequence[str]]:
    yield ["", "steps", "users touched per step", "items", "steps between gradients: user", "tail item"]
    for finding in findings:
        found = finding.rarity
        shares = [f"{share:.0%}" for share in (found.share_of_users, found.share_of_items)]
        gaps = [f"{gap:.1f}" for gap in (found.gap_of_users, found.gap_of_tail)]
        yield [finding.about, f"{found.steps:,}", *shares, *gaps]


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    headings, *others = rows
    lines = [headings, ["---"] * len(headings), *others]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
