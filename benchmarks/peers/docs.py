"""Put what was measured into the documentation.

    python -m benchmarks.peers.docs [out/peers.json]

Writes docs/peers.md: page.md, with what was measured in the places marked `<!-- measured: NAME -->`, NAME being a block
of `pages`. Puts the pictures of the page and the file itself beside it: after a change of page.md's words, give it
docs/peers.json. A run that lacks a block is refused, since a page is of one run. The README has the block `loop-short`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import pages, plot
from benchmarks.peers.sizes import LABELS, ROWS
from benchmarks.timing import Measurement
from rowstep.cli import extras

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).with_name("page.md")
DOCS = Path(__file__).parents[2] / "docs"
PLACE = re.compile(r"<!-- measured: (?P<name>[\w-]+) -->")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.docs", description="Write docs/peers.md.")
    parser.add_argument("measured", nargs="?", type=Path, default=Path("out/peers.json"))
    parser.add_argument("--page", type=Path, default=PAGE, help="the page without its figures")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where peers.md and its pictures go")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.measured.read_text())
    if document["quick"]:
        print(f"{arguments.measured} is of a quick run, whose figures mean nothing: measure again", file=sys.stderr)
        return 1
    text, missing = filled(arguments.page.read_text(), pages.blocks(document))
    if missing:
        print(
            f"{arguments.measured} lacks {', '.join(missing)}: run `python -m benchmarks peers` whole", file=sys.stderr
        )
        return 1
    (arguments.docs / "peers.md").write_text(text)
    (arguments.docs / "peers.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    draw(arguments.docs, pages.measurements_of(document))
    return 0


def filled(text: str, blocks: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with all blocks in their places, and the names of places that have no block."""
    missing = [place["name"] for place in PLACE.finditer(text) if place["name"] not in blocks]
    return PLACE.sub(lambda place: blocks.get(place["name"], place[0]), text), missing


def draw(folder: Path, measurements: Sequence[Measurement]) -> None:
    pictures: list[tuple[str, tuple[float, float], set[str], Callable[[Figure, Any], None]]] = [
        ("peers.png", (14, 9), {"step", "loop"}, plot.draw_peers),
        ("scaling.png", (13, 7.5), set(LABELS), plot.draw_curves),
        ("scaling-rows.png", (8, 4), {ROWS}, plot.draw_rows),
    ]
    for name, size, kinds, draw_on in pictures:
        if shown := [measured for measured in measurements if measured.kind in kinds]:
            figure = extras.figure(*size)
            draw_on(figure, shown)
            figure.savefig(folder / name)


if __name__ == "__main__":
    sys.exit(main())
