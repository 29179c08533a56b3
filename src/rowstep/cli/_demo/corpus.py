"""Python's language reference as training data: it ships with every interpreter, so the demo downloads nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]

WINDOW = 5
NEGATIVES = 5
RARE = 8  # words seen less often get no vector: they have too few contexts to learn from
FREQUENT = 1e-3  # above this share of the text, occurrences of a word ("the") are thinned out


@dataclass(frozen=True)
class Words:
    vocabulary: list[str]  # most frequent first
    ids: Ids  # the text, as positions in the vocabulary


@dataclass(frozen=True)
class Batch:
    centres: torch.Tensor  # (batch,)
    contexts: torch.Tensor  # (batch, 1 + NEGATIVES): the true neighbour, then the drawn ones


def python_manual() -> Words:
    # Chapters of the manual repeat each other's paragraphs; a paragraph seen twice would pull its words together twice.
    paragraphs = dict.fromkeys(part for topic in topics.values() for part in re.split(r"\n\s*\n", topic))
    text = [word for part in paragraphs for word in re.findall(r"__[a-z]+__|[a-z]{2,}", part.lower())]
    vocabulary = [word for word, count in Counter(text).most_common() if count >= RARE]
    position = {word: i for i, word in enumerate(vocabulary)}
    return Words(vocabulary, np.array([position[word] for word in text if word in position]))


def batches(words: Words, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of word pairs with negatives; every pass over the text is thinned and shuffled anew."""
    rng = np.random.default_rng(seed)
    counts = np.bincount(words.ids)
    share = counts / counts.sum()
    keep = np.sqrt(FREQUENT / share).clip(max=1)
    noise = np.cumsum(share**0.75)
    noise /= noise[-1]
    while True:
        text = words.ids[rng.random(len(words.ids)) < keep[words.ids]]
        pairs = rng.permutation(_pairs(text, rng))
        if len(pairs) < size:
            raise ValueError(
                f"the batch has {size:,} pairs; expected at most {len(pairs):,}, all pairs of the text. "
                "Pass a smaller --batch"
            )
        for start in range(0, len(pairs) - size + 1, size):
            centres, contexts = pairs[start : start + size].T
            negatives = np.searchsorted(noise, rng.random((size, NEGATIVES)))
            contexts = np.column_stack([contexts, negatives])
            yield Batch(torch.tensor(centres), torch.from_numpy(contexts))


def _pairs(text: Ids, rng: np.random.Generator) -> Ids:
    """(centre, context) for words up to WINDOW apart, the near ones more often, as word2vec draws them."""
    found = []
    for distance in range(1, WINDOW + 1):
        left, right = text[:-distance], text[distance:]
        kept = rng.random(len(left)) < 1 - (distance - 1) / WINDOW
        found += [np.column_stack([left, right])[kept], np.column_stack([right, left])[kept]]
    return np.concatenate(found)
