"""RecBole: https://github.com/RUCAIBox/RecBole, its BPR on the MovieLens 100k data that its wheel ships.

Its trainer takes the optimizer's class from ``import torch.optim as optim``; that import is the line that changes.
BPR's gradients are dense, so that ``learner: sparse_adam`` raises with torch's class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recbole.trainer.trainer
import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.trainer import Trainer
from recbole.utils import init_seed
from torch import Tensor

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Seen, assert_same_run

# RecBole 1.2.1 was written for NumPy 1, pandas 2 and an earlier torch, and warns of what has changed since.
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = {
    "epochs": 1,
    "use_gpu": False,
    "show_progress": False,
    "train_batch_size": 512,  # a quarter of the default, so that most rows wait now and then
    "learning_rate": 0.01,  # ten times the default, so that one epoch is enough to learn something
    "metric_decimal_place": 15,
    "metrics": ["Recall", "MRR", "NDCG", "Hit", "Precision"],
}


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Where RecBole finds no arguments but ours, writes its logs, has the names that NumPy 2 removed, and float64."""
    monkeypatch.setattr(sys, "argv", ["recbole"])
    monkeypatch.chdir(tmp_path)
    for name, still_there in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        monkeypatch.setattr(np, name, still_there, raising=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class WatchedBPR(BPR):  # type: ignore[misc]
    """BPR that remembers its last loss, and may have sparse gradients."""

    def __init__(self, config: Config, dataset: Any, sparse: bool) -> None:
        super().__init__(config, dataset)
        self.user_embedding.sparse = self.item_embedding.sparse = sparse

    def calculate_loss(self, interaction: Any) -> Tensor:
        self.last_loss = super().calculate_loss(interaction)
        return self.last_loss


def run(learner: str, sparse: bool, seen: Seen) -> Any:
    """RecBole's own steps, as its documentation has them for custom models. Returns the metrics."""
    config = Config(model="BPR", dataset="ml-100k", config_dict={**OPTIONS, "learner": learner})
    init_seed(config["seed"], config["reproducibility"])
    train_data, valid_data, test_data = data_preparation(config, create_dataset(config))
    init_seed(config["seed"], config["reproducibility"])
    model = WatchedBPR(config, train_data.dataset, sparse)
    trainer = Trainer(config, model)
    trainer.optimizer.register_step_post_hook(
        lambda optimizer, *_: seen.after_step(model.last_loss.detach(), model, optimizer)
    )
    _, valid = trainer.fit(train_data, valid_data, saved=False, verbose=False)
    return valid, trainer.evaluate(test_data, load_best_model=False)


def assert_same_metrics(program: str, learner: str, monkeypatch: pytest.MonkeyPatch, ours: Any, **how: Any) -> None:
    metrics = []

    def train(optim: Any, sparse: bool, seen: Seen) -> None:
        monkeypatch.setattr(recbole.trainer.trainer, "optim", optim)
        metrics.append(run(learner, sparse, seen))

    assert_same_run(program, train, torch.optim, ours, every=10, **how)
    assert metrics[0] == metrics[1]
    assert metrics[0][1]["recall@10"] > 0.05


def test_sparse_adam_needs_force_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients are dense, ours does what torch's does in a BPR that was written with sparse ones."""
    with pytest.raises(RuntimeError, match="dense gradients"):
        run("sparse_adam", False, Seen())
    ours = SimpleNamespace(SparseAdam=partial(SparseAdam, force_sparse=True))
    assert_same_metrics("RecBole, SparseAdam(force_sparse=True)", "sparse_adam", monkeypatch, ours, ours_sparse=False)


def test_deferred_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(Adam=DeferredAdam)
    assert_same_metrics("RecBole, DeferredAdam", "adam", monkeypatch, ours, theirs_sparse=False)
