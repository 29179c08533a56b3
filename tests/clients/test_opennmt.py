"""OpenNMT-py's ``optim: sparseadam``: https://github.com/OpenNMT/OpenNMT-py, onmt/utils/optimizers.py.

Embeddings go to SparseAdam, the other parameters to Adam, and its MultipleOptimizer holds and steps both. One
rowstep.SparseAdam takes the place of all three. The learning rate follows "noam", written into the groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstep
from tests.clients.side_by_side import Seen, assert_same_run
from tests.helpers.ratings import TorchsTwo

WORDS, WIDTH, LENGTH, PAD = 120, 8, 6, 0


def one_optimizer(model: nn.Module, **options: Any) -> rowstep.SparseAdam:
    return rowstep.SparseAdam(model.parameters(), **options)


class Translator(nn.Module):
    """Reads a sentence, and writes it word by word. Target words are given one behind."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.source_embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD, sparse=sparse)
        self.target_embed = nn.Embedding(WORDS, WIDTH, padding_idx=PAD, sparse=sparse)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.generator = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source_embed(source))[1]
        logits = self.generator(self.decoder(self.target_embed(target[:, :-1]), memory)[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def sentences(count: int) -> list[tuple[Tensor, Tensor]]:
    """The target language is the source language with its words in reverse order; sentences are padded to a length."""
    random = torch.Generator().manual_seed(1)
    source = (WORDS ** torch.rand(count, 8, LENGTH, generator=random)).long().clamp_min(1)
    source[:, ::2, LENGTH - 2 :] = PAD
    return list(zip(source, source.flip(2), strict=True))


def train(make: Any, sparse: bool, seen: Seen, clip: Any = None) -> None:
    model = Translator(sparse)
    optimizer = make(model, lr=2.0, betas=(0.9, 0.998), eps=1e-8)
    for step, (source, target) in enumerate(sentences(40), start=1):
        for group in optimizer.param_groups:
            group["lr"] = 2.0 * WIDTH**-0.5 * min(step**-0.5, step * 20**-1.5)
        optimizer.zero_grad()
        loss = model(source, target)
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
        seen.after_step(loss.detach(), model, optimizer)


def test_two_optimizers_become_one() -> None:
    assert_same_run("OpenNMT-py, SparseAdam", train, TorchsTwo, one_optimizer)


def test_clipping() -> None:
    """``max_grad_norm``: torch's function raises on sparse gradients, ours clips the norm of all of them."""

    clipped = partial(train, clip=rowstep.clip_grad_norm_)
    with pytest.raises(NotImplementedError, match="Sparse"):
        train(TorchsTwo, True, Seen(), nn.utils.clip_grad_norm_)
    assert_same_run("OpenNMT-py, SparseAdam, clipped", clipped, TorchsTwo, one_optimizer)
