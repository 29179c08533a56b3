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
from typing import Any

import torch
from torch import Tensor

from ._gradient import RowGradient
from ._rule import Rule, Step
from ._state import FLOATS, State, StateSpec

# As ``_kernels/job`` has them in the middle of a job.
_WORDS = struct.Struct("=9q")

# Numba has no 16-bit floats. Those of bfloat16 are the upper half of a float32; float16 is left to the reference.
OF_KERNELS = FLOATS - {torch.float16}


class Table:
    """A parameter, its state, and what kernels are told of both."""

    __slots__ = (
        "_pieces", "_strides", "ahead", "dtypes", "keeper", "kernels", "lead", "memory", "param", "pending", "report",
        "shape", "slots", "spec", "state", "words",
    )  # fmt: skip

    def __init__(self, param: Tensor, state: State, spec: StateSpec, kernels: Any) -> None:
        """Take what ``misfit`` has found nothing wrong with, and a state that has every slot of ``spec``."""
        self.param, self.state, self.spec = param, state, spec
        self.slots: dict[str, Tensor] = {name: state[name] for name in spec.names}
        self.shape, self.lead = param.shape, tuple(param.shape[:1])
        self._strides = param.stride()
        m, v = self.slots.get("exp_avg"), self.slots["exp_avg_sq_row" if spec.is_by_row else "exp_avg_sq"]
        self.dtypes = (param.dtype, v.dtype if m is None else m.dtype, v.dtype)
        tensors = (param, *self.slots.values())
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._pieces = [(t, t.data_ptr(), s, s.nbytes()) for t, s in zip(tensors, storages, strict=True)]
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
        self.words = b""
        self.tell_kernels()

    def tell_kernels(self, notes: Tensor | None = None) -> None:
        """Write what kernels are told: the shape, and where everything begins, 0 if there is none."""
        rows, columns = math.prod(self.lead), math.prod(self.shape[1:])
        second = "exp_avg_sq_row" if self.spec.is_by_row else "exp_avg_sq"
        there = [self.param, *map(self.slots.get, ("exp_avg", second, "max_exp_avg_sq", "row_step")), notes]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in there]
        self.words = _WORDS.pack(rows, columns, (rows - 1).bit_length(), *addresses)

    def fits(self, state: State, rule: Rule) -> bool:
        """Whether this is still the table with that state, and what waits in it may go on waiting under this rule."""
        if state is not self.state or "step" not in state:
            return False
        for name, slot in self.slots.items():
            if state.get(name) is not slot:
                return False
        return self.is_in_place() and (self.pending is None or self.pending.goes_on(rule))

    def takes(self, grad: Tensor) -> bool:
        """Whether a gradient is of the kind that most tables get: there is nothing that kernels do not check."""
        return (
            self.kernels is not None
            and grad.is_sparse
            and grad.is_cpu
            and grad.shape == self.shape
            and grad.dtype in OF_KERNELS
            and grad.sparse_dim() == 1
        )

    def is_in_place(self) -> bool:
        """Whether everything lies where it was found, in as much memory."""
        param = self.param
        # Strides: a square table that is transposed in place keeps its address and shape.
        if param.dtype is not self.dtypes[0] or param.shape != self.shape or param.stride() != self._strides:
            return False
        for tensor, address, storage, size in self._pieces:
            if tensor.data_ptr() != address or storage.nbytes() != size:
                return False
        return True

    @property
    def row_count(self) -> int:
        return math.prod(self.lead)


def _is_for_kernels(tensor: Tensor) -> bool:
    is_plain = tensor.is_contiguous() and not tensor.is_neg()
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
