"""One optimizer for a whole network: handwritten digits, all gradients dense.

    pip install -e '.[examples]'
    python examples/digits.py

SparseAdam steps a dense gradient as torch.optim.Adam does. With force_sparse=True it steps only rows with a non-zero:
here, a unit that was off for a whole batch keeps its weights and moments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rowstep import SparseAdam

try:
    from sklearn.datasets import load_digits
except ImportError as missing:
    raise SystemExit(f"{missing}. This example needs scikit-learn: pip install -e '.[examples]'") from None


def main(epochs: int = 10) -> dict[bool, float]:
    """Train without and with force_sparse; return the accuracy on unseen digits of each."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    accuracies = {}
    for force_sparse in (False, True):
        print(f"force_sparse={force_sparse}")
        accuracies[force_sparse] = train(images, labels, epochs, force_sparse)
    return accuracies


def train(images: Tensor, labels: Tensor, epochs: int, force_sparse: bool) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    cross_entropy = nn.CrossEntropyLoss()
    optimizer = SparseAdam(model.parameters(), lr=5e-3, force_sparse=force_sparse)
    order = torch.randperm(len(images))
    seen, unseen = order[:1400], order[1400:]
    batches = DataLoader(TensorDataset(images[seen], labels[seen]), batch_size=64, shuffle=True)
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = (model(images[unseen]).argmax(1) == labels[unseen]).float().mean().item()
        print(f"  epoch {epoch:2}: {accuracy:.1%} of {len(unseen)} unseen digits")
    return accuracy


if __name__ == "__main__":
    main()
