"""Who interacted with what, and when: MovieLens-100K, split for ranking.

The file lies in the wheel of the package RecBole. It is read out of the wheel, and nothing of the package is imported.
The ratings themselves are not used: that a user has rated an item says that the two met.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

RECBOLE = "recbole==1.2.1"
CACHE = Path(tempfile.gettempdir()) / "rowstep-benchmark-data"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
HEADINGS = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]


class DataError(Exception):
    """The data is not there, or is not what it should be."""


@dataclass(frozen=True)
class Interactions:
    """The last interaction of every user is for testing, the one before for validation, and the rest for training."""

    users: int
    items: int
    train: Tensor  # (n, 2): a user and an item, in the order of the users' time
    validation: Tensor  # (m, 2)
    test: Tensor  # (m, 2)

    @property
    def is_head(self) -> Tensor:
        """Of every item: whether it is one of the most popular ones that make up half of the training part."""
        counts, by_popularity = self.train[:, 1].bincount(minlength=self.items).sort(descending=True, stable=True)
        met_before = counts.cumsum(0) - counts
        is_head = torch.zeros(self.items, dtype=torch.bool)
        is_head[by_popularity[2 * met_before < len(self.train)]] = True
        return is_head


def movielens(wheel: Path | None) -> Interactions:
    """Out of RecBole's wheel, which pip downloads if none is given."""
    wheel = wheel or _download()
    try:
        with zipfile.ZipFile(wheel) as files:
            text = files.read(MEMBER).decode()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel} has no file {MEMBER} ({error}); expected the wheel of {RECBOLE}") from error
    return split(parse(text.splitlines()))


def _download() -> Path:
    wheel = CACHE / f"{RECBOLE.replace('==', '-')}-py3-none-any.whl"
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), RECBOLE]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DataError(f"pip could not download {RECBOLE}: {done.stderr.strip()}. Give its wheel with --data")
    return wheel


def parse(lines: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    """Users, items and times of a file with tabs between its columns and their names in its first line."""
    rows = iter(lines)
    if (headings := next(rows, "").split("\t")) != HEADINGS:
        raise DataError(f"the columns are {headings}; expected {HEADINGS}")
    for row in rows:
        user, item, _, time = row.split("\t")
        yield user, item, float(time)


def split(rows: Iterable[tuple[str, str, float]]) -> Interactions:
    """A user with fewer than three interactions is for training only."""
    item_ids: dict[str, int] = {}
    histories: dict[str, list[tuple[float, int]]] = {}
    for user, item, time in rows:
        histories.setdefault(user, []).append((time, item_ids.setdefault(item, len(item_ids))))

    train, validation, test = [], [], []
    for at, history in enumerate(histories.values()):
        history.sort(key=lambda met: met[0])  # those of one second stay as they are in the file
        pairs = [(at, item) for _, item in history]
        last = 2 if len(pairs) > 2 else 0
        train += pairs[: len(pairs) - last]
        validation += pairs[len(pairs) - last :][:1]
        test += pairs[len(pairs) - last :][1:]
    parts = (torch.tensor(part, dtype=torch.int64).reshape(-1, 2) for part in (train, validation, test))
    return Interactions(len(histories), len(item_ids), *parts)
