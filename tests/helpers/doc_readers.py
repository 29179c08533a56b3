"""What each page leaves to its reader, and how its code is run.

All python blocks of a page run in order, in one namespace. Most pages are complete. For the others, ``given`` is code
that stands for the reader's own, before the block of that number (from 0). ``smaller`` makes tables small enough for a
test: each of these numbers is replaced in the page's code by the other one, and must occur in it.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.helpers.doc_blocks import Block, blocks_of

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Reader:
    given: Mapping[int, str] = field(default_factory=dict)
    smaller: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0
    """On how many ranks of a process group it runs; 0: in a process without one."""
    elsewhere: str = ""
    """The test that runs it instead, where the packages that it imports are installed."""


READERS: dict[str, Reader] = {
    "README.md": Reader(
        given={0: "batches = [(torch.randint(0, 1000, (8, 3)), torch.zeros(8, 1))] * 2"}, smaller={"1_000_000": "1_000"}
    ),
    "docs/deferred.md": Reader(
        given={
            0: """
                class TwoTowers(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.users = torch.nn.Embedding(100, 8, sparse=True)
                        self.items = torch.nn.Embedding(100, 8, sparse=True)

                    def forward(self, batch):
                        return (self.users(batch[0]) * self.items(batch[1])).sum()

                batches = [torch.randint(0, 100, (2, 16)) for _ in range(3)]
            """,
            1: """
                adamw = torch.optim.AdamW(TwoTowers().parameters())
            """,
        }
    ),
    "docs/distributed.md": Reader(
        given={
            0: """
                batches_of_this_rank = [(torch.randint(0, 1000, (8,)), torch.zeros(8, 1))] * 2
                # The process group is there already.
                torch.distributed.init_process_group = lambda backend: None
            """,
            1: """
                users, shops = torch.tensor([3, 5]), torch.tensor([1, 1])
                tags, offsets = torch.tensor([7, 2, 7]), torch.tensor([0, 2])
                top = torch.nn.Linear(32 + 16 + 8, 1)
            """,
            2: """
                class Item(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.tags = nn.EmbeddingBag(50, 16, mode="sum")

                class Model(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.user, self.item = nn.Embedding(1000, 16), Item()

                    def forward(self, users, tags, offsets):
                        return (self.user(users) * self.item.tags(tags, offsets)).sum()

                torch.manual_seed(0)
                model = Model()
            """,
        },
        smaller={"1_000_000_000": "1_000", "1_000_000,": "1_000,", "50_000": "500"},
        ranks=2,
    ),
    "docs/memory.md": Reader(
        given={0: "from rowstep import SparseAdam; params = [torch.nn.Parameter(torch.ones(9, 8))]"}
    ),
    "docs/trainers.md": Reader(elsewhere="tests/integration/test_engram_peft.py"),
}


def run_page(page: str, folder: Path, reader: Reader) -> None:
    """Run all python blocks of a page, in this folder, and compare what they print with what the page says."""
    python = [block for block in blocks_of(page) if block.language in ("python", "output")]
    with _in(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec("import torch", namespace)
        number, printed = 0, ""
        for block in python:
            if block.language == "output":
                _compare(block, printed)
                continue
            _run(f"given to {page}", textwrap.dedent(reader.given.get(number, "")), namespace)
            printed = _run(f"{page}, line {block.line}", _shrunk(block.text, reader.smaller), namespace, block.line)
            number += 1


def run_on_rank(rank: int, page: str, folder: str) -> None:
    """The same on each rank of a process group, all in the same folder."""
    os.environ["ROWSTEP_BACKEND"] = "reference"
    initialize = dist.init_process_group
    try:
        run_page(page, Path(folder), READERS[page])
    finally:
        dist.init_process_group = initialize
        del os.environ["ROWSTEP_BACKEND"]


def unused_settings(page: str) -> list[str]:
    """What a reader has for a page that it does not need: numbers that do not occur, blocks that there are not."""
    reader, python = READERS[page], [block for block in blocks_of(page) if block.language == "python"]
    code = "".join(block.text for block in python)
    return [number for number in reader.smaller if number not in code] + [
        f"block {number}" for number in reader.given if number >= len(python)
    ]


def _run(where: str, code: str, namespace: dict[str, Any], line: int = 0) -> str:
    """Run code, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + code, where, "exec"), namespace)
    return printed.getvalue()


def _compare(block: Block, printed: str) -> None:
    if not doctest.OutputChecker().check_output(block.text, printed, _FLAGS):
        raise AssertionError(f"{block.page}, line {block.line} says\n{block.text}\nbut the code prints\n{printed}")


def _shrunk(code: str, smaller: Mapping[str, str]) -> str:
    for large, small in smaller.items():
        code = re.sub(rf"(?<!\w){re.escape(large)}(?!\w)", small, code)
    return code


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """contextlib.chdir, which Python 3.10 lacks."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
