"""engram-peft's trainer, with tables on the CPU: the code of docs/trainers.md, and what it claims."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions
from torch import nn

if sys.version_info < (3, 12):  # engram-peft 1.2.7 claims to run on 3.10, and imports this
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

from engram_peft import EngramConfig, EngramModel, EngramTrainer, get_engram_model, trl
from engram_peft.utils import apply_group_wise_clipping
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import rowstep
from tests.helpers.doc_readers import run_page

WORDS = 200


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWSTEP_BACKEND", "reference")


def test_the_recipes_run(tmp_path: Path) -> None:
    run_page("docs/trainers.md", tmp_path)


def model() -> EngramModel:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, **size))
    config = EngramConfig(
        engram_vocab_size_per_ngram=[101, 101], n_head_per_ngram=2, embedding_dim=16, target_layers=[1], hidden_size=16,
        hc_mult=1, enable_tokenizer_compression=False, compressed_vocab_size=WORDS, pad_id=0, conv_zero_init=False,
        gating_zero_init=False,
    )  # fmt: skip
    return get_engram_model(llama, config)


def trained(optimizer: Any, folder: Path) -> torch.Tensor:
    """The table after some steps."""
    engram = model()
    text = torch.randint(1, WORDS, (32, 12), generator=torch.Generator().manual_seed(1))
    options = TrainingArguments(
        str(folder), max_steps=6, learning_rate=1e-2, max_grad_norm=1e9, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": words, "labels": words} for words in text]
    EngramTrainer(engram, options, train_dataset=data, optimizer_kwargs={"engram_sparse_optimizer": optimizer}).train()
    (table,) = (param for name, param in engram.named_parameters() if "multi_head_embedding.embedding.weight" in name)
    found: torch.Tensor = table.detach()
    return found


def test_our_class_steps_as_theirs_does(tmp_path: Path) -> None:
    ours, theirs = (trained(optimizer, tmp_path) for optimizer in (rowstep.SparseAdam, "sparse_adam"))
    assert not torch.equal(ours, trained(rowstep.DeferredAdam, tmp_path))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_neither_of_their_ways_clips_a_sparse_gradient() -> None:
    """If this fails, they have mended it: docs/trainers.md then has a paragraph too many."""
    table = nn.Embedding(10, 4, sparse=True)
    options = type("Options", (), {"max_grad_norm": 1.0})()
    trainer: Any = type("Trainer", (), {"args": options, "_compute_total_norm": EngramTrainer._compute_total_norm})()

    def norm_after(clip: Any) -> float:
        table.weight.grad = None
        torch.autograd.backward(table(torch.tensor([3, 5, 3])).sum())
        clip()
        assert table.weight.grad is not None
        return table.weight.grad.coalesce().values().norm().item()

    unclipped = pytest.approx(20**0.5)
    assert norm_after(lambda: EngramTrainer._clip_grad_norm(trainer, table)) == unclipped
    assert norm_after(lambda: apply_group_wise_clipping({"tables": [table.weight]}, 1.0)) == unclipped
    assert norm_after(lambda: trl.EngramCompatibleSFTTrainer._clip_grad_norm(trainer, table)) == unclipped
    assert norm_after(lambda: rowstep.clip_grad_norm_(table.parameters(), 1.0)) == pytest.approx(1)
