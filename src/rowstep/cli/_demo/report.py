"""What the demo shows at the end: neighbours of some words, the two runs side by side, their loss curves."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from rowstep.cli._demo.corpus import Words
from rowstep.cli._demo.train import RECENT, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

QUERIES = ("class", "exception", "import", "dictionary", "async", "float", "true", "left", "unicode", "loop")


def neighbours(words: Words, vectors: Tensor, count: int = 5) -> Table:
    from rich.table import Table

    table = Table("word", "nearest in meaning", title="What the vectors learned")
    position = {word: i for i, word in enumerate(words.vocabulary)}
    unit = nn.functional.normalize(vectors, dim=1)
    for query in QUERIES:
        # The manual differs between versions of Python: a word that has become rare is left out.
        if query in position:
            nearest = (unit @ unit[position[query]]).topk(count + 1).indices.tolist()
            table.add_row(query, ", ".join(words.vocabulary[i] for i in nearest if i != position[query]))
    return table


def comparison(ours: Run, theirs: Run) -> Table:
    from rich.table import Table

    table = Table("", "rowstep", "torch", "torch / rowstep", title=f"{ours.name} and {theirs.name} on the same batches")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(f"loss, last {RECENT} steps", f"{ours.recent_loss:.4f}", f"{theirs.recent_loss:.4f}", "")
    table.add_row("optimizer step", *_times(ours.optimizer_seconds, theirs.optimizer_seconds))
    table.add_row("whole training step", *_times(ours.training_seconds, theirs.training_seconds))
    table.add_row(
        "first step (compiles, or loads its cache)", *_times(ours.optimizer_seconds[:1], theirs.optimizer_seconds[:1])
    )
    pairs = list(zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    difference = max((a - b).abs().max().item() for a, b in pairs)
    largest = max(b.abs().max().item() for _, b in pairs)
    table.add_row(f"largest difference in weights (≤ {largest:.1f})", f"{difference:.1e}", "", "")
    return table


def _times(ours: list[float], theirs: list[float]) -> tuple[str, str, str]:
    mine, other = median(ours), median(theirs)
    return f"{mine * 1e3:,.2f} ms", f"{other * 1e3:,.2f} ms", f"{other / mine:.1f}x"


def draw_losses(figure: Figure, ours: Run, theirs: Run) -> None:
    axes = figure.subplots()
    # The curves coincide; torch's is a wide band below, so that both are seen.
    axes.plot(*_smooth(theirs.losses), color="#f2a65a", linewidth=6, label=theirs.name)
    axes.plot(*_smooth(ours.losses), color="#1b4d7a", linewidth=1.5, label=ours.name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per word pair")
    axes.set_title("Word vectors of Python's manual: training loss under the two optimizers")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _smooth(losses: list[float], width: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each `width` steps: single batches jitter by more than the curve falls late in training."""
    width = min(width, len(losses))
    groups = np.array(losses[: len(losses) // width * width]).reshape(-1, width)
    return (np.arange(len(groups)) + 0.5) * width, groups.mean(1)
