"""A parameter with rows, prepared: it and its state were found to belong together, and kernels are told where they lie.

A kernel takes tensors by address and believes what it is told of them: if one is smaller, or of another type, the heap
is corrupted. And programs do change tensors behind an optimizer's back. ``weight.data`` is replaced by a larger table,
a storage is resized, a state is edited by hand or loaded from an old file. So everything is looked at when a table is
prepared, and from then on a few comparisons tell whether it still is what it was. The storages are held: what a kernel
is told stays memory, whatever a signal handler or another thread does to the tensors.

What lies where no kernel reaches, has strides of its own or is of a dtype that kernels do not take is left to the
reference.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._gradient import RowGradient
from ._memory import data_address
from ._rule import Rule, Step
from ._state import FLOATS, State, StateSpec
from ._torch_internals import indices_of, values_of

# As ``_kernels/job`` has them in the middle of a job.
_WORDS = struct.Struct("=9q")

# Numba has no 16-bit floats. Those of bfloat16 are the upper half of a float32; float16 is left to the reference.
OF_KERNELS = FLOATS - {torch.float16}


class Table:
    """A parameter, its state, and what kernels are told of both."""

    __slots__ = (
        "_pieces", "_place", "ahead", "columns", "dtypes", "keeper", "kernel", "kernel_for", "kernels",
        "lead", "memory", "param", "pending", "report", "shape", "slots", "spec", "state", "words",
    )  # fmt: skip

    def __init__(self, param: Tensor, state: State, spec: StateSpec, kernels: Any) -> None:
        """Take what ``misfit`` has found nothing wrong with, and a state that has every slot of ``spec``."""
        self.param, self.state, self.spec = param, state, spec
        self.slots: dict[str, Tensor] = {name: state[name] for name in spec.names}
        self.shape, self.lead, self.columns = param.shape, tuple(param.shape[:1]), math.prod(param.shape[1:])
        m, v = self.slots.get("exp_avg"), self.slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"]
        self.dtypes = (param.dtype, v.dtype if m is None else m.dtype, v.dtype)
        tensors = (param, *self.slots.values())
        self._place: tuple[Any, ...] = (param, *_memory_of(param), param.shape, param.stride())
        self._pieces = [(name, slot, *_memory_of(slot), slot.shape, slot.stride()) for name, slot in self.slots.items()]
        u = self.slots.get("max_exp_avg_sq", v)
        # Kernels take amsgrad's maximum to be of the dtype of v. A loaded one may be of another.
        is_for_kernels = param.dim() > 0 and u.dtype is v.dtype and all(map(_is_for_kernels, tensors))
        self.kernels = kernels if is_for_kernels else None
        self.memory = param.data_ptr() - param.storage_offset() * param.itemsize
        """Where the storage of the weights begins, which other parameters may share."""
        self.pending: Any = None
        """The ``Deferral`` that says what rows wait for, under a deferred optimizer."""
        self.report: Any = None
        """What kernels on a GPU find wrong, which is read a step later; None where they say so at once."""
        self.ahead: Any = None
        self.keeper: Any = None
        """For the table of a ``HostEmbedding``: what is done for it while the model computes, and for whom."""
        self.kernel: Any = None
        self.kernel_for: Any = None
        """The kernel of the last step, and what it was chosen by."""
        self.words = b""
        self.tell_kernels()

    def tell_kernels(self, notes: Tensor | None = None) -> None:
        """Write what kernels are told: the shape, and where everything begins, 0 if there is none."""
        rows = math.prod(self.lead)
        second = "exp_avg_sq_row" if self.spec.is_by_row else "exp_avg_sq"
        there = [self.param, *map(self.slots.get, ("exp_avg", second, "max_exp_avg_sq", "row_step")), notes]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in there]
        self.words = _WORDS.pack(rows, self.columns, (rows - 1).bit_length(), *addresses)

    def fits(self, state: State, rule: Rule) -> bool:
        """Whether this is still the table with that state, and what waits in it may go on waiting under this rule."""
        return (
            state is self.state
            and "step" in state
            and self.is_in_place(state)
            and (self.pending is None or self.pending.goes_on(rule))
        )

    def rows_of(self, grad: Tensor) -> RowGradient | None:
        """The rows of a gradient of the kind that most tables get, so that there is nothing left for us to check; None
        for any other.
        """
        if self.kernels is None or not grad.is_sparse or grad.shape != self.shape or not grad.is_cpu:
            return None
        indices, values = indices_of(grad), values_of(grad)
        sparse_dim, count = indices.shape
        if sparse_dim != 1 or len(self.shape) != 2 or values.dtype not in OF_KERNELS or not indices.is_contiguous():
            return None
        return RowGradient(indices, values, self.lead, (count, self.columns))

    def is_in_place(self, slots: Mapping[str, Any]) -> bool:
        """Whether these are its slots, and everything lies where it was found, in as much memory."""
        param, address, storage, size, dtype, shape, strides = self._place
        if (
            param.data_ptr() != address
            or storage.nbytes() != size
            or param.dtype is not dtype
            or param.shape != shape
            # A square table that is transposed in place keeps its shape. What kernels take is contiguous, so strides,
            # which take longer to compare, are seldom looked at.
            or not (param.is_contiguous() or param.stride() == strides)
        ):
            return False
        for name, slot, address, storage, size, dtype, shape, strides in self._pieces:
            if (
                slots.get(name) is not slot
                or slot.data_ptr() != address
                or storage.nbytes() != size
                or slot.dtype is not dtype
                or slot.shape != shape
                or not (slot.is_contiguous() or slot.stride() == strides)
            ):
                return False
        return True

    def misplace(self) -> None:
        """From now on, do not find it in place."""
        self._place = (self.param, -1, *self._place[2:])

    @property
    def row_count(self) -> int:
        return math.prod(self.lead)


def _memory_of(tensor: Tensor) -> tuple[int, torch.UntypedStorage, int, torch.dtype]:
    storage = tensor.untyped_storage()
    return tensor.data_ptr(), storage, storage.nbytes(), tensor.dtype


def _is_for_kernels(tensor: Tensor) -> bool:
    has_place = data_address(tensor) != 0 or not tensor.numel()
    is_plain = tensor.is_contiguous() and not tensor.is_neg() and has_place
    return is_plain and (tensor.dtype in OF_KERNELS or tensor.dtype is torch.int64)


class Job:
    """A step of one parameter."""

    __slots__ = ("gradient", "note", "param", "spec", "step", "table")

    def __init__(
        self, param: Tensor, table: Table | None, spec: StateSpec, gradient: RowGradient | None, step: Step
    ) -> None:
        self.param, self.spec, self.step = param, spec, step
        self.gradient: Any = gradient
        """None if torch's dense Adam makes the step."""
        self.table: Any = table
        """None until the table has all its state."""
        self.note = 0
        """Where rows may wait: the step, in numbers of the schedule, that those of the gradient have then reached."""
