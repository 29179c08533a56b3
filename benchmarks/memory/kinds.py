"""The kinds of state that are compared, and what each is to reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FLOAT32 = "float32"


@dataclass(frozen=True)
class Kind:
    options: dict[str, Any]
    bytes_per_weight: float
    """At most, beyond the weight itself, in a table of 64 columns."""
    step: float | None = None
    """How long a step may take, in steps with state in float32."""


_NO_FIRST = {"betas": (0.0, 0.999)}

KINDS = {
    FLOAT32: Kind({}, 8),
    "bfloat16": Kind({"state_dtype": torch.bfloat16}, 4, 1.0),
    "row": Kind({"second_moment": "row"}, 4.1, 0.8),
    "bfloat16 and row": Kind({"state_dtype": torch.bfloat16, "second_moment": "row"}, 2.1),
    "row, no first": Kind({"second_moment": "row"} | _NO_FIRST, 0.07, 0.55),
    "factored, no first": Kind({"second_moment": "factored"} | _NO_FIRST, 0.07),
}
