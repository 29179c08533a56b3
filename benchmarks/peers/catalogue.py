"""Who takes part, in which environment, by which rule, and what its tables take of the memory."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from benchmarks.peers.environments import Environment

PADDLE = Environment("paddle", ("paddlepaddle",))
MXNET = Environment("mxnet", ("mxnet", "numpy"), newest=(3, 11), oldest=(3, 10))
JAX = Environment("jax", ("jax",))
BITSANDBYTES = Environment("bitsandbytes", ("bitsandbytes", "torch"))
FBGEMM = Environment("fbgemm", ("fbgemm-gpu-cpu", "torch"))

CONTESTANTS = "benchmarks.peers.contestants"


class Rule(enum.Enum):
    """What a step does, and so with whom the result is compared, and after how many steps."""

    LAZY = "same"  # Adam on the rows that have a gradient
    DENSE = "Adam on all rows"  # as LAZY in the first step
    EIGHT_BITS = "Adam on all rows, 8-bit moments"  # as DENSE in the first step, before any moment is rounded
    ROW = "one number per row, no first moment"
    ADAGRAD = "Adagrad"
    ROW_ADAGRAD = "row-wise Adagrad"


@dataclass(frozen=True)
class Peer:
    name: str
    kind: str  # module and class below contestants
    rule: Rule
    bytes_per_weight: int  # at most, of its tables, moments, dense gradient and what it makes while it steps
    environment: Environment | None = None  # None: the one that rowstep is in
    ahead: int = 0  # by how many steps its bias correction is ahead of the count, if it is
    remark: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        return self.environment.packages if self.environment else ("rowstep", "torch", "numba")


ROWSTEP = Peer("rowstep SparseAdam", "rowstep_steps.Step", Rule.LAZY, 12)
SPARSE_ADAM = Peer("torch SparseAdam", "torch_steps.SparseAdam", Rule.LAZY, 12)
STEPS = (
    ROWSTEP,
    SPARSE_ADAM,
    Peer(
        "PaddlePaddle, lazy", "paddle_steps.LazyAdam", Rule.LAZY, 16, PADDLE, ahead=1,
        remark="its bias correction is one step ahead for sparse gradients (a first step of 0.74 lr): checked as such",
    ),
    Peer(
        "MXNet, lazy", "mxnet_steps.LazyAdam", Rule.LAZY, 12, MXNET,
        remark="takes distinct rows only: summing duplicates is not counted",
    ),
    Peer("JAX .at[].add", "jax_steps.LazyAdam", Rule.LAZY, 16, JAX, remark="jit, donated buffers"),
    Peer(
        "torch, DGL-style", "torch_steps.DglStyle", Rule.LAZY, 12,
        remark="`unique` and `index_add_`; sums duplicates, where DGL averages them",
    ),
    Peer(
        "torch Adam(fused)", "torch_steps.FusedAdam", Rule.DENSE, 16,
        remark="on the dense gradient, whose making is not counted",
    ),
    Peer(
        "bitsandbytes Adam8bit", "bitsandbytes_steps.Adam8bit", Rule.EIGHT_BITS, 14, BITSANDBYTES,
        remark="on the dense gradient: it refuses sparse ones",
    ),
)  # fmt: skip

ROWSTEP_LOOP = Peer("EmbeddingBag, rowstep", "rowstep_steps.WholeLoop", Rule.LAZY, 12)
TORCH_LOOP = Peer("EmbeddingBag, torch SparseAdam", "torch_loops.SparseAdam", Rule.LAZY, 12)
FBGEMM_LOOP = Peer("FBGEMM, row-wise Adagrad", "fbgemm_loops.RowwiseAdagrad", Rule.ROW_ADAGRAD, 9, FBGEMM)
ADAGRAD_LOOP = Peer("FBGEMM, Adagrad", "fbgemm_loops.Adagrad", Rule.ADAGRAD, 12, FBGEMM)
LOOPS = (
    ROWSTEP_LOOP,
    TORCH_LOOP,
    FBGEMM_LOOP,
    ADAGRAD_LOOP,
    Peer(
        "EmbeddingBag, rowstep (row)", "rowstep_steps.OneNumberPerRow", Rule.ROW, 5,
        remark="as much state as row-wise Adagrad",
    ),
)  # fmt: skip
