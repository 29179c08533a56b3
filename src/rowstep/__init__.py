"""Adam for embedding tables: the cost of a step scales with the rows touched, not the table size."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, whose import takes longer than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from ._clip import clip_grad_norm_ as clip_grad_norm_
    from ._clip import clip_grad_value_ as clip_grad_value_
    from ._deferred import DeferredAdam as DeferredAdam
    from ._deferred import DeferredAdamW as DeferredAdamW
    from ._deferred import StaleRowsError as StaleRowsError
    from ._host import HostEmbedding as HostEmbedding
    from ._host import prefetched as prefetched
    from ._sparse_adam import SparseAdam as SparseAdam
    from ._surgery import select_rows_ as select_rows_

__version__ = "0.3.0.dev0"

# Where each public name lives. Imported when it is first asked for, so that what needs no torch does not import it.
_HOME = {
    "DeferredAdam": "._deferred",
    "DeferredAdamW": "._deferred",
    "HostEmbedding": "._host",
    "SparseAdam": "._sparse_adam",
    "StaleRowsError": "._deferred",
    "clip_grad_norm_": "._clip",
    "clip_grad_value_": "._clip",
    "prefetched": "._host",
    "select_rows_": "._surgery",
}

__all__ = [
    "DeferredAdam", "DeferredAdamW", "HostEmbedding", "SparseAdam", "StaleRowsError", "clip_grad_norm_",
    "clip_grad_value_", "prefetched", "select_rows_",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module("._torch_version", __name__)  # first of all: it refuses a torch that is too old
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
