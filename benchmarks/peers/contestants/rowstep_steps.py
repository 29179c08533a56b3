"""rowstep: the step alone, and the whole loop with Adam's state or with one number per row."""

from __future__ import annotations

from benchmarks.peers.contestants.torch_loops import Loop
from benchmarks.peers.contestants.torch_steps import Sparse
from benchmarks.peers.data import Data
from rowstep import SparseAdam


class Step(Sparse):
    def __init__(self, data: Data) -> None:
        super().__init__(data, SparseAdam)


class WholeLoop(Loop):
    def __init__(self, data: Data) -> None:
        super().__init__(data, SparseAdam)


class OneNumberPerRow(Loop):
    """As much state as row-wise Adagrad keeps."""

    def __init__(self, data: Data) -> None:
        super().__init__(data, lambda params: SparseAdam(params, betas=(0.0, 0.999), second_moment="row"))
