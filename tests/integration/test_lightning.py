"""Lightning: automatic optimization, clipping, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import rowstep
from tests.helpers.ratings import Make, Rivals, Taste, ratings

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning's use of torch's pytrees
]


class Module(lightning.LightningModule):  # type: ignore[misc]  # without the package it has no type
    def __init__(self, model: Taste, make: Make) -> None:
        super().__init__()
        self.model, self.make = model, make

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> Any:
        return self.model.loss(*batch)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> None:
        self.log("error", self.model.loss(*batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model)
        return [optimizer], [lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val is not None:
            sparse = self.model.users.sparse
            clip = rowstep.clip_grad_norm_ if sparse else nn.utils.clip_grad_norm_
            clip(self.model.parameters(), gradient_clip_val)


def trainer(folder: Path, epochs: int, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*ratings()), batch_size=16)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 3}], ids=str)
def test_automatic_optimization(rivals: Rivals, tmp_path: Path, options: dict[str, Any]) -> None:
    def train(model: Taste, make: Make) -> None:
        trainer(tmp_path, 3, **options).fit(Module(model, make), loader(), loader())

    rivals.assert_learn_alike(train)
