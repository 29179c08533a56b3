"""The oldest torch that works. An older one is refused here in one sentence, before a name that it lacks is missed.

Everything of this package that uses torch imports this file; ``rowstep.arrays`` does not.
"""

from __future__ import annotations

import re

import torch

OLDEST = (2, 8)
"""As in pyproject.toml, which pip goes by; not every torch was installed by pip."""


def refuse_older(version: str) -> None:
    """Raise ImportError for a version before ``OLDEST``. A build on the way to a release counts as that release."""
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is not None and (int(number[1]), int(number[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"torch {version} is installed, but rowstep needs torch {oldest} or newer: run `pip install --upgrade "
            "torch`, or use rowstep.arrays, which needs no torch"
        )


refuse_older(torch.__version__)
