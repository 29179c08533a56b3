"""The one gate before an address is used.

A kernel takes tensors by address and believes what it is told of them: if one is smaller, or of another type, the heap
is corrupted. Programs do change tensors behind an optimizer's back. ``weight.data`` is replaced by a larger table, a
storage is resized, a state is edited by hand or loaded from an old file. So whatever a kernel reads or writes by
address passes here first, in every step and before every catch-up, for both backends. Only the gate gives out the
addresses of a table and its state, and an update takes a ``RowUpdate``, which only ``admit`` makes.

Operands that do not belong together raise. Those that do, but are on another device or not contiguous, get no address
and go to the reference.

A look at a table and its two moments takes 2.7 µs, where reading their addresses alone takes 0.5; a look at a gradient
takes 1.8 µs. Rows that wait are looked at before every lookup: for them see ``LateRows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._gradient import RowGradient
from .._memory import has_memory, lost_memory
from .._rules.adam import AS_TORCH, Kept, Scalars
from .._rules.rounding import step_key
from .._schedule import Schedule
from .._state import (
    FLOATS,
    FLOATS_IN_WORDS,
    State,
    described,
    has_moments,
    misplaced,
    slot_misfit,
    slots_in,
)

_INT64 = torch.int64

# Numba has no 16-bit floats. Those of bfloat16 are the upper half of a float32; float16 is left to the reference.
_OF_KERNELS = FLOATS - {torch.float16}


# Where p, m, v, amsgrad's maximum and the counts of rows begin in memory (0 if there are none), and the dtypes of p, m
# and v. A plain tuple: one with names takes as long to make as a look at half a tensor. The tensors are there to keep
# them alive until their addresses are used: a parameter that is listed twice may get other slots in between.
Addresses = tuple[int, int, int, int, int, torch.dtype, torch.dtype, torch.dtype, tuple[Any, ...]]


class Notes(NamedTuple):
    """What an update writes beside each row: the step at which it was up to date.

    Made by ``admit_notes``, or by a deferral whose notes that has admitted.
    """

    tensor: Tensor
    """int32, one for each row."""
    note: int
    at: int
    """0 if kernels cannot address them."""


class RowUpdate(NamedTuple):
    """What has passed the gate: a table, its state and a gradient that belong together. Only ``admit`` makes them."""

    param: Tensor
    state: State
    gradient: RowGradient
    scalars: Scalars
    notes: Notes | None
    at: Addresses | None
    """None if kernels cannot address all of it."""
    steps: int
    """How many steps the parameter will have taken."""


class Place(NamedTuple):
    """Where rows that wait were found to lie: what kernels are told."""

    at: Addresses
    notes_at: int
    pieces: list[tuple[Tensor, int, int]]
    """Each tensor, with its address and the size of its memory."""


class LateRows:
    """Rows that wait: a table, its moments, a note for each row, and the schedule that says what they have missed.

    The first look is at all of it. From then on it is enough that every tensor lies where it lay, in as much memory,
    until somebody may have had one of them in hand, and ``forget`` is called.
    """

    __slots__ = ("kept", "moments", "notes", "param", "place", "rounds_weights", "schedule", "seed")

    def __init__(
        self,
        param: Tensor,
        moments: State,
        notes: Tensor,
        schedule: Schedule,
        kept: Kept = AS_TORCH,
        rounds_weights: bool = False,
        seed: int = 0,
    ) -> None:
        self.param, self.moments, self.notes, self.schedule = param, moments, notes, schedule
        self.kept = kept._replace(amsgrad=schedule.amsgrad)
        self.rounds_weights, self.seed = rounds_weights, seed
        self.place: Place | None = None

    @property
    def rounds(self) -> bool:
        """Whether something of a row is rounded at random."""
        return self.kept.is_rounded or self.rounds_weights

    @property
    def key(self) -> int:
        """The key of random rounding when rows catch up with the schedule."""
        return step_key(self.seed, self.schedule.origin + self.schedule.step) if self.rounds else 0

    def forget(self) -> None:
        """Look at everything again, next time."""
        self.place = None

    def admit(self) -> Place | None:
        """Raise unless all of it belongs together; tell where it lies, if kernels can address it."""
        return self.last_place() or self._look()

    def last_place(self) -> Place | None:
        """Where all of it was found, if it still lies there."""
        place = self.place
        if place is not None:
            for tensor, address, size in place.pieces:
                if tensor.data_ptr() != address or tensor.untyped_storage().nbytes() != size:
                    self.place = None
                    return None
        return place

    def _look(self) -> Place | None:
        lead = self.notes.shape
        at = admit_table(self.param, self.moments, lead, self.kept)
        notes_at = admit_notes(self.notes, lead).at
        if at is None or not notes_at:
            return None
        tensors = [self.param, *(tensor for tensor in at[-1] if tensor is not None)]
        pieces = [(tensor, tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors]
        self.place = place = Place(at, notes_at, pieces)
        return place


def admit(
    param: Tensor,
    state: State,
    gradient: RowGradient,
    at: Addresses | None,
    scalars: Scalars,
    notes: Notes | None = None,
    steps: int = 0,
) -> RowUpdate:
    """Raise unless these can be the operands of an update; ``at`` is what ``admit_state`` said of the first two."""
    kept = scalars.kept
    if gradient.is_empty:  # nothing will be read or written
        return RowUpdate(param, state, gradient, scalars, notes, None, steps)
    _refuse_missing(state, kept, counted=scalars.per_row)
    if scalars.per_row:
        admit_counts(state, gradient.lead)
    if kept.second != "element":
        admit_rows_of(state["exp_avg_sq_row"], gradient.lead, "second_moment")
    is_addressable = admit_gradient(gradient) and (notes is None or notes.at != 0)
    return RowUpdate(param, state, gradient, scalars, notes, at if is_addressable else None, steps)


def admit_state(param: Tensor, state: State) -> Addresses | None:
    """Raise unless what is in this state belongs to this parameter; tell where both lie, if kernels can address them.

    Of a parameter without moments there is nothing to tell.
    """
    at = _addresses(param, state)
    if at is None:
        if param.dtype not in FLOATS:
            raise TypeError(f"the parameter has dtype {param.dtype}; expected {FLOATS_IN_WORDS}")
        if reason := slot_misfit(state, param):
            raise ValueError(reason)
    return at


def admit_counts(state: State, lead: tuple[int, ...]) -> None:
    """Raise unless the rows that this state has counts of run over ``lead``."""
    counted = tuple(state["row_step"].shape)
    if counted != lead:
        raise ValueError(
            f"the gradient's rows span dimensions {lead}, but bias_correction='row' has counted rows over {counted}; "
            "expected the same sparse_dim in every gradient"
        )


def admit_rows_of(moment: Tensor, lead: tuple[int, ...], option: str) -> None:
    """Raise unless this moment has a number for each row over ``lead``."""
    if tuple(moment.shape) != lead:
        raise ValueError(
            f"the gradient's rows span dimensions {lead}, but {option} has kept rows over {tuple(moment.shape)}; "
            "expected the same sparse_dim in every gradient"
        )


def admit_table(param: Tensor, state: State, lead: Sequence[int], kept: Kept) -> Addresses | None:
    """``admit_state`` for a table whose leading dimensions must be ``lead``, and that must have all its moments."""
    shape = param.shape
    if shape[: len(lead)] != lead:
        raise ValueError(
            f"the parameter now has shape {tuple(shape)}; expected leading dimensions {tuple(lead)}, as in its state. "
            "To change the rows of a table, use the optimizer's grow, keep_rows or permute_rows"
        )
    _refuse_missing(state, kept, counted=False)
    return admit_state(param, state)


def _addresses(param: Tensor, state: State) -> Addresses | None:
    """Where all of it lies, if it belongs together, fills memory without gaps, and each has memory of its own."""
    if "exp_avg_sq_row" in state:
        return _addresses_by_row(param, state)
    try:
        m, v = state["exp_avg"], state["exp_avg_sq"]
        dtype, state_dtype, shape = param.dtype, m.dtype, param.shape
        # Written out: a loop over the three, or a function for each, takes twice as long.
        if not (
            param.is_cpu and m.is_cpu and v.is_cpu
            and param.is_contiguous() and m.is_contiguous() and v.is_contiguous()
            and m.shape == shape and v.shape == shape and not param.is_neg()
            and dtype in _OF_KERNELS and state_dtype in _OF_KERNELS and v.dtype is state_dtype
            and param.untyped_storage().nbytes() >= param.nbytes and (not param.storage_offset() or has_memory(param))
            and m.untyped_storage().nbytes() >= (size := m.nbytes) and (not m.storage_offset() or has_memory(m))
            and v.untyped_storage().nbytes() >= size and (not v.storage_offset() or has_memory(v))
        ):  # fmt: skip
            return None
        p_at, m_at, v_at, u_at, counts_at = param.data_ptr(), m.data_ptr(), v.data_ptr(), 0, 0
        u = counts = None
        if p_at == m_at or m_at == v_at or v_at == p_at:
            return None
        if "max_exp_avg_sq" in state:
            u = state["max_exp_avg_sq"]
            if not (_fills(u, shape, state_dtype) and (u_at := u.data_ptr()) not in (p_at, m_at, v_at)):
                return None
        if "row_step" in state:
            counts = state["row_step"]
            if not _fills(counts, shape[: counts.dim()], _INT64):
                return None
            counts_at = counts.data_ptr()
    except (AttributeError, KeyError):  # of what is missing, or no tensor
        return None
    return p_at, m_at, v_at, u_at, counts_at, dtype, state_dtype, state_dtype, (m, v, u, counts)


def _addresses_by_row(param: Tensor, state: State) -> Addresses | None:
    """The same for a table with a second moment per row."""
    m, v, counts = state.get("exp_avg"), state["exp_avg_sq_row"], state.get("row_step")
    try:
        shape, dtype = param.shape, param.dtype
        is_good = (
            not param.is_neg() and dtype in _OF_KERNELS and _fills(param, shape, dtype)
            and v.dtype in _OF_KERNELS and not v.is_neg() and _fills(v, shape[: v.dim()], v.dtype)
            and (m is None or (m.dtype in _OF_KERNELS and _fills(m, shape, m.dtype)))
            and (counts is None or _fills(counts, shape[: counts.dim()], _INT64))
        )  # fmt: skip
    except AttributeError:  # of what is no tensor
        return None
    addresses = [tensor.data_ptr() for tensor in (param, v, m) if tensor is not None]
    if not is_good or len(set(addresses)) < len(addresses) or slot_misfit(state, param):
        return None
    p_at, v_at, m_at = addresses if m is not None else (*addresses, 0)
    counts_at = 0 if counts is None else counts.data_ptr()
    return p_at, m_at, v_at, 0, counts_at, dtype, dtype if m is None else m.dtype, v.dtype, (m, v, None, counts)


def _fills(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    is_plain = tensor.is_cpu and tensor.is_contiguous() and tensor.shape == shape and tensor.dtype is dtype
    return is_plain and has_memory(tensor)


def _refuse_missing(state: State, kept: Kept, *, counted: bool) -> None:
    if has_moments(state, kept) and (not counted or "row_step" in state):
        return
    wanted = [*(slot.name for slot in slots_in(kept)), *["row_step"] * counted]
    missing = next((key for key in wanted if key not in state), None)
    if missing is None:
        raise ValueError(
            f"its state has {misplaced(state, kept)}, which its options do not ask for; expected "
            f"{[slot.name for slot in slots_in(kept)]}"
        )
    raise ValueError(
        f"its state has no {missing!r}; expected a complete state. Load one, or clear the state to start over"
    )


def admit_gradient(gradient: RowGradient) -> bool:
    """Raise unless there is a row of values for each row number; tell whether kernels can address both."""
    if not gradient.is_admitted:  # one look is enough: nobody else has these tensors
        gradient.at = _admit_gradient(gradient)
        gradient.is_admitted = True
    return gradient.at is not None


def _admit_gradient(gradient: RowGradient) -> tuple[int, ...] | None:
    rows, values, columns = gradient.rows, gradient.values, gradient.columns
    is_addressable, count = admit_rows(rows), rows.numel()
    if values.shape != (count, columns) or values.dtype not in FLOATS:
        raise ValueError(
            f"the gradient has values {described(values)} for row numbers {described(rows)}; expected "
            f"{columns} floating-point numbers per row number"
        )
    if not values.is_cpu or values.is_neg():
        return None
    if not has_memory(values):
        raise ValueError(lost_memory("the gradient's values", values))
    if not is_addressable or not columns or values.dtype not in _OF_KERNELS or len(gradient.lead) != 1:
        return None
    stride, width = values.stride()
    if width != 1:  # kernels read whole rows
        values = gradient.values = values.contiguous()
        stride = columns
    row_count = gradient.row_count
    return (
        rows.data_ptr(), count, row_count, values.data_ptr(), stride * values.itemsize, columns,
        (count - 1).bit_length(), (row_count - 1).bit_length(),
    )  # fmt: skip


def admit_rows(rows: Tensor) -> bool:
    """Raise unless these are row numbers; tell whether kernels can address them."""
    if rows.dim() != 1 or rows.dtype is not _INT64:
        raise ValueError(f"the row numbers are {described(rows)}; expected a 1-D tensor of int64")
    if not rows.is_cpu:
        return False
    if not has_memory(rows):
        raise ValueError(lost_memory("the row numbers", rows))
    return rows.is_contiguous()


def admit_notes(notes: Tensor, lead: Sequence[int], note: int = 0) -> Notes:
    """Raise unless there is a note for every row over ``lead``; ``note`` is what to write there."""
    if notes.shape != lead or notes.dtype is not torch.int32:
        raise ValueError(f"the per-row step numbers are {described(notes)}; expected int32 of shape {tuple(lead)}")
    if notes.is_cpu and not has_memory(notes):
        raise ValueError(lost_memory("the per-row step numbers", notes))
    return Notes(notes, note, notes.data_ptr() if notes.is_cpu and notes.is_contiguous() else 0)
