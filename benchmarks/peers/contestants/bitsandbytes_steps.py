"""bitsandbytes' Adam with moments of 8 bits. It refuses sparse gradients."""

from __future__ import annotations

import bitsandbytes  # type: ignore[import-not-found]

from benchmarks.peers.contestants.torch_steps import Dense
from benchmarks.peers.data import Data


class Adam8bit(Dense):
    def __init__(self, data: Data) -> None:
        super().__init__(data, bitsandbytes.optim.Adam8bit)
