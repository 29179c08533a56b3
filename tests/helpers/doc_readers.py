"""How the code of a page is run: all of its python blocks as they stand, in order, in one namespace."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.helpers.doc_blocks import Block, blocks_of

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


RANKS = {"docs/distributed.md": 2}
"""Pages that need a process group, and on how many ranks they run. All others run in a process without one."""

ELSEWHERE = {"docs/trainers.md": "tests/integration/test_engram_peft.py"}
"""Pages that another test runs, where the packages that they import are installed."""


def run_page(page: str, folder: Path) -> None:
    """Run all python blocks of a page, in this folder, and compare what they print with what the page says."""
    with _in(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        namespace: dict[str, Any] = {"__name__": "__main__"}
        printed = ""
        for block in blocks_of(page):
            if block.language == "output":
                _compare(block, printed)
            elif block.language == "python":
                printed = _run(block, namespace)


def run_on_rank(rank: int, page: str, folder: str) -> None:
    """The same on each rank of a process group, all in the same folder."""
    there_already = mock.patch.object(dist, "init_process_group")
    with there_already, mock.patch.dict(os.environ, {"ROWSTEP_BACKEND": "reference"}):
        run_page(page, Path(folder))


def _run(block: Block, namespace: dict[str, Any]) -> str:
    """Run code, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.text, block.page, "exec"), namespace)
    return printed.getvalue()


def _compare(block: Block, printed: str) -> None:
    if not doctest.OutputChecker().check_output(block.text, printed, _FLAGS):
        raise AssertionError(f"{block.page}, line {block.line} says\n{block.text}\nbut the code prints\n{printed}")


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """contextlib.chdir, which Python 3.10 lacks."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
