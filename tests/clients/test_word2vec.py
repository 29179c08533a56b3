"""word2vec as it is often written in PyTorch: https://github.com/Andras7/word2vec-pytorch.

Two sparse tables; each epoch has a new optimizer and a new cosine schedule, which is stepped before every batch, so
that the last batch of an epoch has an lr of 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Seen, assert_same_as_adam, assert_same_run

WORDS, WIDTH, NOISE = 300, 8, 5

# The program steps its schedule first, and torch says that it should not.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")


class SkipGram(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.centre = nn.Embedding(WORDS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.context = nn.Embedding(WORDS, WIDTH, sparse=sparse, dtype=torch.float64)
        nn.init.uniform_(self.centre.weight.data, -1 / WIDTH, 1 / WIDTH)
        nn.init.zeros_(self.context.weight.data)

    def forward(self, word: Tensor, neighbour: Tensor, noise: Tensor) -> Tensor:
        centre = self.centre(word)
        score = (centre * self.context(neighbour)).sum(1).clamp(-10, 10)
        noise_score = (self.context(noise) @ centre.unsqueeze(2)).squeeze(2).clamp(-10, 10)
        return -(functional.logsigmoid(score) + functional.logsigmoid(-noise_score).sum(1)).mean()


def corpus() -> TensorDataset:
    """Pairs of words that are close in a text, with noise drawn for each. Few words are frequent, as in any text."""
    random = torch.Generator().manual_seed(1)
    word = (WORDS ** torch.rand(640, generator=random, dtype=torch.float64)).long() - 1
    neighbour = (word + torch.randint(1, 4, word.shape, generator=random)) % WORDS
    return TensorDataset(word, neighbour, torch.randint(WORDS, (len(word), NOISE), generator=random))


def train(make: Any, sparse: bool, seen: Seen) -> None:
    model = SkipGram(sparse)
    batches = DataLoader(corpus(), batch_size=64, shuffle=True)
    for _ in range(4):
        optimizer = make(model.parameters(), lr=0.02)
        scheduler = CosineAnnealingLR(optimizer, len(batches))
        for word, neighbour, noise in batches:
            scheduler.step()
            optimizer.zero_grad()
            loss = model(word, neighbour, noise)
            loss.backward()
            optimizer.step()
            seen.after_step(loss.detach(), model, optimizer)


def test_sparse_adam() -> None:
    assert_same_run("word2vec, SparseAdam", train, torch.optim.SparseAdam, SparseAdam)


def test_deferred_adam() -> None:
    assert_same_as_adam("word2vec, DeferredAdam", train, DeferredAdam)
