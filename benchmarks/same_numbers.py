"""How far float32 runs end from each other that are the same on paper. The figures of docs/faq.md.

    python -m benchmarks.same_numbers

Training amplifies rounding: two runs that differ in the last bit of one sum drift apart. How far they may drift before
something is wrong, torch shows when it runs against itself, on the same batches with their order within the batch
reversed. The model is small: bags of eight Zipf ids from a table of 20,000 x 16, and a layer, which learn the share of
odd ids. Four runs of 1,000 steps take about a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import rowstep

ROWS, STEPS, BATCH, BAG = 20_000, 1_000, 256, 8

Make = Callable[[nn.Module, nn.Module], list[torch.optim.Optimizer]]


def trained(make: Make, *, is_reversed: bool = False) -> Tensor:
    """The table after training with these optimizers."""
    torch.manual_seed(0)
    table, top = nn.EmbeddingBag(ROWS, 16, sparse=True, mode="sum"), nn.Linear(16, 1)
    optimizers = make(table, top)
    draw = torch.Generator().manual_seed(1)
    popularity = 1 / torch.arange(1, ROWS + 1)
    for _ in range(STEPS):
        ids = torch.multinomial(popularity, BATCH * BAG, replacement=True, generator=draw).view(BATCH, BAG)
        ids = ids.flip(0) if is_reversed else ids
        loss = nn.functional.mse_loss(top(table(ids)), (ids % 2).float().mean(1, keepdim=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
    return table.weight.detach()


def torchs(table: nn.Module, top: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.Adam(top.parameters(), lr=1e-2)]


def ours(table: nn.Module, top: nn.Module) -> list[torch.optim.Optimizer]:
    return [rowstep.SparseAdam([*table.parameters(), *top.parameters()], lr=1e-2)]


def main() -> None:
    """Print how far the tables end from torch's: the largest difference and the root of the mean square."""
    expected = trained(torchs)
    print(f"largest weight: {expected.abs().max():.2f}")
    for name, found in (
        ("torch, each batch reversed", trained(torchs, is_reversed=True)),
        ("rowstep", trained(ours)),
        ("rowstep, each batch reversed", trained(ours, is_reversed=True)),
    ):
        distance = found - expected
        print(f"{name:30} largest difference {distance.abs().max():.1e}, rms {distance.square().mean().sqrt():.1e}")


if __name__ == "__main__":
    main()
