"""Embedding tables sharded by rows over the ranks of torch.distributed. See ``docs/distributed.md``."""

from ._checkpoint import load
from ._ddp import allreduce_hook, ddp
from ._embedding import ShardedEmbedding, ShardedEmbeddingBag
from ._exchange import PeerError, Traffic, count_traffic
from ._plan import bytes_per_step

__all__ = [
    "PeerError",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "Traffic",
    "allreduce_hook",
    "bytes_per_step",
    "count_traffic",
    "ddp",
    "load",
]
