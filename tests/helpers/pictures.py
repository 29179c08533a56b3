"""What a picture that was drawn looks like on disk."""

from __future__ import annotations

from pathlib import Path


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
