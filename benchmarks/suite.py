"""What every suite has: parts that can be run on their own, bars, tables and a picture."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.bars import Bar
from benchmarks.timing import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


@dataclass(frozen=True)
class Part:
    """A piece of the suite that can be run on its own; the suite keeps what it measured."""

    name: str
    run: Callable[[], None]


class Suite(abc.ABC):
    """One suite's settings, and what it has measured so far."""

    file: ClassVar[str]  # what its JSON and its picture are called
    own_threads: ClassVar[str] = ""  # why it does not measure with the numbers of threads that are asked for
    usual_repeats: ClassVar[int] = 25
    quick_repeats: ClassVar[int] = 5

    def __init__(self, *, quick: bool, threads: Sequence[int], repeats: int, data: Path | None = None) -> None:
        self.quick, self.threads, self.repeats, self.data = quick, threads, repeats, data
        self.measurements: list[Measurement] = []

    @abc.abstractmethod
    def parts(self) -> Iterator[Part]:
        """In the order in which they run."""

    @abc.abstractmethod
    def bars(self) -> Iterator[Bar]:
        """What was to be reached, of what was measured."""

    @abc.abstractmethod
    def show(self, console: Console) -> None:
        """Print what was measured."""

    @abc.abstractmethod
    def draw(self, figure: Figure) -> bool:
        """Draw what was measured; False if there is nothing to draw."""

    @abc.abstractmethod
    def findings(self) -> dict[str, Any]:
        """For the JSON file: what was found besides the measurements."""

    def write(self, _folder: Path, _document: dict[str, Any]) -> list[Path]:
        """Write more than the JSON file, which holds the document, and the picture; say which files."""
        return []

    def close(self) -> None:  # noqa: B027  # most suites start nothing
        """End what the suite has started."""

    def of_kind(self, *kinds: str) -> list[Measurement]:
        return [measured for measured in self.measurements if measured.kind in kinds]
