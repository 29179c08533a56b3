"""Put what was measured into docs/peers.md, with its pictures.

    python -m benchmarks.peers.docs [out/peers.json]

The README has the block `loop-short`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pages
from benchmarks.peers import plot, report
from benchmarks.peers.curves import LABELS, ROWS
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
PICTURES: Sequence[tuple[str, tuple[float, float], set[str], Callable[[Figure, Any], None]]] = (
    ("peers.png", (14, 9), {"step", "loop"}, plot.draw_peers),
    ("scaling.png", (13, 7.5), set(LABELS), plot.draw_curves),
    ("scaling-rows.png", (8, 4), {ROWS}, plot.draw_rows),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.docs", description="Write docs/peers.md.")
    parser.add_argument("measured", nargs="?", type=Path, default=Path("out/peers.json"))
    parser.add_argument("--page", type=Path, default=PAGE, help="pictures and the JSON file go beside it")
    given = parser.parse_args(argv)
    document = json.loads(given.measured.read_text())
    try:
        pages.write(given.page, document, report.blocks(document))
    except pages.PageError as error:
        print(f"{given.measured}: {error}", file=sys.stderr)
        return 1
    measurements = [Measurement.from_json(measured) for measured in document["measurements"]]
    for name, size, kinds, draw_on in PICTURES:
        figure = pages.figure(*size)
        draw_on(figure, [measured for measured in measurements if measured.kind in kinds])
        figure.savefig(given.page.with_name(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
