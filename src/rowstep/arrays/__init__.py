"""Adam for plain NumPy buffers, without torch or any other framework.

    from rowstep.arrays import Adam

    optimizer = Adam(lr=1e-2)
    for batch in batches:
        optimizer.step("weights", weights, weights_gradient)            # every element, in place
        optimizer.step_rows("table", table, rows, rows_gradient)        # only these rows
        optimizer.end_iteration()

A parameter's moments are kept under its **name** and allocated when the name is first seen. All names share one
counter, which advances only on ``end_iteration()``: what is stepped in one iteration has the same bias correction.
Arithmetic runs in float64; the parameter and its moments are stored in the parameter's own dtype.

The kernels are those of the torch optimizers, on ``numba.get_num_threads()`` threads. Numba is imported at the first
step. If it is missing, with ``ROWSTEP_BACKEND=reference``, and for float16, NumPy does the work.
"""

from ._adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
