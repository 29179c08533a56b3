"""Adam for embedding tables: a step costs the rows it touches, not the rows there are."""

from ._sparse_adam import SparseAdam

__all__ = ["SparseAdam"]
__version__ = "0.1.0"
