"""The Trainer of transformers, with a small model whose word embedding gives sparse gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import rowstep
from rowstep import DeferredAdam, SparseAdam
from tests.helpers.ratings import rivals

WORDS, RATE = 200, 0.01

RIVALS = {name: each for name, each in rivals(RATE).items() if name != "DeferredAdam"}


def classifier(*, sparse: bool = True) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=16, **size)
    model = BertForSequenceClassification(config).double()
    model.set_input_embeddings(nn.Embedding(WORDS, 16, padding_idx=0, sparse=sparse, dtype=torch.float64))
    return model


def sentences() -> list[dict[str, Any]]:
    """Seven words each; which of two kinds they are mostly of is to be found out."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (160, 7), generator=random)
    kind = torch.randint(2, (WORDS,), generator=random)
    labels = (kind[words].sum(1) > 3).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def trainer(model: Any, optimizer: Optimizer | None, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=8,
        per_device_train_batch_size=8,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy=options.pop("save_strategy", "no"),
    )
    built = Trainer(model, arguments, train_dataset=sentences(), optimizers=(optimizer, None), **options)
    if model.get_input_embeddings().sparse:
        # The Trainer computes the norm of all gradients at every step, clipped or not, and torch's function, which
        # Accelerate calls for it, refuses sparse ones.
        built.accelerator.clip_grad_norm_ = rowstep.clip_grad_norm_
    return built


def loss(trained: Trainer) -> float:
    return float(trained.evaluate(sentences())["eval_loss"])


@pytest.mark.parametrize("name", RIVALS)
def test_the_trainer(name: str, tmp_path: Path) -> None:
    ours, theirs, sparse = RIVALS[name]
    losses = []
    for make, model in ((ours, classifier()), (theirs, classifier(sparse=sparse))):
        run = trainer(model, make(model), tmp_path)
        before = loss(run)
        run.train()
        losses.append(loss(run))
        assert losses[-1] < 0.7 * before
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdam])
def test_a_class_for_the_trainer_to_make_its_optimizer_of(cls: type[Optimizer], tmp_path: Path) -> None:
    model = classifier()
    run = trainer(model, None, tmp_path, optimizer_cls_and_kwargs=(cls, {"lr": RATE}))
    before = loss(run)
    run.train()
    assert loss(run) < 0.7 * before
