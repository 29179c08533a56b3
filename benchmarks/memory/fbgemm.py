"""rowstep without a first moment beside FBGEMM's fused row-wise Adagrad: both keep one number per row.

Runs in an environment of its own, since FBGEMM is none of our dependencies:

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 -e '.[cli]'
    python -m benchmarks.memory.fbgemm

FBGEMM has no Adam on the CPU, so the results cannot agree, and what is compared is time per byte moved. Its optimizer
is a part of its backward pass; so each forward pass is timed apart, and its backward pass stands beside our backward
pass and step. Both read a row of gradient for every id, and read and write each distinct row and its number once.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import cases
from benchmarks.cases import Case
from rowstep import SparseAdam

REPEATS = 21


def main() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        EmbeddingLocation,
        PoolingMode,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    for case in (cases.UNIFORM, cases.ZIPF):
        pool = [batch[0] for batch in cases.batches_of_ids(case)]
        theirs = SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            pooling_mode=PoolingMode.NONE,
        )
        offsets = torch.arange(case.ids + 1)
        table = nn.Embedding(case.rows, case.dim, sparse=True)
        ours = SparseAdam(table.parameters(), lr=0.01, betas=(0.0, 0.999), second_moment="row")

        def look_up_theirs(ids: Tensor, module: Any = theirs, offsets: Tensor = offsets) -> Tensor:
            looked_up: Tensor = module(ids, offsets)
            return looked_up

        for threads in (1, 2):
            torch.set_num_threads(threads)
            show(case, threads, pool, table, ours, look_up_theirs)


def show(
    case: Case,
    threads: int,
    pool: list[Tensor],
    table: nn.Embedding,
    ours: SparseAdam,
    look_up_theirs: Callable[[Tensor], Tensor],
) -> None:
    """Time both in turn, and print medians (minima) and what they make of a byte."""
    gradient = torch.randn(case.ids, case.dim)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for number in range(REPEATS):
        ids = pool[number % len(pool)]
        out = timed("FBGEMM forward", functools.partial(look_up_theirs, ids))
        timed("FBGEMM backward and step", functools.partial(out.backward, gradient))
        out = timed("rowstep forward", functools.partial(table, ids))
        ours.zero_grad()
        timed("rowstep backward", functools.partial(out.backward, gradient))
        timed("rowstep step", ours.step)
    distinct = statistics.mean(len(set(ids.tolist())) for ids in pool)
    moved = case.ids * case.dim * 4 + distinct * 2 * (case.dim * 4 + 4)
    print(f"{case.about}, {threads} thread{'s' * (threads > 1)}: {moved / 1e6:.1f} MB a step")
    for name, samples in seconds.items():
        rest = samples[3:]  # the first ones compile, and touch memory for the first time
        median, least = statistics.median(rest), min(rest)
        print(f"  {name:26} {median * 1e3:7.2f} ms ({least * 1e3:.2f})  {median * 1e9 / moved:.3f} ns a byte")


if __name__ == "__main__":
    main()
