"""minnt's LazyAdam: https://github.com/ufal/minnt, a trainer for courses and research in language technology.

``LazyAdam(module)`` makes all embeddings sparse, and holds torch's SparseAdam for them and Adam for the rest. Here the
package itself trains, with its own schedule, and one rowstep.SparseAdam takes the place of LazyAdam.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import minnt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rowstep import SparseAdam
from tests.clients.side_by_side import Seen, assert_same_run

WORDS, SUFFIXES, TAGS, WIDTH, LENGTH, EPOCHS = 200, 30, 5, 8, 6, 4


class Tagger(minnt.TrainableModule):  # type: ignore[misc]
    """Tags the words of a sentence, each seen as a word and as a bag of suffixes."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.suffixes = nn.EmbeddingBag(SUFFIXES, WIDTH, mode="sum")
        self.context = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.tags = nn.Linear(WIDTH, TAGS)
        self.show = seen.after_step
        self.double()

    def forward(self, words: Tensor, suffixes: Tensor) -> Tensor:
        bags = self.suffixes(suffixes.flatten(0, 1)).view(*words.shape, WIDTH)
        tags = self.tags(self.context(torch.cat([self.words(words), bags], -1))[0])
        return tags.movedim(-1, 1)

    def compute_loss(self, *args: Any) -> Tensor:
        self.last_loss = super().compute_loss(*args)
        return self.last_loss

    def train_step(self, xs: Any, y: Any) -> Any:
        logs = super().train_step(xs, y)
        self.show(self.last_loss.detach(), self, getattr(self.optimizer, "optimizers", self.optimizer))
        return logs


def sentences() -> TensorDataset:
    words = torch.randint(WORDS, (96, LENGTH), generator=torch.Generator().manual_seed(1))
    suffixes = torch.stack([words % SUFFIXES, words // 7 % SUFFIXES], -1)
    return TensorDataset(words, suffixes, words % TAGS)


def batch_of(rows: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    words, suffixes, tags = (torch.stack(column) for column in zip(*rows, strict=True))
    return (words, suffixes), tags


def train(make: Any, sparse: bool, seen: Seen) -> None:
    batches = DataLoader(sentences(), batch_size=8, shuffle=True, collate_fn=batch_of)
    tagger = Tagger(seen)
    optimizer, loss = make(tagger), minnt.losses.CategoricalCrossEntropy()
    scheduler = minnt.schedulers.CosineDecay(optimizer, EPOCHS * len(batches), warmup=0.1)
    tagger.configure(optimizer=optimizer, scheduler=scheduler, loss=loss, device="cpu")
    tagger.fit(batches, epochs=EPOCHS, console=0)


def sparse_adam(module: Tagger) -> SparseAdam:
    module.words.sparse = module.suffixes.sparse = True
    return SparseAdam(module.parameters(), lr=0.01, eps=1e-7)  # LazyAdam's eps


def test_lazy_adam() -> None:
    assert_same_run("minnt, SparseAdam", train, partial(minnt.optimizers.LazyAdam, lr=0.01), sparse_adam)
