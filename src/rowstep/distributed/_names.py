"""What a table is called among ranks, so that they see whether they look up the same one.

Tables of a group are numbered as they are made, which every rank does in the same order. A copy has its original's
number and one of its own, so a copy that only some ranks make does not shift the numbers of tables made later.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

from torch.distributed import ProcessGroup

Identity = tuple[int, ...]
"""The number of a table; then, for a copy, its number among the copies of that; and so on."""

_made: MutableMapping[ProcessGroup, dict[Identity, int]] = weakref.WeakKeyDictionary()


def new_identity(group: ProcessGroup | None) -> Identity:
    """That of a new table."""
    return identity_of_copy(group, ())


def identity_of_copy(group: ProcessGroup | None, original: Identity) -> Identity:
    """That of a copy of a table."""
    if group is None:
        return (*original, 0)
    made = _made.setdefault(group, {})
    made[original] = made.get(original, 0) + 1
    return (*original, made[original])
