"""rowstep: the step alone, and the whole loop with Adam's state or with as little as row-wise Adagrad keeps."""

from __future__ import annotations

from functools import partial

from benchmarks.peers.contestants.torch_loops import Loop
from benchmarks.peers.contestants.torch_steps import Sparse
from rowstep import SparseAdam

Step = partial(Sparse, make=SparseAdam)
WholeLoop = partial(Loop, make=SparseAdam)
OneNumberPerRow = partial(Loop, make=partial(SparseAdam, betas=(0.0, 0.999), second_moment="row"))
