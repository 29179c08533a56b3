"""The update of every element, block by block.

A block's gradient is widened to the type computed with, in memory that stays in the cache; then the row update of
``adam`` runs as if the block were a row. Names are as there; all arrays have one dimension and no gaps.
"""

from __future__ import annotations

from .adam import update_row
from .bits import address_of, row_at, widen
from .cache import kernel
from .parallel import call_for_parts


@kernel
def step_part(part, totals, p, m, v, g, beta1, beta2, eps, step_size, shrink, decay):
    """Update one part of the elements, in blocks as wide as ``totals``."""
    parts, width = totals.shape
    here, last = p.size * part // parts, p.size * (part + 1) // parts
    total_at = address_of(totals) + part * width * totals.itemsize
    while here < last:
        size = min(width, last - here)
        total = row_at(total_at, size, totals)
        for c in range(size):
            total[c] = widen(g[here + c], total)
        p_here = row_at(address_of(p) + here * p.itemsize, size, p)
        m_here = row_at(address_of(m) + here * m.itemsize, size, m)
        v_here = row_at(address_of(v) + here * v.itemsize, size, v)
        update_row(p_here, m_here, v_here, None, total, beta1, beta2, eps, step_size, None, shrink, decay, True)
        here += size


@kernel
def step_parallel(pool, threads, totals, *arguments):
    """``step_part`` for every part that there is a row of ``totals`` for."""
    call_for_parts(pool, threads, totals.shape[0], step_part, (totals, *arguments))
