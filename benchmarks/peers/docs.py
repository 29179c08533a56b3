"""Put what was measured into docs/peers.md, with its pictures.

python -m benchmarks.peers.docs [out/peers.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import pages
from benchmarks.peers import plot, report
from benchmarks.timing import Measurement

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
PICTURES = (
    ("peers-step.png", (5, 10), partial(plot.draw_peers, kind="step")),
    ("peers-loop.png", (5, 7), partial(plot.draw_peers, kind="loop")),
    ("scaling.png", (5, 13), plot.draw_curves),
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
    for name, size, draw in PICTURES:
        figure = pages.figure(*size)
        draw(figure, measurements)
        figure.savefig(given.page.with_name(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
