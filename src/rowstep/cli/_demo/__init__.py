"""`rowstep demo`: word vectors from Python's own manual, trained twice on the same batches.

Skip-gram with negative sampling is the classic user of sparse gradients: two tables, and a step that touches the words
of one batch. One model is stepped by rowstep, its twin by torch; they take turns, so that noise disturbs both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rowstep.cli import extras
from rowstep.cli.arguments import positive

ABOUT = "train word vectors on Python's manual with rowstep and with torch, side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the loss curve goes (default: out)")
    parser.add_argument("--steps", type=positive, default=800, help="training steps (default: 800)")
    parser.add_argument("--seconds", type=float, default=45, help="stop training after this long (default: 45)")
    parser.add_argument("--batch", type=positive, default=4096, help="word pairs per step (default: 4096)")
    parser.add_argument("--dim", type=positive, default=64, help="numbers per word vector (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    plot = extras.figure(8, 4.5)

    from rowstep.cli._demo import corpus, report, train

    words = corpus.python_manual()
    console.print(
        f"Python's manual: {len(words.ids):,} words, {len(words.vocabulary):,} different. "
        f"Two tables of {len(words.vocabulary):,} x {arguments.dim}, {arguments.batch:,} word pairs a step."
    )
    settings = train.Settings(arguments.steps, arguments.seconds, arguments.batch, arguments.dim, arguments.seed)
    ours, theirs = train.side_by_side(words, settings, console)
    if len(ours.losses) < settings.steps:
        console.print(f"Stopped after {len(ours.losses)} of {settings.steps} steps: {settings.seconds:g} s were up.")

    console.print(report.neighbours(words, ours.model.words.weight.detach()))
    console.print(report.comparison(ours, theirs))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "demo_loss.png"
    report.draw_losses(plot, ours, theirs)
    plot.savefig(path)
    console.print(f"Loss curves: {path}", soft_wrap=True)
    return 0
