"""Adam for embedding tables: a step costs the rows it touches, not the rows there are."""

from ._deferred import DeferredAdam, DeferredAdamW, StaleRowsError
from ._sparse_adam import SparseAdam

__all__ = ["DeferredAdam", "DeferredAdamW", "SparseAdam", "StaleRowsError"]
__version__ = "0.1.0"
