"""`rowstep inspect`: what a checkpoint holds for each parameter, without the model or the optimizer that wrote it.

A file is read as a stranger's: nothing in it is executed, no size is believed before it is held against the file, and
tables are read block by block. See `reading` for the formats.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rowstep.cli import extras

ABOUT = "show what a checkpoint holds: weights, optimizer state, rows touched"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, help="a torch.save file, a torch.distributed.checkpoint directory, a .npz or a .safetensors"
    )
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument(
        "--plot", type=Path, default=Path("out/inspect.png"), help="where the histograms go (default: out/inspect.png)"
    )
    plot.add_argument("--no-plot", action="store_true", help="draw no picture")


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    figure = None if arguments.no_plot else extras.figure(9, 3)

    from rowstep.cli._inspect import contents, histograms, parameters, plot, reading, report
    from rowstep.cli._inspect.text import printable

    try:
        found = contents.of(reading.read(arguments.path))
        described = parameters.of(found)
        drawn = histograms.of(described)
    except reading.UnreadableError as error:
        print(f"rowstep: {printable(str(arguments.path), 1000)}: {printable(str(error), 1000)}", file=sys.stderr)
        return 1
    for part in report.parts(found, described, drawn, console):
        console.print(part)
    if figure is None or not drawn.shown:
        return 0
    try:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        plot.draw(figure, drawn.shown)
        figure.savefig(arguments.plot, format="png")
    except OSError as error:
        print(f"rowstep: {arguments.plot}: the picture cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    console.print(f"Histograms: {arguments.plot}", soft_wrap=True, markup=False, highlight=False)
    return 0
