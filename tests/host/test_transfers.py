"""What would travel between the host and a GPU, and how often a step would wait for that.

The meta device stands for the GPU: it has shapes and refuses to mix with tensors on the CPU, but has no numbers. So a
stand-in makes the copies, and notes them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn

from rowstep import HostEmbedding, SparseAdam, _host

IDS = torch.tensor([[3, 5, 5], [5, 9, 3]])
CPU, META = torch.device("cpu"), torch.device("meta")


class Journeys:
    """Stands in for the copies. ``sent`` and ``awaited`` are the shapes of what went to the device, and came back."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []
        self.awaited: list[tuple[int, ...]] = []

    def transfer(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device.type == device.type:
            return tensor
        (self.awaited if device.type == "cpu" else self.sent).append(tuple(tensor.shape))
        return torch.ones(tensor.shape, dtype=tensor.dtype) if device.type == "cpu" else tensor.to(device)


@pytest.fixture
def journeys(monkeypatch: pytest.MonkeyPatch) -> Journeys:
    found = Journeys()
    monkeypatch.setattr(_host, "_transfer", found.transfer)
    return found


def test_a_step_waits_once_for_each_gradient(journeys: Journeys, backend: str) -> None:
    table = HostEmbedding(1000, 4, device=META)
    top = nn.Linear(4, 1, device=META)
    optimizer = SparseAdam(table.parameters())
    for _ in range(3):
        top(table(IDS)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert journeys.sent == [(3, 4), (2, 3)] * 3  # distinct rows, and the place of each id among them
    assert journeys.awaited == [(3, 4)] * 3


def test_two_lookups_wait_twice_and_inference_never(journeys: Journeys) -> None:
    table = HostEmbedding(1000, 4, device=META)
    (table(IDS).sum() + table(IDS[0]).sum()).backward()
    assert sorted(journeys.awaited) == [(2, 4), (3, 4)]
    journeys.awaited.clear()
    with torch.no_grad():
        table(IDS)
    assert not journeys.awaited


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_made_on_the_device(journeys: Journeys, mode: Any) -> None:
    table = HostEmbedding(1000, 4, device=META, mode=mode, padding_idx=5, dtype=torch.bfloat16)
    weights = torch.rand(6) if mode == "sum" else None
    found = table(IDS.view(-1), torch.tensor([0, 2]), weights)
    assert (found.device, found.dtype, found.shape) == (META, torch.bfloat16, (2, 4))
    found.sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.coalesce().indices().tolist() == [[3, 9]]
    assert journeys.awaited == [(3, 4)]


def test_the_cpu_as_device_makes_no_copy() -> None:
    rows = torch.randn(3, 4)
    assert _host._transfer(rows, CPU) is rows


def test_what_goes_to_a_device_is_pinned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    rows = torch.randn(3, 4)
    assert _host._transfer(rows, META).device == META
    assert pinned[0] is rows


def test_what_comes_from_a_device_is_waited_for_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    monkeypatch.setattr(torch, "empty_like", calls.empty_like)
    monkeypatch.setattr(torch.accelerator, "current_stream", calls.current_stream)
    gradient = torch.empty(3, 4, device=META)
    assert _host._transfer(gradient, CPU) is calls.empty_like().copy_()
    assert calls.mock_calls[:5] == [
        call.empty_like(gradient, device=CPU, pin_memory=True),
        call.empty_like().copy_(gradient, non_blocking=True),
        call.current_stream(META),
        call.current_stream().record_event(),
        call.current_stream().record_event().synchronize(),
    ]
    assert hasattr(torch.Stream, "record_event")
    assert hasattr(torch.Event, "synchronize")
