"""What rules with less state are to reach: Adam's ranking, up to 1%.

Held against the NDCG of the whole list, which chance moves least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bars import Bar
from benchmarks.quality import rules
from benchmarks.quality.comparison import LEAST, ratio
from benchmarks.quality.ranking import FULL_NDCG
from benchmarks.quality.tuning import Result


def as_good_as_adam(results: Sequence[Result]) -> Iterator[Bar]:
    adam = next(result for result in results if result.rule == rules.ADAM.name)
    for result in results:
        if result.rule not in (rules.ADAM.name, rules.ADAGRAD.name):
            reached = ratio(result.figures[FULL_NDCG], adam.figures[FULL_NDCG]).mean
            yield Bar(f"NDCG of {result.rule} over SparseAdam's", 100 * LEAST, 100 * reached, "%", at_least=True)
