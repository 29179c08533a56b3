"""Row surgery that does not come to its end: memory runs out, a function raises, Ctrl-C at any line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdamW, SparseAdam, _memory, _surgery
from tests.helpers.deferred_cases import LONG, embedding
from tests.helpers.gradients import Snapshot
from tests.helpers.interrupts import interrupted

# Where surgery happens, at every second line. With ROWSTEP_LONG=1 at every one, also of those that flush a table first.
PLACES = ("/rowstep/",) if LONG else ("/_commit.py", "/_surgery.py", "/rowstep/_stateful.py", "/rowstep/_deferred/")
IDS = torch.tensor([1, 2, 1])
ORDER = torch.arange(9, -1, -1)

Optimizer = SparseAdam | DeferredAdamW
Surgery = Callable[[Optimizer, Tensor], None]

MAKERS: dict[str, Callable[[nn.Embedding], Optimizer]] = {
    "sparse": lambda module: SparseAdam(module.parameters(), amsgrad=True, bias_correction="row"),
    "deferred": lambda module: DeferredAdamW(module, amsgrad=True),
}
SURGERIES: dict[str, Surgery] = {
    "grow": lambda optimizer, weight: optimizer.grow(weight, 3, nn.init.ones_),
    "keep": lambda optimizer, weight: optimizer.keep_rows(weight, torch.tensor([9, 1, 5])),
    "permute": lambda optimizer, weight: optimizer.permute_rows(weight, ORDER),
    "reset": lambda optimizer, weight: optimizer.reset_rows(weight, torch.tensor([2, 1])),
}


class Case:
    """A table in training, all rows up to date, with a gradient and a graph that are there."""

    def __init__(self, maker: str) -> None:
        torch.manual_seed(0)
        self.module = embedding(10)
        self.weight = self.module.weight
        self.optimizer = MAKERS[maker](self.module)
        self.train(torch.arange(10))
        self.train(IDS)
        if isinstance(self.optimizer, DeferredAdamW):
            self.optimizer.flush()
        self.loss = self.module(IDS).square().sum()
        self.grad = self.weight.grad

    def train(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.module(ids).square().sum().backward()
        self.optimizer.step()

    def contents(self) -> dict[str, Tensor]:
        """The table and its state."""
        state = {key: torch.as_tensor(value) for key, value in self.optimizer.state[self.weight].items()}
        return {key: tensor.detach().clone() for key, tensor in (state | {"weight": self.weight}).items()}

    def holds(self, expected: dict[str, Tensor]) -> bool:
        found = self.contents()
        assert found.keys() == expected.keys()
        return all(torch.equal(found[key], expected[key]) for key in expected)

    def assert_works(self) -> None:
        """The run can go on and the whole table be read, whatever happened."""
        for ids in (torch.arange(len(self.weight)), torch.tensor([0, 2]), torch.tensor([1])):
            self.train(ids)
        self.optimizer.state_dict()
        assert self.weight.isfinite().all()


@pytest.fixture(params=list(MAKERS))
def maker(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Kernels hold addresses of what surgery replaces; the reference holds none.
@pytest.mark.parametrize("backend", ["reference", "numba"] if LONG else ["numba"], indirect=True)
@pytest.mark.parametrize("name", list(SURGERIES))
def test_an_interrupt_at_any_line_leaves_all_or_nothing(backend: str, maker: str, name: str) -> None:
    done = Case(maker)
    before = done.contents()
    SURGERIES[name](done.optimizer, done.weight)
    after = done.contents()
    outcomes = []

    def prepare() -> tuple[Case, Callable[[], object]]:
        case = Case(maker)
        return case, lambda: SURGERIES[name](case.optimizer, case.weight)

    for case in interrupted(prepare, 40, PLACES):
        outcomes.append(case.holds(after))
        assert case.holds(after) or case.holds(before)
        if case.holds(before):
            assert case.weight.grad is case.grad
            torch.autograd.backward(case.loss)
        case.assert_works()
    assert outcomes == sorted(outcomes)  # first nothing, from some line on all
    assert not outcomes[0]
    assert outcomes[-1]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", list(SURGERIES))
def test_memory_that_runs_out_changes_nothing(maker: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th allocation fails, for each n."""
    for count in range(100):
        case = Case(maker)
        before = Snapshot(case.optimizer)
        calls = 0

        def scarce(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def counted(*args: Any, **kwargs: Any) -> Tensor:
                nonlocal calls
                calls += 1
                if calls > count:  # noqa: B023
                    raise MemoryError("not enough memory")
                return allocate(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            patch.setattr(_surgery, "zeros_like", scarce(_memory.zeros_like))
            patch.setattr(Tensor, "index_select", scarce(Tensor.index_select))
            patch.setattr(Tensor, "new_empty", scarce(Tensor.new_empty))
            try:
                SURGERIES[name](case.optimizer, case.weight)
            except MemoryError:
                pass
            else:
                break
        before.assert_unchanged()
        assert case.weight.grad is case.grad
        torch.autograd.backward(case.loss)
        case.assert_works()
    assert count >= 3


@pytest.mark.usefixtures("backend")
def test_a_function_that_raises_changes_nothing(maker: str) -> None:
    def half(rows: Tensor) -> None:
        rows[0] = 1.0
        raise ArithmeticError("no idea")

    case = Case(maker)
    before = Snapshot(case.optimizer)
    with pytest.raises(ArithmeticError, match="no idea"):
        case.optimizer.grow(case.weight, 2, half)
    before.assert_unchanged()
    assert case.weight.grad is case.grad
    torch.autograd.backward(case.loss)
    case.assert_works()
