"""Adam for plain NumPy buffers: no framework, no torch.

    from rowstep.arrays import Adam

    optimizer = Adam(lr=1e-2)
    for batch in batches:
        optimizer.step("weights", weights, weights_gradient)            # every element, in place
        optimizer.step_rows("table", table, rows, rows_gradient)        # only these rows
        optimizer.end_iteration()

The moments of a parameter are kept under its **name** and allocated when the name is first seen. There is one counter
for all names: it starts at 1 and moves on ``end_iteration()`` only, so everything stepped in one iteration has the same
bias correction. Arithmetic runs in float64; the parameter and its moments are stored in the parameter's own dtype.
eps is added to the bias-corrected root of the second moment, as in torch.optim.Adam.

The work is done by the kernels of the torch optimizers, in place and without temporaries of the parameter's size, on
as many threads as ``numba.get_num_threads()`` says. Numba is imported at the first step. Where it is missing, or with
``ROWSTEP_BACKEND=reference``, NumPy does the work.
"""

from ._adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
