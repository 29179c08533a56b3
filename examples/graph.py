"""Node vectors of a graph: PyTorch Geometric's MetaPath2Vec on Zachary's karate club.

    pip install -e '.[integration]'
    python examples/graph.py

The graph has 34 members, the ties between them, and the four groups they fall into. Walks follow ties from member to
member, and members that meet on walks get similar vectors. The loop is PyTorch Geometric's own example except for the
optimizer: DeferredAdam steps as torch.optim.Adam would with sparse=False, at the cost of the nodes on the walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rowstep import DeferredAdam

try:
    from torch_geometric.datasets import KarateClub
    from torch_geometric.nn import MetaPath2Vec
except ImportError as missing:
    raise SystemExit(f"{missing}. This example needs PyTorch Geometric: pip install -e '.[integration]'") from None


@torch.no_grad()
def accuracy(model: MetaPath2Vec, group: Tensor) -> float:
    """How often a linear classifier that knows half of the members tells the group of one of the others."""
    model.eval()  # brings all rows up to date: what follows reads the table without its module
    vectors = model("member")
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(0))
    known, others = order.chunk(2)
    return float(model.test(vectors[known], group[known], vectors[others], group[others], max_iter=1000))


def main(epochs: int = 40) -> tuple[float, float]:
    """Train; return the accuracy before and after."""
    torch.manual_seed(0)
    club = KarateClub()[0]
    member, other = club.edge_index
    tie = torch.arange(len(member))
    edges = {("member", "has", "tie"): torch.stack([member, tie]), ("tie", "with", "member"): torch.stack([tie, other])}

    model = MetaPath2Vec(edges, 16, metapath=list(edges), walk_length=10, context_size=5, sparse=True)
    optimizer = DeferredAdam(model, lr=0.02)
    walks = model.loader(batch_size=4, shuffle=True)
    before = after = accuracy(model, club.y)
    print(f"  before   : {before:.0%} of the members are told from their vectors")
    for epoch in range(1, epochs + 1):
        model.train()
        for true, drawn in walks:
            optimizer.zero_grad()
            model.loss(true, drawn).backward()
            optimizer.step()
        if epoch % 10 == 0 or epoch == epochs:
            after = accuracy(model, club.y)
            print(f"  epoch {epoch:3}: {after:.0%}")
    return before, after


if __name__ == "__main__":
    main()
