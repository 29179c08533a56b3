"""A language model with hashed n-grams: https://github.com/deepseek-ai/Engram.

The last two and three tokens are hashed by several heads, each into as many rows as a prime says, all in one table. A
gate lets the rows into the hidden state as far as they suit it. Tables and layers have groups of their own.
"""

from __future__ import annotations

import random as text_about_randomness
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstep import DeferredAdamW
from tests.clients.side_by_side import Seen, assert_same_as_adam

WIDTH, BATCH, LENGTH = 12, 4, 16
PRIMES = {2: (211, 223), 3: (227, 229)}
"""For each length of n-grams, how many rows each head has."""


class Engram(nn.Module):
    """What is remembered of the n-grams that end at each position."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        sizes = torch.tensor([prime for heads in PRIMES.values() for prime in heads])
        self.starts = sizes.cumsum(0) - sizes
        self.table = nn.Embedding(int(sizes.sum()), WIDTH // 2, sparse=sparse)
        self.key, self.value = (nn.Linear(len(sizes) * WIDTH // 2, WIDTH) for _ in range(2))
        self.key_norm, self.query_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3, bias=False)

    def hashes(self, tokens: Tensor) -> Tensor:
        found = []
        for length, heads in PRIMES.items():
            mixed = torch.zeros_like(tokens)
            for back in range(length):
                mixed ^= functional.pad(tokens, (back, 0))[:, : tokens.shape[1]] * (2 * 7919**back + 1)
            found += [mixed % prime for prime in heads]
        return torch.stack(found, -1) + self.starts

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        memory = self.table(self.hashes(tokens)).flatten(-2)
        gate = (self.key_norm(self.key(memory)) * self.query_norm(hidden)).sum(-1, keepdim=True) / WIDTH**0.5
        value = gate.sigmoid() * self.value(memory)
        spread = self.conv(value.transpose(1, 2))[..., : value.shape[1]].transpose(1, 2)
        return value + functional.silu(spread)


class LanguageModel(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.engram = Engram(sparse)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 128)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.engram(hidden, tokens)
        return self.head(hidden + self.feed_forward(hidden))


def text() -> Tensor:
    """A page of English that comes with Python, as batches of sequences of characters."""
    page = torch.tensor([ord(char) % 128 for char in (text_about_randomness.__doc__ or "") * 3])
    size = BATCH * (LENGTH + 1)
    return page[: len(page) // size * size].view(-1, BATCH, LENGTH + 1)


def train(make: Any, sparse: bool, seen: Seen, table_decay: float = 0.0) -> None:
    model = LanguageModel(sparse)
    table = model.engram.table.weight
    layers = [param for param in model.parameters() if param is not table]
    optimizer = make([{"params": layers}, {"params": [table], "lr": 2e-2, "weight_decay": table_decay}], lr=4e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for batch in text()[:42]:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        warm_up.step()
        seen.after_step(loss.detach(), model, optimizer)


@pytest.mark.parametrize("table_decay", [0.0, 0.1])
def test_deferred_adamw(table_decay: float) -> None:
    name, decayed = f"Engram, DeferredAdamW, table decay {table_decay}", partial(train, table_decay=table_decay)
    assert_same_as_adam(name, decayed, DeferredAdamW, torch.optim.AdamW)
