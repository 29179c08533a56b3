"""Put what was measured into the documentation.

    python -m benchmarks.peers.docs [out/peers.json]

Fills the places in docs/peers.md that are marked with `<!-- measured: NAME -->` and `<!-- end -->`, NAME being a block
of `pages`, and draws its pictures. A place whose block was not measured stays as it is, and is named.
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

DOCS = Path(__file__).parents[2] / "docs"
PLACE = re.compile(r"(<!-- measured: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.docs", description="Fill docs/peers.md.")
    parser.add_argument("measured", nargs="?", type=Path, default=Path("out/peers.json"))
    parser.add_argument("--docs", type=Path, default=DOCS, help="where peers.md and its pictures are")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.measured.read_text())
    if document["quick"]:
        print(f"{arguments.measured} is of a quick run, whose figures mean nothing: measure again", file=sys.stderr)
        return 1
    page = arguments.docs / "peers.md"
    text, missing = filled(page.read_text(), pages.blocks(document))
    page.write_text(text)
    draw(arguments.docs, pages.measurements_of(document))
    for name in missing:
        print(f"not measured, so left as it was: {name}")
    return 0


def filled(text: str, blocks: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with all blocks in their places, and the names of places that have no block."""
    missing = []

    def fill(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in blocks:
            missing.append(name)
            return place[0]
        return f"{place[1]}\n{blocks[name]}\n\n{place[3]}"

    return PLACE.sub(fill, text), missing


def draw(folder: Path, measurements: Sequence[Measurement]) -> None:
    pictures: list[tuple[str, tuple[float, float], set[str], Callable[[Figure, Any], None]]] = [
        ("peers.png", (14, 9), {"step", "loop"}, plot.draw_peers),
        ("scaling.png", (13, 7.5), set(LABELS), plot.draw_curves),
        ("scaling-rows.png", (6.5, 4), {ROWS}, plot.draw_rows),
    ]
    for name, size, kinds, draw_on in pictures:
        if shown := [measured for measured in measurements if measured.kind in kinds]:
            figure = extras.figure(*size)
            draw_on(figure, shown)
            figure.savefig(folder / name)


if __name__ == "__main__":
    sys.exit(main())
