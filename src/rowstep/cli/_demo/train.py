"""Two models of the same weights, stepped in turns by two optimizers on the same batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rowstep import SparseAdam
from rowstep.cli._demo.corpus import Batch, Words, batches

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LEARNING_RATE = 0.01
RECENT = 50  # steps averaged into the loss that is shown


class SkipGram(nn.Module):
    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim, sparse=True)
        self.contexts = nn.Embedding(words, dim, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of each pair: tell the true neighbour, which comes first, from the drawn ones."""
        scores = torch.bmm(self.contexts(batch.contexts), self.words(batch.centres).unsqueeze(2)).squeeze(2)
        sign = torch.ones(scores.shape[1])
        sign[1:] = -1
        return -nn.functional.logsigmoid(sign * scores).sum(1).mean()


@dataclass(frozen=True)
class Settings:
    steps: int
    seconds: float
    batch: int
    dim: int
    seed: int


@dataclass
class Run:
    """One optimizer's training, with the seconds each of its steps took."""

    name: str
    model: SkipGram
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    training_seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        ready = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        self.schedule.step()
        self.losses.append(loss.item())
        self.optimizer_seconds.append(end - ready)
        self.training_seconds.append(end - start)

    @property
    def recent_loss(self) -> float:
        return mean(self.losses[-RECENT:])


def side_by_side(words: Words, settings: Settings, console: Console) -> tuple[Run, Run]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    ours = _start("rowstep.SparseAdam", SparseAdam, words, settings)
    theirs = _start("torch.optim.SparseAdam", torch.optim.SparseAdam, words, settings)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[ours]:.3f} rowstep, {task.fields[theirs]:.3f} torch"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        _train(ours, theirs, words, settings, progress)
    return ours, theirs


def _train(ours: Run, theirs: Run, words: Words, settings: Settings, progress: Progress) -> None:
    task = progress.add_task("", total=settings.steps, ours=float("nan"), theirs=float("nan"))
    stop = time.perf_counter() + settings.seconds
    for number, batch in zip(range(settings.steps), batches(words, settings.batch, settings.seed), strict=False):
        # Taking turns at going first: the second finds the batch in the cache.
        for run in (ours, theirs) if number % 2 else (theirs, ours):
            run.step(batch)
        progress.update(task, advance=1, ours=ours.recent_loss, theirs=theirs.recent_loss)
        if time.perf_counter() > stop:
            return


def _start(name: str, kind: type[torch.optim.Optimizer], words: Words, settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    model = SkipGram(len(words.vocabulary), settings.dim)
    # Optimizer itself has no default for lr, though both of its subclasses here do.
    optimizer = kind(model.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.steps)
    return Run(name, model, optimizer, schedule)
