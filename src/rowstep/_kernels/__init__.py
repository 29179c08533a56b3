"""What Numba compiles, at first use and cached. Arrays and addresses only: nothing in here imports torch."""

from typing import Any

# error_model="numpy": with Python's, the test for a zero divisor keeps LLVM from vectorising (186 ns a row, not 39).
SEMANTICS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# For what only kernels call (what Python calls is a `kernel`, see cache.py), and for what runs once per row: a call
# passes an array as seven words on the stack, which at 16 columns costs as much as the row's arithmetic (51 ns a row
# with calls, 28 without).
INNER: dict[str, Any] = SEMANTICS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINE: dict[str, Any] = INNER | {"forceinline": True}
