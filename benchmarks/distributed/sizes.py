"""What the suite `distributed` measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import MANY, ZIPF, Case


@dataclass(frozen=True)
class Sizes:
    counts: tuple[int, ...]  # of ranks, beside one process
    agreement: Case  # rows that no number of ranks divides
    agreement_steps: int
    traffic: Case  # ids are those of one rank
    traffic_steps: int
    balance: Case  # ids are those of one rank
    balance_steps: int
    saved_by: int  # ranks
    loaded_by: tuple[int, ...]
    timed: Case  # ids are those of all ranks together
    timed_batches: int
    timed_counts: tuple[int, ...]
    tables: Case  # ids are those of one rank
    tables_counts: tuple[int, ...]
    together_steps: int
    messages_counts: tuple[int, ...]
    messages_tables: tuple[int, ...]
    messages_steps: int
    planned_counts: tuple[int, ...]  # only simulated
    planned_tables: int
    planned_steps: int


BALANCED_RANKS = 8  # only simulated
WHOLE_STEP_RANKS = 2

FULL = Sizes(
    counts=(2, 3, 4),
    agreement=Case("agreement", 1_003, 16, 64),
    agreement_steps=50,
    traffic=Case("traffic", 1_000_000, 64, 16_384, zipf=True),
    traffic_steps=10,
    balance=Case("balance", 1_000_000, 64, 8_192, zipf=True),
    balance_steps=50,
    saved_by=2,
    loaded_by=(3, 1, 4),
    timed=ZIPF,
    # DeferredAdam is warmed up for as many steps, so that rows have waited: the rarest comes every 220 steps.
    timed_batches=300,
    timed_counts=(1, 2),
    tables=MANY,
    tables_counts=(2, 4),
    together_steps=50,
    messages_counts=(2, 4),
    messages_tables=(1, 26, 200),
    messages_steps=3,
    planned_counts=(8, 64),
    planned_tables=800,
    planned_steps=20,
)
QUICK = Sizes(
    counts=(2,),  # a worker takes four seconds to import torch
    agreement=Case("agreement", 103, 4, 16),
    agreement_steps=5,
    traffic=Case("traffic", 10_000, 8, 512, zipf=True),
    traffic_steps=2,
    balance=Case("balance", 10_000, 8, 512, zipf=True),
    balance_steps=2,
    saved_by=2,
    loaded_by=(1,),
    timed=Case("zipf-20k", 20_000, 16, 4_096, zipf=True),
    timed_batches=5,
    timed_counts=(1, 2),
    tables=Case("3-tables", 1_000, 4, 64, tables=3),
    tables_counts=(2,),
    together_steps=5,
    messages_counts=(2,),
    messages_tables=(1, 5),
    messages_steps=1,
    planned_counts=(8,),
    planned_tables=50,
    planned_steps=1,
)
