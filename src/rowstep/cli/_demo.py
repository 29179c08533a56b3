"""`rowstep demo`: word vectors from Python's own manual, trained twice on the same batches.

Skip-gram with negative sampling is the classic user of sparse gradients: two tables, and a step that touches the words
of one batch. One model is stepped by rowstep, its twin by torch; they take turns, so that noise disturbs both.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rowstep import SparseAdam
from rowstep.cli import extras

if TYPE_CHECKING:
    from rich.console import Console

LEARNING_RATE, DIM, BATCH = 0.01, 64, 4096
RECENT = 50  # steps averaged into the loss that is shown
WINDOW = NEGATIVES = NEIGHBOURS = 5
RARE = 8  # words seen less often get no vector: they have too few contexts to learn from
FREQUENT = 1e-3  # above this share of the text, occurrences of a word ("the") are thinned out
QUERIES = ("class", "exception", "import", "dictionary", "async", "float", "true", "left", "unicode", "loop")


def run(arguments: argparse.Namespace) -> int:
    console = extras.console()
    vocabulary, text = _python_manual()
    sizes = f"two tables of {len(vocabulary):,} x {DIM}, {BATCH:,} word pairs a step"
    console.print(f"Python's manual: {len(text):,} words, {len(vocabulary):,} different; {sizes}.")
    ours, theirs = (Run(kind, len(vocabulary), arguments.steps) for kind in (SparseAdam, torch.optim.SparseAdam))
    batches = _batches(text)
    stop = time.perf_counter() + arguments.seconds
    with console.status("training") as status:
        for number in range(arguments.steps):
            batch = next(batches)
            # Taking turns at going first: the second finds the batch in the cache.
            for model in (ours, theirs) if number % 2 else (theirs, ours):
                model.step(batch)
            status.update(f"training: step {number + 1} of {arguments.steps}, loss {ours.recent_loss:.3f}")
            if time.perf_counter() > stop:
                console.print(
                    f"Stopped after {number + 1} of {arguments.steps} steps: {arguments.seconds:g} s were up."
                )
                break
    _show(ours, theirs, vocabulary, console)
    return 0


def _python_manual() -> tuple[list[str], np.ndarray]:
    """The vocabulary, most frequent first, and the text as positions in it."""
    # Chapters of the manual repeat each other's paragraphs; a paragraph seen twice would pull its words together twice.
    paragraphs = dict.fromkeys(part for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    text = [word for part in paragraphs for word in re.findall(r"__[a-z]+__|[a-z]{2,}", part.lower())]
    vocabulary = [word for word, count in Counter(text).most_common() if count >= RARE]
    position = {word: i for i, word in enumerate(vocabulary)}
    return vocabulary, np.array([position[word] for word in text if word in position])


def _batches(text: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: words, and for each a true neighbour and drawn ones. Every pass is thinned and shuffled anew."""
    rng = np.random.default_rng(0)
    share = np.bincount(text) / len(text)
    keep = np.sqrt(FREQUENT / share).clip(max=1)
    noise = np.cumsum(share**0.75)
    noise /= noise[-1]
    while True:
        thinned = text[rng.random(len(text)) < keep[text]]
        found = []
        for distance in range(1, WINDOW + 1):  # the near ones more often, as word2vec draws them
            left, right = thinned[:-distance], thinned[distance:]
            kept = rng.random(len(left)) < 1 - (distance - 1) / WINDOW
            found += [np.column_stack([left, right])[kept], np.column_stack([right, left])[kept]]
        pairs = rng.permutation(np.concatenate(found))
        for start in range(0, len(pairs) - BATCH + 1, BATCH):
            centres, contexts = pairs[start : start + BATCH].T
            negatives = np.searchsorted(noise, rng.random((BATCH, NEGATIVES)))
            yield torch.tensor(centres), torch.from_numpy(np.column_stack([contexts, negatives]))


class SkipGram(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, DIM, sparse=True)
        self.contexts = nn.Embedding(words, DIM, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, centres: Tensor, contexts: Tensor) -> Tensor:
        """The loss of each pair: tell the true neighbour, which comes first, from the drawn ones."""
        scores = torch.bmm(self.contexts(contexts), self.words(centres).unsqueeze(2)).squeeze(2)
        sign = torch.tensor([1.0, *[-1.0] * NEGATIVES])
        return -nn.functional.logsigmoid(sign * scores).sum(1).mean()


class Run:
    def __init__(self, kind: type[torch.optim.Optimizer], words: int, steps: int) -> None:
        torch.manual_seed(0)
        self.model = SkipGram(words)
        # Optimizer itself has no default for lr, though both of its subclasses here do.
        self.optimizer = kind(self.model.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, total_iters=steps)
        self.losses: list[float] = []
        self.optimizer_seconds: list[float] = []
        self.training_seconds: list[float] = []

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        ready = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.schedule.step()
        self.losses.append(loss.item())
        self.optimizer_seconds.append(end - ready)
        self.training_seconds.append(end - start)

    @property
    def recent_loss(self) -> float:
        return mean(self.losses[-RECENT:])


def _show(ours: Run, theirs: Run, vocabulary: list[str], console: Console) -> None:
    from rich.table import Table

    table = Table("word", "nearest in meaning", title="What the vectors learned")
    unit = nn.functional.normalize(ours.model.words.weight.detach(), dim=1)
    for query in QUERIES:
        # The manual differs between versions of Python: a word that has become rare is left out.
        if query in vocabulary:
            nearest = (unit @ unit[vocabulary.index(query)]).topk(NEIGHBOURS + 1).indices.tolist()
            table.add_row(query, ", ".join(vocabulary[i] for i in nearest if vocabulary[i] != query))
    console.print(table)
    table = Table("", title="rowstep.SparseAdam and torch.optim.SparseAdam on the same batches")
    for heading in ("rowstep", "torch", "torch / rowstep"):
        table.add_column(heading, justify="right")
    table.add_row(f"loss, last {RECENT} steps", f"{ours.recent_loss:.4f}", f"{theirs.recent_loss:.4f}")
    for what, mine, other in (
        ("optimizer step", ours.optimizer_seconds, theirs.optimizer_seconds),
        ("whole training step", ours.training_seconds, theirs.training_seconds),
        ("first step (compiles, or loads its cache)", ours.optimizer_seconds[:1], theirs.optimizer_seconds[:1]),
    ):
        a, b = median(mine), median(other)
        table.add_row(what, f"{a * 1e3:,.2f} ms", f"{b * 1e3:,.2f} ms", f"{b / a:.1f}x")
    pairs = list(zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    difference = max((a - b).abs().max().item() for a, b in pairs)
    largest = max(b.abs().max().item() for _, b in pairs)
    table.add_row(f"largest difference in weights (≤ {largest:.1f})", f"{difference:.1e}")
    console.print(table)
