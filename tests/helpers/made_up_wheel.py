"""A wheel with interactions in RecBole's format, small and made up."""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.quality.interactions import HEADINGS, MEMBER


def write_wheel(path: Path, users: int = 12, items: int = 30) -> Path:
    """User n has met every second item from n on."""
    rows = [
        f"u{user}\ti{(user + 2 * at) % items}\t3\t{880_000_000 + at}"
        for user in range(users)
        for at in range(items // 3)
    ]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER, "\n".join(["\t".join(HEADINGS), *rows]) + "\n")
    return path
