"""Where the memory of the state comes from, and what happens if there is none."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rowstep import DeferredAdam, SparseAdam, _state
from tests.helpers.gradients import rows_of, step_with, table

pytestmark = pytest.mark.usefixtures("backend")


def test_huge_pages_are_only_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be built without them: then madvise is an error."""

    class WithoutHugePages(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("rowstep._state.mmap.mmap", WithoutHugePages)
    param = Parameter(torch.zeros(1 << 15, 64))  # 8 MB: large enough to ask for them
    optimizer = SparseAdam([param])
    step_with(optimizer, param, rows_of(param, [0, 1 << 14]))
    assert optimizer.state[param]["exp_avg"].count_nonzero() == 128


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("cls", [SparseAdam, DeferredAdam])
def test_out_of_memory_in_a_first_step_leaves_no_half_of_a_state(
    monkeypatch: pytest.MonkeyPatch, cls: type[SparseAdam | DeferredAdam], at: int
) -> None:
    param, other = table(6, 2), table(6, 2)
    optimizer = cls([other, param], amsgrad=True)
    step_with(optimizer, other, rows_of(other, [1]))
    made = 0
    zeros_like = _state.zeros_like

    def failing(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == at + 1:
            raise MemoryError("no memory left")
        return zeros_like(like)

    before = param.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(_state, "zeros_like", failing)
        with pytest.raises(MemoryError):
            step_with(optimizer, param, rows_of(param, [2], 1.0))
    assert torch.equal(param, before)
    step_with(optimizer, param, rows_of(param, [2], 1.0))
    alone = Parameter(before.clone())
    expected = cls([alone], amsgrad=True)
    step_with(expected, alone, rows_of(alone, [2], 1.0))
    assert torch.equal(param, alone)
    assert int(optimizer.state[param]["step"]) == 1


def test_the_first_count_of_rows_does_not_search_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    param = table(1000, 4)
    optimizer = SparseAdam([param], bias_correction="row")
    monkeypatch.setattr(torch.Tensor, "ne", lambda *_: pytest.fail("the whole table was looked at"))
    step_with(optimizer, param, rows_of(param, [3, 3, 999]))
    assert optimizer.state[param]["row_step"].sum() == 2


def test_a_dropped_optimizer_is_freed_at_once() -> None:
    param = table(6, 2)
    for cls in (SparseAdam, DeferredAdam):
        optimizer = cls([param])
        step_with(optimizer, param, rows_of(param, [2]))
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
