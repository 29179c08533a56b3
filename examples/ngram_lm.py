"""A language model that looks up what followed the last words, in a table of 10 million rows in a file.

    python examples/ngram_lm.py    # --quick: half a minute on less text

The text is Python's own manual, predicted byte by byte. A small network reads the last eight bytes. A hashed table adds
what it remembers of the last two words, and of the last three: it needs no vocabulary, and a batch of 4,096 bytes reads
at most 8,192 of its rows. It is a safetensors file in bfloat16, so it may be larger than memory, and the optimizer
keeps one number for each row. The same network without the table is trained first, for comparison.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from rowstep import HostEmbedding, SparseAdam, prefetched, storage

SEEN = 8  # bytes


class Batch(NamedTuple):
    last: Tensor
    """The bytes before each byte: (batch, SEEN)."""
    ngrams: Tensor
    """Rows for the last two and the last three words: (batch, 2)."""
    following: Tensor
    """The bytes to be predicted: (batch,)."""


class Text(Dataset[Batch]):
    """Every byte of a text, with what comes before it."""

    def __init__(self, text: bytes, rows: int) -> None:
        encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        last, ngrams = encoded.unfold(0, SEEN, 1)[:-1], hashed_ngrams(text, rows)[SEEN - 1 : -1]
        self.all = Batch(last, ngrams, encoded[SEEN:])

    def __len__(self) -> int:
        return len(self.all.following)

    def __getitem__(self, places: list[int]) -> Batch:
        return Batch(*(part[places] for part in self.all))

    def batches(self) -> DataLoader[Batch]:
        return DataLoader(self, batch_size=None, sampler=BatchSampler(RandomSampler(self), 4096, drop_last=False))


def hashed_ngrams(text: bytes, rows: int) -> Tensor:
    """For each byte two rows: the word up to there with the one before it, and with the two before it.

    Either kind has one half of the table to itself.
    """
    found, half = [], rows // 2
    word = last = last_but_one = 0
    for byte in text:
        if chr(byte).isalnum():
            word = hash((word, byte))
        else:  # whatever is between words is a word of its own
            last_but_one, last, word = last, word, hash((0, byte))
        found.append((hash((last, word)) % half, half + hash((last_but_one, last, word)) % half))
    return torch.tensor(found)


class LanguageModel(nn.Module):
    def __init__(self, table: HostEmbedding | None, width: int = 192) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 24)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(24 * SEEN, width), nn.GELU())
        self.head = nn.Linear(width, 256)
        self.table = table
        if table is not None:
            # Without it, the model relies on n-grams of the training text that no other text has: 2.13, not 1.88 bits.
            self.forget = nn.Dropout1d(0.5)
            self.recall = nn.Sequential(nn.Flatten(), nn.Linear(2 * table.embedding_dim, width, bias=False))

    def forward(self, batch: Batch) -> Tensor:
        """The loss, in bits per byte."""
        hidden = self.network(self.bytes(batch.last))
        if self.table is not None:
            hidden = hidden + self.recall(self.forget(self.table(batch.ngrams).float()))
        return nn.functional.cross_entropy(self.head(hidden), batch.following) / math.log(2)


def train(model: LanguageModel, text: Text, held_out: Text, epochs: int) -> float:
    """Train; return the bits per byte of the held-out text."""
    ids_of: dict[HostEmbedding, Any] = {}
    groups: list[dict[str, Any]] = [
        {"params": [param for name, param in model.named_parameters() if name != "table.weight"]}
    ]
    if model.table is not None:
        small_state = {"second_moment": "row", "betas": (0, 0.99), "stochastic_rounding": True}
        groups.append({"params": [model.table.weight], **small_state})
        ids_of[model.table] = lambda batch: batch.ngrams
    optimizer = SparseAdam(groups, lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    start, reached = time.perf_counter(), math.nan
    for epoch in range(1, epochs + 1):
        for batch in prefetched(text.batches(), ids_of):  # rows are read and stepped while the network computes
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
        schedule.step()
        reached = bits_per_byte(model, held_out)
        print(f"  epoch {epoch} of {epochs}, {time.perf_counter() - start:4.0f} s: {reached:.3f} bits per byte")
    return reached


@torch.no_grad()
def bits_per_byte(model: LanguageModel, text: Text) -> float:
    model.eval()
    bits: float = sum(model(batch).item() * len(batch.following) for batch in text.batches())
    model.train()
    return bits / len(text)


def manual(share: float) -> tuple[bytes, bytes]:
    """A part of the manual, and every tenth paragraph of it, which is held out."""
    # Chapters repeat each other's paragraphs. One that is both learned and held out would be no test.
    paragraphs = list(dict.fromkeys(part for topic in topics.values() for part in re.split(r"\n\s*\n", topic)))
    parts = [part.encode() for part in paragraphs[: int(share * len(paragraphs))]]
    held_out = parts[::10]
    del parts[::10]
    return b"\n\n".join(parts), b"\n\n".join(held_out)


def main(rows: int = 10_000_000, epochs: int = 6, share: float = 1.0) -> tuple[float, float]:
    """Train; return the bits per byte of the held-out text without and with the table."""
    text, held_out = (Text(part, rows) for part in manual(share))
    print(f"{len(text):,} bytes of text, {len(held_out):,} held out")
    print("without the table")
    torch.manual_seed(0)
    without = train(LanguageModel(None), text, held_out, epochs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ngrams.safetensors")
        storage.create(path, rows, 16, torch.bfloat16)  # zeros, so that n-grams never seen say nothing
        print(f"with {rows:,} rows in {path}")
        torch.manual_seed(0)
        table = HostEmbedding(rows, 16, dtype=torch.bfloat16, path=path)
        reached = train(LanguageModel(table), text, held_out, epochs)
    print(f"{without:.3f} bits per byte without the table, {reached:.3f} with it")
    return without, reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a fifth of the text, a hundredth of the rows")
    if parser.parse_args().quick:
        main(rows=100_000, epochs=4, share=0.2)
    else:
        main()
