"""What a run has found, in a page of the docs, and the run's JSON file beside it.

The page has a pair of comments around each table, `<!-- table: NAME -->` and `<!-- end of table -->`; what is between
them is written anew. So no figure is copied by hand, and a page is of one run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_PLACE = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class PageError(Exception):
    """The page or the run is not what it should be."""


def fill(page: str, tables: Mapping[str, str]) -> str:
    places = [found["name"] for found in _PLACE.finditer(page)]
    if missing := [name for name in places if name not in tables]:
        raise PageError(
            f"the page has a place for {', '.join(missing)}, which the run lacks: run all parts of the suite"
        )
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found['name']]}\n\n{found[3]}", page)


def write(page: Path, document: Mapping[str, Any], tables: Mapping[str, str]) -> None:
    if document["quick"]:
        raise PageError("the run is a quick one, whose figures mean nothing: measure again")
    page.write_text(fill(page.read_text(), tables))
    page.with_suffix(".json").write_text(json.dumps(document, separators=(",", ":")) + "\n")


def figure(width: float, height: float) -> Figure:
    """A figure outside pyplot: no display is needed, and no global state is left behind."""
    return Figure(figsize=(width, height), dpi=144, layout="constrained")
