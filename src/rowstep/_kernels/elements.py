"""Every element of dense arrays, as torch.optim.Adam steps it: the kernel of ``rowstep.arrays``."""

from __future__ import annotations

import functools
import math
from typing import Any

from numba import types

from .cache import kernel
from .floats import widen
from .pointers import pointer
from .pool import OverThreads
from .rows import maximum, rule


@functools.cache
def over_elements(p_type: Any, g_type: Any, decay: Any) -> OverThreads:
    """The kernel for arrays of these types; ``decay`` is None where the rule has no such term."""
    has_decay = decay is not None

    def over_elements_part(part, told_at):
        told, scalars = pointer(told_at, types.int64), pointer(told_at + 6 * 8, types.float64)
        parts, p_at, m_at, v_at, g_at, count = told[0], told[1], told[2], told[3], told[4], told[5]
        p, m, v = pointer(p_at, p_type), pointer(m_at, p_type), pointer(v_at, p_type)
        g = pointer(g_at, g_type)
        decay_by = scalars[5] if has_decay else None
        number = types.float64
        for i in range(count * part // parts, count * (part + 1) // parts):
            p_i, m_i, v_i, _ = rule(
                widen(p[i], number), widen(m[i], number), widen(v[i], number), None, widen(g[i], number),
                1 - scalars[0], scalars[1], 1 - scalars[1], scalars[2], scalars[3],
                None, scalars[4], decay_by, True, math.sqrt, maximum,
            )  # fmt: skip
            p[i], m[i], v[i] = p_type(p_i), p_type(m_i), p_type(v_i)
        return 0

    over_elements_part.__name__ = over_elements_part.__qualname__ = "-".join(
        ["elements", str(p_type), str(g_type), *(["decay"] if has_decay else [])]
    )
    return OverThreads(kernel(types.int64, types.int64)(over_elements_part), types.float64)
