"""What kernels on a GPU find wrong, where the host reads it without waiting for the device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Report:
    """What kernels find wrong with the gradients of one table, wherever it lies at the time."""

    _retired: ClassVar[dict[torch.device, list[Tensor]]] = {}

    def __init__(self) -> None:
        self._devices = list[torch.device]()
        """Where the table is, and before that where it was."""
        # The latter two by program: arrays that grow with the number of ids in a step.
        self._outside, self._skipped, self._stale = list[Tensor](), list[Tensor](), list[Tensor]()

    def __del__(self) -> None:
        """Keep what kernels may still write to until somebody waits: torch knows of no stream that uses it."""
        for device in self._devices:
            if device.type != "cpu":
                self._retired.setdefault(device, []).extend((*self._outside, *self._stale))

    def move_to(self, device: torch.device) -> None:
        """The kernels are launched there from now on."""
        self._devices = [device, *(other for other in self._devices if other != device)]

    @property
    def outside(self) -> Tensor:
        """Where an id that is not in the table goes: itself if it is negative, else one more; 0 if there is none."""
        return self._pinned(self._outside, 1, torch.int64)

    def skipped(self, count: int) -> Tensor:
        """Where each of so many programs counts the rows that it skips."""
        return _places(self._skipped, count, dtype=torch.int64, device=self._devices[0])

    def stale(self, count: int) -> Tensor:
        """Where each of so many programs notes that its row was not up to date."""
        return self._pinned(self._stale, count, torch.int8)

    def _pinned(self, arrays: list[Tensor], count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, which all devices can write to."""
        return _places(arrays, count, dtype=dtype, device=_CPU, pin_memory=self._devices[0].type != "cpu")

    @property
    def skipped_rows(self) -> int:
        """How many rows were skipped so far."""
        return sum(int(places.sum()) for places in self._skipped)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been found wrong as yet."""
        return not any(places.numpy().any() for places in (*self._outside, *self._stale))

    def taken(self) -> tuple[int | None, int]:
        """An id outside of the table, if there was one, and how many rows were stale; the report is empty then."""
        found, stale = (sum(int(places.numpy().sum()) for places in some) for some in (self._outside, self._stale))
        for places in (*self._outside, *self._stale):
            places.numpy().fill(0)
        return (found - (found > 0) if found else None), stale

    def wait(self) -> None:
        """Wait for the steps that have been launched."""
        for device in self._devices:
            if device.type != "cpu":
                retired = self._retired.pop(device, None)  # before: what retires meanwhile may not be done
                torch.cuda.synchronize(device)
                del retired


_CPU = torch.device("cpu")


def _places(arrays: list[Tensor], count: int, *, device: torch.device, **options: Any) -> Tensor:
    """The newest of these arrays that is on a device and has so many places, or else a new one."""
    for places in reversed(arrays):
        if places.device == device and len(places) >= count:
            return places
    arrays.append(torch.zeros(1 << (count - 1).bit_length(), device=device, **options))
    return arrays[-1]
