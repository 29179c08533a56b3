"""bitsandbytes' Adam with moments of 8 bits. It refuses sparse gradients."""

from __future__ import annotations

from functools import partial

import bitsandbytes  # type: ignore[import-not-found]

from benchmarks.peers.contestants.torch_steps import Dense

Adam8bit = partial(Dense, make=bitsandbytes.optim.Adam8bit)
