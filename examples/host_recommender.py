"""A recommender whose table of users is a file: planted ratings by 200,000 users.

    python examples/host_recommender.py

Users are many and seen rarely: their table is in a file, in bfloat16, with one number of optimizer state per user, and
only the rows of a batch travel to the model. Items are few: their table is a plain nn.Embedding beside the model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from rowstep import HostEmbedding, SparseAdam, storage


class Recommender(nn.Module):
    def __init__(self, users: HostEmbedding, items: int) -> None:
        super().__init__()
        self.users, self.items = users, nn.Embedding(items, users.embedding_dim, sparse=True)
        nn.init.normal_(self.items.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The ratings to be expected."""
        ratings: Tensor = (self.users(users).float() * self.items(items)).sum(-1)
        return ratings


def planted_ratings(users: int, items: int, each: int, traits: int = 4) -> TensorDataset:
    """What each user says of some items: how well their hidden traits agree, and a little noise."""
    tastes, offers = torch.randn(users, traits), torch.randn(items, traits)
    user, item = torch.arange(users).repeat_interleave(each), torch.randint(items, (users * each,))
    ratings = (tastes[user] * offers[item]).sum(-1) / traits**0.5
    return TensorDataset(user, item, ratings + 0.1 * torch.randn(len(ratings)))


def batches(data: TensorDataset, size: int = 16_384) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), size, drop_last=False))


@torch.no_grad()
def error(model: Recommender, data: TensorDataset) -> float:
    """The mean squared error; that of guessing is 1."""
    errors: list[float] = [(model(*ids) - rating).square().sum().item() for *ids, rating in batches(data)]
    return sum(errors) / len(data)


def main(users: int = 200_000, items: int = 1000, epochs: int = 4) -> float:
    """Train; return the error on ratings that were held out."""
    torch.manual_seed(0)
    everything = planted_ratings(users, items, each=12)
    is_held_out = torch.arange(len(everything)) % 12 == 0
    train, held_out = (TensorDataset(*everything[which]) for which in (~is_held_out, is_held_out))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "users.safetensors")
        storage.create(path, users, 16, torch.bfloat16)
        model = Recommender(HostEmbedding(users, 16, dtype=torch.bfloat16, path=path), items)
        of_users = {"second_moment": "row", "betas": (0, 0.99), "stochastic_rounding": True}
        groups = {"params": model.items.parameters()}, {"params": model.users.parameters(), **of_users}
        optimizer = SparseAdam(groups, lr=0.02)
        reached = 1.0
        for epoch in range(1, epochs + 1):
            for *ids, rating in batches(train):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(*ids), rating)
                torch.autograd.backward(loss)
                optimizer.step()
            storage.sync()
            reached = error(model, held_out)
            print(f"  epoch {epoch} of {epochs}: a squared error of {reached:.3f}; 1 is guessing")
    return reached


if __name__ == "__main__":
    main()
