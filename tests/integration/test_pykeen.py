"""PyKEEN's pipeline on the data sets that come with it. Its gradients are dense; force_sparse makes rows of them."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pykeen.pipeline import PipelineResult, pipeline
from torch.optim import Optimizer

from rowstep import SparseAdam

pytestmark = pytest.mark.filterwarnings("ignore:Training instances are always shuffled:DeprecationWarning")

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = [("Nations", "TransE"), ("Kinships", "DistMult")]


@pytest.fixture(autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """PyKEEN collects garbage after every epoch: 0.2 s each time, if it has to look at all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class OfNonzeroRows(torch.optim.SparseAdam):
    """What torch has for force_sparse: its SparseAdam, and a conversion of every gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad.to_sparse(1)
        return super().step(closure)  # type: ignore[no-untyped-call]


def run(data: str, model: str, optimizer: type[Optimizer], epochs: int = 8, **options: Any) -> PipelineResult:
    return pipeline(
        dataset=data,
        model=model,
        model_kwargs={"embedding_dim": 32},
        optimizer=optimizer,
        optimizer_kwargs={"lr": 0.02} | options,
        training_kwargs={"num_epochs": epochs, "batch_size": 256, "pin_memory": False, "use_tqdm": False},
        training_loop_kwargs={"automatic_memory_optimization": False},
        evaluator_kwargs={"batch_size": 256},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=0,
        device="cpu",
    )


@pytest.mark.parametrize(("data", "model"), CASES)
@pytest.mark.parametrize("force_sparse", [False, True])
def test_the_pipeline(data: str, model: str, force_sparse: bool) -> None:
    begin = run(data, model, SparseAdam, epochs=0)
    ours = run(data, model, SparseAdam, force_sparse=force_sparse)
    theirs = run(data, model, OfNonzeroRows if force_sparse else torch.optim.Adam)
    assert ours.get_metric("mrr") > 1.2 * begin.get_metric("mrr")
    assert ours.get_metric("mrr") == pytest.approx(theirs.get_metric("mrr"), rel=1e-3)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_example() -> None:
    ranks = runpy.run_path(str(EXAMPLES / "knowledge_graph.py"))["main"](epochs=10)
    assert min(ranks["as Adam"], ranks["with force_sparse"]) > 1.2 * ranks["before training"]
