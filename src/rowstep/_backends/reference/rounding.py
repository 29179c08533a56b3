"""Random rounding, as ``_rules/rounding.py`` has it, in plain torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._rules.rounding import low_word, mix_word, random_bits, row_key, weights_key

# How many bits of a float32 a normal number of the dtype lacks.
_CUT = {torch.bfloat16: 16, torch.float16: 13}

_ForSlot = tuple[Any, Tensor | None]
"""What a moment is now, and where it is kept: nowhere, or not by the element, if that is None."""


class Noise:
    """The random bits of some rows in one step."""

    def __init__(self, key: int, rows: Tensor, columns: int) -> None:
        self._key, self._rows, self._columns = key, rows, columns

    def rounded_weights(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights, each rounded to a neighbour of this dtype."""
        return rounded(numbers, dtype, self._bits(weights_key(self._row_keys(), low_word, mix_word)))

    def rounded_moments(self, m: _ForSlot, v: _ForSlot, u: _ForSlot) -> list[Any]:
        """Moments, each rounded to a neighbour of its slot's dtype. The maximum goes by the bits of v."""
        bits = self._bits(self._row_keys())
        both = zip((m, v, u), (bits, bits >> 16, bits >> 16), strict=True)
        return [new if slot is None else rounded(new, slot.dtype, some) for (new, slot), some in both]

    def _row_keys(self) -> Tensor:
        keys: Tensor = row_key(self._key, self._rows, low_word, mix_word)
        return keys

    def _bits(self, keys: Tensor) -> Tensor:
        columns = torch.arange(self._columns, device=keys.device)
        bits: Tensor = random_bits(keys.unsqueeze(1), columns, low_word, mix_word)
        return bits


def rounded(numbers: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Numbers rounded up or down to this dtype, as the lower 16 of these random bits say; 32 bits are left alone."""
    if dtype not in _CUT:
        return numbers
    single, random = numbers.float(), bits & 0xFFFF
    exact = single.view(torch.int32).to(torch.int64)
    cut = (1 << _CUT[dtype]) - 1
    result = ((exact + (random & cut)) & ~cut).to(torch.int32).view(torch.float32)
    if dtype == torch.float16:
        # Below 2^-14 its numbers are whole multiples of 2^-24.
        multiple = single.abs() * 2.0**24
        whole = multiple.floor()
        whole += random < (multiple - whole) * 2.0**16
        result = torch.where(single.abs() < 2.0**-14, torch.copysign(whole * 2.0**-24, single), result)
        result = torch.where(single.abs() >= torch.finfo(dtype).max, single, result)  # nothing lies above
    return torch.where(single.isfinite(), result, single).to(dtype)
