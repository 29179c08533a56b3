"""The command `rowstep`, which `python -m rowstep` is as well, wherever scripts are not on the path."""

import os
import signal
import sys


def main() -> int:
    """Run a command, and end in one line if it is interrupted, also while it is imported.

    What an exception does in the middle of importing torch, NumPy or Numba is up to them: it may come out as another
    one, or be swallowed. So an interrupt raises none. No command leaves anything that would need cleaning up.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background of a shell
        signal.signal(signal.SIGINT, _end)
    from rowstep.cli import main

    return main()


def _end(*_: object) -> None:
    try:
        stderr = sys.stderr.fileno()
        os.write(stderr, b"\n" * os.isatty(stderr) + b"rowstep: interrupted\n")  # on a terminal after progress and ^C
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
