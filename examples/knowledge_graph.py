"""A knowledge graph: PyKEEN's pipeline on facts about 14 nations, with our class as its optimizer.

    pip install -e '.[integration]'
    python examples/knowledge_graph.py

PyKEEN's gradients are dense, so SparseAdam steps as torch.optim.Adam does. With force_sparse=True it steps only the
entities and relations in a batch, as torch.optim.SparseAdam would if it took dense gradients.
"""

from __future__ import annotations

import logging

from rowstep import SparseAdam

try:
    from pykeen.pipeline import pipeline
except ImportError as missing:
    raise SystemExit(f"{missing}. This example needs PyKEEN: pip install -e '.[integration]'") from None


def mean_reciprocal_rank(epochs: int, force_sparse: bool) -> float:
    result = pipeline(
        dataset="Nations",
        model="DistMult",
        optimizer=SparseAdam,
        optimizer_kwargs={"lr": 0.02, "force_sparse": force_sparse},
        training_kwargs={"num_epochs": epochs, "pin_memory": False, "use_tqdm": False},
        training_loop_kwargs={"automatic_memory_optimization": False},
        evaluator_kwargs={"batch_size": 256},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=0,
        device="cpu",
    )
    return float(result.get_metric("mrr"))


def main(epochs: int = 30) -> dict[str, float]:
    """Train without and with force_sparse; return the mean reciprocal rank of the facts held out, before and after."""
    ranks = {
        "before training": mean_reciprocal_rank(0, force_sparse=False),
        "as Adam": mean_reciprocal_rank(epochs, force_sparse=False),
        "with force_sparse": mean_reciprocal_rank(epochs, force_sparse=True),
    }
    for name, rank in ranks.items():
        print(f"{name:17}: mean reciprocal rank {rank:.3f}")
    return ranks


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # PyKEEN's, about files and batch sizes
    main()
