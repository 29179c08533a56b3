"""Fill every figure of README.md and docs/ in from benchmarks/results, and draw the pictures.

    python -m benchmarks.pages          which `make figures` runs; `make bench` measures first

A page has a pair of comments around each table, `<!-- table: NAME -->` and `<!-- end of table -->`, and around each
figure in its prose, `<!-- f: NAME -->` and `<!-- / -->`. What is between them is written anew: for a new one, write the
two comments with nothing between them. A line must not begin with a comment, or Markdown takes it for HTML. `figures`
has the names. So no figure is copied by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_TABLE = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- f: (?P<name>\S+) -->)[^<]*(<!-- / -->)")
_CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"(?:\d[\d.,]* to )?\d[\d.,]*(?: ?(?:x(?! ?\d)|ms|us|µs)| times)\b")
_PAGES = ("README.md", "docs/*.md")


class PageError(Exception):
    """A page or a run is not what it should be."""


def pages(root: Path = ROOT) -> list[Path]:
    return sorted(path for pattern in _PAGES for path in root.glob(pattern))


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """The run of each suite."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if quick := [name for name, run in runs.items() if run["quick"]]:
        raise PageError(f"the runs of {', '.join(quick)} are quick ones, whose figures mean nothing: measure again")
    return runs


def fill(page: str, tables: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """The page with these tables and figures."""
    for pattern, found, blank in ((_TABLE, tables, "\n"), (_FIGURE, figures, "")):
        names = [place["name"] for place in pattern.finditer(page)]
        if missing := [name for name in names if name not in found]:
            raise PageError(f"no run has {', '.join(missing)}, which a page asks for: run all parts of the suite")
        page = pattern.sub(partial(_put, found, blank), page)
    return page


def _put(found: Mapping[str, str], blank: str, place: re.Match[str]) -> str:
    return f"{place[1]}{blank}{found[place['name']]}{2 * blank}{place[3]}"


def typed(page: str) -> list[str]:
    """The figures of a page that look measured and are not from a run."""
    prose = _CODE.sub("", _FIGURE.sub("(a figure)", _TABLE.sub("", page)))
    return [found[0] for found in _MEASURED.finditer(" ".join(prose.split()))]


def main() -> int:
    from benchmarks import figures  # it draws, and so imports matplotlib

    try:
        runs = load()
        filled = {path: fill(path.read_text(), figures.tables(runs), figures.numbers(runs)) for path in pages()}
    except PageError as error:
        print(f"pages: {error}", file=sys.stderr)
        return 1
    for path, text in filled.items():
        path.write_text(text)
    figures.draw(runs, ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
