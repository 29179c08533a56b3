"""Put what the suite `lazy` found into a page, with its picture and its data beside it.

    python -m benchmarks.quality.lazy.page docs/quality.md out/lazy.json [more.json ...]

Several files are those of parts that were run one by one (`--only`), on one machine with one number of seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.quality.lazy import plot
from benchmarks.quality.lazy.findings import Finding, grids


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.lazy.page", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args(argv)
    try:
        document = merge([json.loads(file.read_text()) for file in given.files])
        pages.write(given.page, document, tables(document))
    except (OSError, ValueError, pages.PageError) as error:
        print(f"page: {error}", file=sys.stderr)
        return 1
    figure = pages.figure(10, 7)
    plot.draw(figure, _findings(document))
    figure.savefig(given.page.with_suffix(".png"))
    return 0


def merge(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document with the problems of all."""
    first = documents[0]
    for key in ("machine", "seeds", "tuning_seeds", "quick"):
        if any(document[key] != first[key] for document in documents):
            raise pages.PageError(f"the files differ in {key!r}; expected parts of one run: run them again alike")
    return {
        **first,
        "command": " && ".join(document["command"] for document in documents),
        "problems": [problem for document in documents for problem in document["problems"]],
        "bars": [bar for document in documents for bar in document["bars"]],
    }


def tables(document: Mapping[str, Any]) -> dict[str, str]:
    return {name: grid.markdown() for name, grid in grids(_findings(document))}


def _findings(document: Mapping[str, Any]) -> list[Finding]:
    return [Finding.from_json(problem) for problem in document["problems"]]


if __name__ == "__main__":
    sys.exit(main())
