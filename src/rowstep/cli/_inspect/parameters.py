"""Which state belongs to which weights, and what there is to say of each parameter.

A file need not say what a parameter's number stands for. Names are taken from the state dict where it has them; then
from the weights, where only one parameter and one weight have a shape; else a parameter is called by its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowstep.cli._inspect import figures
from rowstep.cli._inspect.contents import Contents, Optimizer
from rowstep.cli._inspect.stored import Stored
from rowstep.cli._inspect.text import value

Shape = tuple[int | None, ...]

_LONGEST_PREFIX = 3  # such as "checkpoint.model.module."
_SECOND_MOMENTS = ("exp_avg_sq", "exp_avg_sq_row")
_PER_TABLE_OR_LINE = ("step", "row_step", "exp_avg_sq_row", "exp_avg_sq_column", "exp_avg_sq_sum")


@dataclass(frozen=True)
class Parameter:
    name: str
    is_named_by_shape: bool = False
    weights: Stored | None = None
    slots: Mapping[str, Any] = field(default_factory=dict)
    """``Stored`` or any other value, as the file has them."""
    touched: tuple[int, int] | None = None
    """How many rows have taken a step, of how many; None if the file does not tell."""

    @property
    def tensors(self) -> dict[str, Stored]:
        return {name: slot for name, slot in self.slots.items() if isinstance(slot, Stored)}

    @property
    def shape(self) -> Shape | None:
        return self.weights.shape if self.weights is not None else _shape_of_state(self.slots)

    @property
    def weight_count(self) -> int | None:
        """How many weights the parameter has, also if they are not in the file."""
        count = 1
        for size in self.shape if self.shape is not None else (None,):
            if size is None:
                return None
            count *= size
        return count

    @property
    def state_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.tensors.values())

    @property
    def steps(self) -> float | None:
        step = self.slots.get("step")
        if isinstance(step, Stored):
            return step.number()
        if not isinstance(step, (int, float)) or isinstance(step, bool) or abs(step) > 1 << 63:
            return None
        return step

    @property
    def row_counts(self) -> Stored | None:
        """The steps that each row has taken, if they are counted."""
        slot = self.slots.get("row_step")
        return slot if isinstance(slot, Stored) and slot.flaw is None and not slot.dtype.is_complex else None


@dataclass(frozen=True)
class Parameters:
    of_optimizers: list[list[Parameter]]
    """In the order of the optimizers."""
    without_state: list[Parameter]
    """Weights that no optimizer has."""

    @property
    def all(self) -> list[Parameter]:
        return [parameter for group in (*self.of_optimizers, self.without_state) for parameter in group]


def of(contents: Contents) -> Parameters:
    of_optimizers = [_of_optimizer(optimizer, contents.weights) for optimizer in contents.optimizers]
    owned = {id(parameter.weights) for group in of_optimizers for parameter in group}
    rest = [Parameter(name, weights=stored) for name, stored in contents.weights.items() if id(stored) not in owned]
    return Parameters(of_optimizers, rest)


def _of_optimizer(optimizer: Optimizer, weights: dict[str, Stored]) -> list[Parameter]:
    names = _names(optimizer)
    endings = _endings(weights)
    owned = {key: _weight_called(name, weights, endings) for key, name in names.items()}
    taken = {name for name in owned.values() if name is not None}
    nameless = {key: _shape_of_state(optimizer.states.get(key, {})) for key, name in owned.items() if name is None}
    by_shape = _matched({key: shape for key, shape in nameless.items() if names[key] == key}, weights, taken)
    found = []
    for key, name in names.items():
        weight = owned[key] or by_shape.get(key)
        slots = optimizer.states.get(key, {})
        shown = by_shape.get(key) or (f"parameter {key}" if key.isdecimal() and name == key else name)
        stored = weights[weight] if weight is not None else None
        found.append(Parameter(shown, key in by_shape, stored, slots, _touched(slots)))
    return found


def _names(optimizer: Optimizer) -> dict[str, str]:
    """For each parameter, by the key of its state, the name the file gives it, or the key itself."""
    names: dict[str, str] = {}
    for group in optimizer.groups:
        keys, given = group.get("params"), group.get("param_names")
        keys = keys if isinstance(keys, (list, tuple)) else []
        given = given if isinstance(given, (list, tuple)) and len(given) == len(keys) else keys
        for key, name in zip(keys, given, strict=True):
            key_text = key if isinstance(key, str) else value(key)
            names.setdefault(key_text, name if isinstance(name, str) else key_text)
    for key in optimizer.states:
        names.setdefault(key, key)
    return names


def _weight_called(name: str, weights: dict[str, Stored], endings: dict[str, list[str]]) -> str | None:
    """The weight of this name, maybe with where it lies in front of it. A number is no name."""
    if name.isdecimal():
        return None
    longer = endings.get(name, [])
    return name if name in weights else longer[0] if len(longer) == 1 else None


def _endings(weights: dict[str, Stored]) -> dict[str, list[str]]:
    """The weights by what their names end with, after the first one, two or three words."""
    found: dict[str, list[str]] = {}
    for name in weights:
        rest = name
        for _ in range(_LONGEST_PREFIX):
            _, dot, rest = rest.partition(".")
            if dot:
                found.setdefault(rest, []).append(name)
    return found


def _matched(shapes: Mapping[str, Shape | None], weights: dict[str, Stored], taken: set[str]) -> dict[str, str]:
    """For each parameter whose shape only one weight has, and no other parameter, that weight."""
    free: dict[Shape, list[str]] = {}
    for name, stored in weights.items():
        if name not in taken:
            free.setdefault(stored.shape, []).append(name)
    wanted = Counter(shapes.values())
    return {
        key: free[shape][0]
        for key, shape in shapes.items()
        if shape is not None and wanted[shape] == 1 and len(free.get(shape, [])) == 1
    }


def _shape_of_state(slots: Mapping[str, Any]) -> Shape | None:
    """The parameter's shape, as far as its state tells: slots of other optimizers have one number per element."""
    tensors = {name: slot for name, slot in slots.items() if isinstance(slot, Stored)}
    elements = [slot.shape for name, slot in tensors.items() if name not in _PER_TABLE_OR_LINE]
    if elements:
        return max(elements, key=len)
    row, column = tensors.get("exp_avg_sq_row"), tensors.get("exp_avg_sq_column")
    if row is None:
        row = tensors.get("row_step")
    if row is None or not row.shape:
        return None
    return (*row.shape, *column.shape) if column is not None else (*row.shape, None)


def _touched(slots: Mapping[str, Any]) -> tuple[int, int] | None:
    counts = Parameter("", slots=slots).row_counts
    # Counts that are zero everywhere say nothing: only gradients of rows are counted, and there was none.
    if counts is not None and (above := figures.rows_above_zero(counts)):
        return above, counts.numel
    for name in _SECOND_MOMENTS:
        second = slots.get(name)
        if isinstance(second, Stored) and second.flaw is None:
            return figures.rows_not_zero(second), second.row_count
    return (0, counts.numel) if counts is not None else None
