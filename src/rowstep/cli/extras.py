"""What the commands and the benchmarks draw with.

Imported at use, so that `rowstep --help` works without the extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

WIDTH = 150


class MissingExtraError(Exception):
    """A package of the extra `cli` is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"this command needs {package}, which is not installed: pip install 'rowstep[cli]'")


def console() -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise MissingExtraError("rich") from None
    screen = Console()
    # Without a terminal rich takes 80 columns for granted, and tables in log files would wrap.
    return screen if screen.is_terminal else Console(width=WIDTH)


def figure(width: float, height: float) -> Figure:
    """A figure outside pyplot: no display is needed, and no global state is left behind."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib") from None
    return Figure(figsize=(width, height), dpi=144, layout="constrained")
