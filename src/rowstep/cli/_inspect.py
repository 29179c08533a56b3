"""`rowstep inspect`: what a checkpoint holds for each parameter, without the model or the optimizer that wrote it.

Weights and optimizer states are found in a tree of dicts and lists. An optimizer's state dict is known by its
``param_groups``; every other tensor is a weight. Unless states have names, as those of ``named_parameters()`` do, only
shapes and order connect them with weights: where as many states of one group as weights have a shape, they are matched
in order. Anything else would be a guess: one of several weights.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rowstep._part import ROW_ORDER
from rowstep.cli._reading import Stored, read, reason, stored
from rowstep.cli.extras import CommandError, printable

_PER_ROW = ("row_step", "exp_avg_sq_row")
_BLOCK = 1 << 18  # numbers at once: the norms of 1M x 64 took 0.13 s on one thread, and 0.20 s with 1 << 20
_OFF = ("None", "False", "0", "0.0")
_NOTES = """
never touched: row_step is 0 or, where rows are not counted, the second moment is 0. Of steps and norms the least, the
median and the largest are shown. by order, by shape: the file names no parameters, so states were matched with weights
of the same shape, in order. An optimizer that is made from named_parameters() saves names."""

Shape = tuple[int | None, ...]


def run(arguments: argparse.Namespace) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about dtypes and layouts that it will drop
            lines = list(_lines(*find(read(arguments.path, arguments.trust))))  # reads the numbers before it prints
    except (Exception, CheckpointException) as error:  # a damaged file may raise anything
        if isinstance(error, CommandError) or getattr(error, "filename", None):  # an OSError of a file that it names
            raise
        raise CommandError(f"{arguments.path}: cannot be read: {reason(error)}") from error
    print(*lines, sep="\n")
    return 0


# What is in the file


@dataclass
class Parameter:
    name: str
    group: int
    slots: dict[str, Any]
    candidates: list[str] = field(default_factory=list)  # the weights it may be the state of; one if that is known
    how: str = ""  # it was matched, if not by its name

    @property
    def tensors(self) -> dict[str, Stored]:
        return {name: slot for name, slot in self.slots.items() if isinstance(slot, Stored)}

    @property
    def shape(self) -> Shape | None:
        """As far as the state tells; if that has only numbers per row, the width is None."""
        rows = [slot.shape[:1] for name, slot in self.tensors.items() if name in _PER_ROW]
        whole = [slot.shape for name, slot in self.tensors.items() if name not in ("step", ROW_ORDER, *_PER_ROW)]
        return max(whole, key=len) if whole else (*rows[0], None) if rows else None


Optimizer = tuple[list[Mapping[Any, Any]], list[Parameter]]  # its groups and parameters


def find(tree: Any) -> tuple[dict[str, Stored], list[Optimizer]]:
    """The weights by name, and the optimizers. A container that occurs again, maybe in itself, is looked at once."""
    weights: dict[str, Stored] = {}
    optimizers: list[Optimizer] = []
    seen: set[int] = set()

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node := stored(node), Stored):
            weights[".".join(path) or "the tensor"] = node
        elif isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            items = dict(node) if isinstance(node, Mapping) else dict(enumerate(node))
            groups, states = items.get("param_groups"), items.get("state", {})
            groups = list(groups.values()) if isinstance(groups, Mapping) else groups  # a directory has lists by number
            if isinstance(groups, list) and isinstance(states, Mapping) and all(isinstance(g, Mapping) for g in groups):
                optimizers.append((groups, _parameters(groups, states)))
            else:
                for key, value in items.items():
                    visit(value, (*path, str(key)))

    visit(tree, ())
    for _, parameters in optimizers:
        _match(parameters, weights)
    return weights, optimizers


def _parameters(groups: list[Any], states: Mapping[Any, Any]) -> list[Parameter]:
    slots = {str(key): state for key, state in states.items() if isinstance(state, Mapping)}
    found: dict[str, Parameter] = {}
    for number, group in enumerate([*groups, {"params": list(slots)}]):  # then those that no group has
        keys = group.get("params", [])
        names = group.get("param_names", keys)
        for key, name in zip(map(str, keys), map(str, names), strict=True):
            state = {str(slot): stored(value) for slot, value in slots.get(key, {}).items()}
            found.setdefault(key, Parameter(name, number, state))
    return list(found.values())


def _match(parameters: list[Parameter], weights: dict[str, Stored]) -> None:
    """Set the candidates of each parameter. One that is called by a number has no name."""
    named = [parameter for parameter in parameters if not parameter.name.isdecimal()]
    for parameter in named:
        longer = [name for name in weights if name.endswith(f".{parameter.name}")]
        parameter.candidates = [parameter.name] if parameter.name in weights else longer
    free = weights.keys() - {parameter.candidates[0] for parameter in named if len(parameter.candidates) == 1}
    alike: dict[tuple[str, ...], list[Parameter]] = {}
    for parameter in parameters:
        if parameter.name.isdecimal() and (shape := parameter.shape) is not None:
            same_rows = [name for name in weights if name in free and weights[name].shape[:1] == shape[:1]]
            fitting = [name for name in same_rows if None in shape or weights[name].shape == shape]
            alike.setdefault(tuple(fitting), []).append(parameter)
    for names, members in alike.items():
        in_order = len(names) == len(members) and len({member.group for member in members}) == 1
        for number, member in enumerate(members):
            member.candidates = [names[number]] if in_order else list(names)
            member.how = "" if not in_order else "by shape" if len(names) == 1 else "by order"


# What is shown


def _lines(weights: dict[str, Stored], optimizers: list[Optimizer]) -> Iterator[str]:
    for groups, parameters in optimizers:
        yield f"Optimizer state, {len(parameters)} parameters"
        for group in groups:
            options = {str(k): _value(v) for k, v in group.items() if k not in ("params", "param_names")}
            yield "group: " + ", ".join(f"{printable(k)}={v}" for k, v in options.items() if v not in _OFF)
        for parameter in parameters:
            yield from _parameter_lines(parameter, weights)
        yield ""
    parameters = [parameter for _, members in optimizers for parameter in members]
    owned = {name for parameter in parameters for name in parameter.candidates}
    if rest := {name: weight for name, weight in weights.items() if name not in owned}:
        yield "Other tensors" if optimizers else "Tensors"
        for name, weight in rest.items():
            yield f"  {printable(name)}: {_tensor(weight, weight.shape)}"
            yield from _rows(weight, {}, weight.shape)
        yield ""
    if not weights and not optimizers:
        raise ValueError("it holds no tensor; expected the state dict of a module or of an optimizer")
    in_state = sum(slot.nbytes for parameter in parameters for slot in parameter.tensors.values())
    yield f"Total: weights {sum(w.nbytes for w in weights.values()):,} B, optimizer state {in_state:,} B"
    yield _NOTES if optimizers else ""


def _parameter_lines(parameter: Parameter, weights: dict[str, Stored]) -> Iterator[str]:
    names = parameter.candidates or [f"parameter {parameter.name}" if parameter.name.isdecimal() else parameter.name]
    weight = weights[names[0]] if parameter.candidates else None
    shape = weight.shape if weight is not None else parameter.shape
    called = printable(names[0] if len(names) == 1 else f"one of {', '.join(names)}")
    yield f"  {called}{f' ({parameter.how})' if parameter.how else ''}: {_tensor(weight, shape)}"
    parts = [f"{sum(slot.nbytes for slot in parameter.tensors.values()):,} B"]
    parts += [f"step {_value(parameter.slots['step'])}"] if "step" in parameter.slots else []
    parts += [f"{printable(n)} {_tensor(slot, slot.shape)}" for n, slot in parameter.tensors.items() if n != "step"]
    yield f"    state: {'; '.join(parts)}" if parameter.slots else "    no state"
    yield from _rows(weight if len(names) == 1 else None, parameter.slots, shape)


def _rows(weight: Stored | None, slots: Mapping[str, Any], shape: Shape | None) -> Iterator[str]:
    """How many rows of a table were never touched, the steps that rows have taken, and their norms."""
    if shape is None or len(shape) < 2:
        return
    steps, norms, parts = _norms(slots.get("row_step")), _norms(weight), []
    touched = steps if steps.any() else _norms(slots.get("exp_avg_sq", slots.get("exp_avg_sq_row")))
    if len(touched):
        untouched = int((touched == 0).sum())
        parts.append(f"{untouched:,} of {len(touched):,} never touched ({untouched / len(touched):.1%})")
    for what, values in (("steps of touched rows", steps[steps > 0]), ("norms", norms[norms.isfinite()])):
        if len(values):
            middle = values.kthvalue((len(values) + 1) // 2).values
            parts.append(f"{what} {values.min():.4g}, {middle:.4g}, {values.max():.4g}")
    if broken := int((~norms.isfinite()).sum()):
        parts.append(f"{broken:,} with NaN or inf")
    if parts:
        yield f"    rows: {'; '.join(parts)}"


def _norms(table: Any) -> torch.Tensor:
    """The Euclidean norm of each row in float64, so of a slot per row its numbers; empty if there are no numbers."""
    if not isinstance(table, Stored) or table.flaw or not math.prod(table.shape) or table.dtype.is_complex:
        return torch.empty(0)
    rows = table.shape[0] if table.shape else 1
    blocks = torch.split(table.read().reshape(rows, -1), max(1, _BLOCK * rows // math.prod(table.shape)))
    return torch.cat([torch.linalg.vector_norm(block.to(torch.float64), dim=1) for block in blocks])


def _tensor(tensor: Stored | None, shape: Shape | None) -> str:
    sizes = "shape unknown" if shape is None else " x ".join("?" if n is None else f"{n:,}" for n in shape) or "scalar"
    if tensor is None:
        return f"{printable(sizes)}, weights not in file"
    return f"{printable(sizes)} {str(tensor.dtype).removeprefix('torch.')}, {tensor.flaw or f'{tensor.nbytes:,} B'}"


def _value(value: Any) -> str:
    """A short form. Only of plain values: the repr of a list that contains itself many times over has no end."""
    if isinstance(value, Stored) and not value.flaw and math.prod(value.shape) == 1:
        value = value.read()
    if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
        value = value.item()
    parts = value if isinstance(value, (list, tuple)) else [value]
    is_plain = all(part is None or isinstance(part, (int, float, str, torch.dtype)) for part in parts)
    return printable(str(value).removeprefix("torch.")) if is_plain else f"<{type(value).__name__}>"
