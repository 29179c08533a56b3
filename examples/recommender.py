"""A two-tower recommender on planted data: which item will a user pick next?

    python examples/recommender.py

A batch reads a few rows of two tables. DeferredAdamW gives torch.optim.AdamW's result for tables and towers, and the
cost of a step scales with the rows read. The recall looks up every row, and all of them are up to date when it does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowstep import DeferredAdamW


class Recommender(nn.Module):
    """A vector for each user and each item; users like the items whose vectors point where theirs does."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users, self.items = tower(users), tower(items)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """How much each of these users likes each of these items."""
        likings: Tensor = self.users(users) @ self.items(items).T
        return likings


def tower(ids: int, width: int = 32) -> nn.Module:
    table = nn.Embedding(ids, width, sparse=True)
    nn.init.normal_(table.weight, std=0.1)
    return nn.Sequential(table, nn.Linear(width, width))


def planted_picks(users: int, items: int, picks: int) -> Tensor:
    """For each user some items, mostly those that share the user's hidden traits: (users, picks)."""
    traits, offers = torch.randn(users, 4), torch.randn(items, 4)
    return torch.multinomial((2.5 * traits @ offers.T).softmax(1), picks)


@torch.no_grad()
def recall_at_10(model: Recommender, items: int, seen: Tensor, held_out: Tensor) -> float:
    """How often the next pick is one of the ten that the model would offer, of the items not picked before."""
    model.eval()
    likings = model(torch.arange(len(seen)), torch.arange(items)).scatter(1, seen, -torch.inf)
    model.train()
    hits: Tensor = (likings.topk(10).indices == held_out.unsqueeze(1)).any(1)
    return hits.float().mean().item()


def main(users: int = 5000, items: int = 2000, epochs: int = 5) -> tuple[float, float]:
    """Train; return the recall at 10 before and after."""
    torch.manual_seed(0)
    picks = planted_picks(users, items, 25)
    seen, held_out = picks[:, :-1], picks[:, -1]
    user, item = torch.arange(users).repeat_interleave(seen.shape[1]), seen.flatten()
    popularity = item.bincount(minlength=items) / len(item)

    model = Recommender(users, items)
    optimizer = DeferredAdamW(model, lr=0.01, weight_decay=0.01)
    cross_entropy = nn.CrossEntropyLoss()
    before = recall = recall_at_10(model, items, seen, held_out)
    for epoch in range(1, epochs + 1):
        for batch in torch.split(torch.randperm(len(user)), 512):
            optimizer.zero_grad()
            # What others picked stands for what a user did not pick, and popular items do so too often.
            likings = model(user[batch], item[batch]) - popularity[item[batch]].log()
            cross_entropy(likings, torch.arange(len(batch))).backward()
            optimizer.step()
        recall = recall_at_10(model, items, seen, held_out)
        print(f"epoch {epoch}: recall@10 {recall:.1%}")
    print(f"The next pick is among 10 of {items:,} items for {recall:.1%} of the users; at first {before:.1%}.")
    return before, recall


if __name__ == "__main__":
    main()
