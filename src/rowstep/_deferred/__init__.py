r"""Dense Adam's result, at the cost of the rows touched.

Dense Adam moves every row of a table at every step, because old momentum keeps acting and weight decay never rests. But
a row that gets no gradient for k steps follows a path that is known in advance, so all of it can be taken in one update
when somebody next reads the row. Until then the row waits.

One update for many steps
-------------------------
A row was brought up to date at step s with (p, m, v), and now it is step T = s + k. At step t = s + j it had no
gradient, so m and v only decayed:

    m_t = b1^j m        v_t = b2^j v

and Adam moved p by ``lr_t m_t / (1 - b1^t) / (sqrt(v_t / (1 - b2^t)) + eps)``, after AdamW had shrunk it by
``1 - lr_t wd``. Write

    a_t = lr_t sqrt(1 - b2^t) / (1 - b1^t)     q_t = sqrt(1 - b2^t)     r = b1 / sqrt(b2)
    P(t) = product of (1 - lr_u wd) over t < u <= T

and divide numerator and denominator of every move by b2^(j/2). What is left of all k steps is

    p_T = P(s) p  -  m * sum over j = 1..k of  w_j / (sqrt(v) + e_j)

    w_j = a_{s+j} P(s+j) r^j        e_j = eps q_{s+j} b2^(-j/2)

The w and e depend on s and T alone, not on the row: the sum is a function of sqrt(v).

The sum in constant time
------------------------
For eps = 0 the sum would be ``sum(w) / sqrt(v)``. For any eps, expand 1/(sqrt(v) + e) around the weighted mean of e:
with ``ebar = sum(w e)/sum(w)``, ``theta = ebar/(sqrt(v) + ebar)`` and ``M_n = sum w (e/ebar - 1)^n``,

    [M0 + theta^2 M2 - theta^3 M3 + theta^4 M4 - theta^5 M5] / (sqrt(v) + ebar)

is the sum to a relative error of at most ``theta^6 (M6/M0) max(1, ebar/e_1)``. (M1 is 0 by the choice of ebar.) The e
differ little over the steps in which the w matter, so the error is far below rounding nearly always. Where the bound
says otherwise (the first steps of a run, a b2 below 0.99 with a tiny v), the terms are added one by one; after J steps,
with r^J below the precision, the rest is nothing. ``rowstep._schedule`` keeps the coefficients for every gap.

Where b2 is small beside b1, the e outgrow any float long before the w are nothing, and so do the coefficients. A gap
with a coefficient beyond 1e30 has no series, and its terms are added one by one: a term whose e is infinite is 0, as it
should be. A number with m = 0 must not see any of this, since only weight decay moves it: m is divided first, by
something that is not 0, and then weighted. The powers b1^k and b2^k may also be smaller than the numbers they scale
would allow: they are applied as two factors then.

Old momentum ends as 0 instead of a denormal number, which would make every later step slow; but only once it is also so
small beside eps that it moves nothing.

With amsgrad the largest v divides, which does not change without a gradient: sqrt(v) becomes sqrt(vmax), r becomes b1
and e_j = eps q_{s+j}. Coupled L2 has no such form, since m and v then depend on p: it is refused.

One second moment for a row
---------------------------
With ``second_moment="row"`` v is one number per row, the decayed mean of the row's squared gradients. Without a
gradient it decays as an element's does, by b2 a step, and nothing above asks what v is the square of: the same sum
holds with the same coefficients, and it is a single number for the whole row. p moves by that number times m.

Without momentum (b1 = 0) there is no m, so a row without a gradient does not move at all but for weight decay. To catch
up is ``p = P(s) p`` and ``v = b2^k v``; where there is no weight decay, p need not even be read.

What makes it safe
------------------
A row must be up to date *before it is read*, else its gradient belongs to another weight. ``rowstep._waiting`` sees to
that: while rows wait, every torch function that is handed the table comes by there first. Before a read that torch does
not show us, the program calls ``catch_up`` or ``flush``. A gradient for a row that was not up to date
is an error, never a silent drift.
"""

from .deferral import StaleRowsError
from .optimizer import DeferredAdam, DeferredAdamW

__all__ = ["DeferredAdam", "DeferredAdamW", "StaleRowsError"]
