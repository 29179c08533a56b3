"""What is called before files are synced: who has something that belongs into them, adds a function."""

from __future__ import annotations

import weakref
from collections.abc import Callable

functions: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
