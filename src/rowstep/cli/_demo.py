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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowstep import SparseAdam
from rowstep.cli import extras

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
    batches, stop = _batches(text), time.perf_counter() + arguments.seconds
    with console.status("training") as status:
        for done, batch in zip(range(1, arguments.steps + 1), batches, strict=False):
            # Taking turns at going first: the second finds the batch in the cache.
            for model in (theirs, ours) if done % 2 else (ours, theirs):
                model.step(batch)
            status.update(f"training: step {done} of {arguments.steps}, loss {ours.recent_loss:.3f}")
            if time.perf_counter() > stop:
                console.print(f"Stopped after {done} of {arguments.steps} steps: {arguments.seconds:g} s were up.")
                break
    console.print(_neighbours(ours, vocabulary))
    console.print(_comparison(ours, theirs))
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
    noise = share**0.75 / (share**0.75).sum()
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
            negatives = rng.choice(len(noise), (BATCH, NEGATIVES), p=noise)
            yield torch.tensor(centres), torch.from_numpy(np.column_stack([contexts, negatives]))


class Run:
    """Two tables, of words and of their contexts, and an optimizer that steps them; with what each step took."""

    def __init__(self, kind: Any, words: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = nn.Embedding(words, DIM, sparse=True, _weight=torch.randn(words, DIM, generator=generator) / 10)
        self.contexts = nn.Embedding(words, DIM, sparse=True, _weight=torch.zeros(words, DIM))
        self.optimizer = kind([self.words.weight, self.contexts.weight], lr=LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, total_iters=steps)
        self.losses: list[float] = []
        self.seconds: list[tuple[float, float]] = []  # of each step: the optimizer's, and all

    def _loss(self, centres: Tensor, contexts: Tensor) -> Tensor:
        """Tell the true neighbour, which comes first, from the drawn ones."""
        scores = torch.bmm(self.contexts(contexts), self.words(centres).unsqueeze(2)).squeeze(2)
        sign = torch.tensor([1.0, *[-1.0] * NEGATIVES])
        return -nn.functional.logsigmoid(sign * scores).sum(1).mean()

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self._loss(*batch)
        torch.autograd.backward(loss)
        ready = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds.append((end - ready, end - start))

    @property
    def recent_loss(self) -> float:
        return mean(self.losses[-RECENT:])


def _neighbours(run: Run, vocabulary: list[str]) -> Any:
    table = extras.table("What the vectors learned", ("word", "nearest in meaning"), ())
    unit = nn.functional.normalize(run.words.weight.detach(), dim=1)
    # The manual differs between versions of Python: a word that has become rare is left out.
    for query in filter(vocabulary.__contains__, QUERIES):
        nearest = (unit @ unit[vocabulary.index(query)]).topk(NEIGHBOURS + 1).indices.tolist()
        table.add_row(query, ", ".join(vocabulary[i] for i in nearest if vocabulary[i] != query))
    return table


def _comparison(ours: Run, theirs: Run) -> Any:
    title = "rowstep.SparseAdam and torch.optim.SparseAdam on the same batches"
    table = extras.table(title, ("",), ("rowstep", "torch", "torch / rowstep"))
    table.add_row(f"loss, last {RECENT} steps", f"{ours.recent_loss:.4f}", f"{theirs.recent_loss:.4f}")
    times = {
        "optimizer step": [median(step for step, _ in run.seconds) for run in (ours, theirs)],
        "whole training step": [median(whole for _, whole in run.seconds) for run in (ours, theirs)],
        "first step (compiles, or loads its cache)": [run.seconds[0][0] for run in (ours, theirs)],
    }
    for what, (a, b) in times.items():
        table.add_row(what, f"{a * 1e3:,.2f} ms", f"{b * 1e3:,.2f} ms", f"{b / a:.1f}x")
    weights, others = (torch.stack([run.words.weight, run.contexts.weight]).detach() for run in (ours, theirs))
    what = f"largest difference in weights (≤ {others.abs().max():.1f})"
    table.add_row(what, f"{(weights - others).abs().max():.1e}")
    return table
