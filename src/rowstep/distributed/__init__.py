"""Embedding tables sharded by rows over the ranks of torch.distributed. See ``docs/distributed.md``."""

from .. import _torch_version as _torch_version  # first of all: it refuses a torch that is too old
from ._checkpoint import load
from ._collection import ShardedEmbeddingCollection
from ._ddp import ddp
from ._embedding import ShardedEmbedding, ShardedEmbeddingBag
from ._exchange import PeerError

__all__ = [
    "PeerError",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingCollection",
    "ddp",
    "load",
]
