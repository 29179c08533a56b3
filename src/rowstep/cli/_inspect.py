"""`rowstep inspect`: what a checkpoint holds for each parameter, without the model or the optimizer that wrote it.

Weights and optimizer states are found in a tree of dicts and lists. An optimizer's state dict is known by its
``param_groups``; every other tensor is a weight. Unless states have names, as those of ``named_parameters()`` do, only
shapes and order connect them with weights: where as many states of one group as weights have a shape, they are matched
in order. Anything else would be a guess: one of several weights.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rowstep.cli._reading import read, reason
from rowstep.cli.extras import CommandError, printable

_PER_ROW = ("row_step", "exp_avg_sq_row")
_BLOCK = 1 << 18  # numbers at once: the norms of 1M x 64 took 0.13 s on one thread, and 0.20 s with 1 << 20
_NOTES = """
never touched: row_step is 0 or, where rows are not counted, the second moment is 0. Steps and norms are given as the
least, the median and the largest. by order, by shape: the file names no parameters, so states were matched with
weights of the same shape, in order. An optimizer that is made from named_parameters() saves names."""


def run(arguments: argparse.Namespace) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about dtypes and layouts that it will drop
            for line in _lines(*find(read(arguments.path))):
                print(line, flush=True)  # the next one may take the norms of a large table
    except (CommandError, OSError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise CommandError(f"{arguments.path}: cannot be read: {reason(error)}") from error
    return 0


# What is in the file


@dataclass
class Parameter:
    """What an optimizer keeps for a parameter, and the weights that it may belong to."""

    name: str
    group: int
    slots: dict[str, Any]
    candidates: list[str] = field(default_factory=list)
    how: str = ""  # the only candidate was found, if not by name

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: slot for name, slot in self.slots.items() if isinstance(slot, Tensor)}

    def may_be(self, name: str, weight: Tensor) -> bool:
        if not self.name.isdecimal():  # a number is no name
            return f".{name}".endswith(f".{self.name}")
        shapes = {slot: tensor.shape for slot, tensor in self.tensors.items() if slot != "step"}
        whole = [shape for slot, shape in shapes.items() if slot not in _PER_ROW]
        return weight.shape == max(whole, key=len) if whole else weight.shape[:1] in shapes.values()


Weights = dict[str, Tensor]
Optimizer = tuple[list[Mapping[Any, Any]], list[Parameter]]  # its groups and parameters


def find(tree: Any) -> tuple[Weights, list[Optimizer]]:
    """The weights by name, and the optimizers. A container that occurs again, maybe in itself, is looked at once."""
    weights: Weights = {}
    optimizers: list[Optimizer] = []
    seen: set[int] = set()

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Tensor):
            weights[".".join(path) or "the tensor"] = node.detach()
        elif isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            items = dict(node) if isinstance(node, Mapping) else dict(enumerate(node))
            if isinstance(groups := items.get("param_groups"), list):
                optimizers.append((groups, _parameters(groups, items.get("state", {}))))
            else:
                for key, value in items.items():
                    visit(value, (*path, str(key)))

    visit(tree, ())
    if not weights and not optimizers:
        raise ValueError("it holds no tensor; expected the state dict of a module or of an optimizer")
    for _, parameters in optimizers:
        _match(parameters, weights)
    return weights, optimizers


def _parameters(groups: list[Any], states: Mapping[Any, Any]) -> list[Parameter]:
    found: dict[Any, Parameter] = {}
    for number, group in enumerate([*groups, {"params": list(states)}]):  # then those that no group has
        keys = group.get("params", [])
        for key, name in zip(keys, group.get("param_names", keys), strict=True):
            slots = {str(slot): value for slot, value in states.get(key, {}).items()}
            found.setdefault(key, Parameter(str(name), number, slots))
    return list(found.values())


def _match(parameters: list[Parameter], weights: Weights) -> None:
    alike: dict[tuple[str, ...], list[Parameter]] = {}
    for parameter in parameters:
        parameter.candidates = [name for name, weight in weights.items() if parameter.may_be(name, weight)]
        if parameter.name.isdecimal():
            alike.setdefault(tuple(parameter.candidates), []).append(parameter)
    for names, members in alike.items():
        if len(names) == len(members) and len({member.group for member in members}) == 1:
            for name, member in zip(names, members, strict=True):
                member.candidates, member.how = [name], " (by order)" if len(names) > 1 else " (by shape)"


# What is shown


def _lines(weights: Weights, optimizers: list[Optimizer]) -> Iterator[str]:
    for groups, parameters in optimizers:
        yield f"Optimizer state, {len(parameters)} parameters"
        for group in groups:
            options = {str(k): _value(v) for k, v in group.items() if k not in ("params", "param_names")}
            is_on = {k: v for k, v in options.items() if v not in ("None", "False", "0", "0.0")}
            yield "group: " + ", ".join(f"{printable(k)}={v}" for k, v in is_on.items())
        for parameter in parameters:
            yield from _parameter_lines(parameter, weights)
        yield ""
    parameters = [parameter for _, members in optimizers for parameter in members]
    owned = {name for parameter in parameters for name in parameter.candidates}
    if rest := [name for name in weights if name not in owned]:
        yield "Other tensors" if optimizers else "Tensors"
        for name in rest:
            yield from _parameter_lines(Parameter(name, 0, {}, [name]), weights)
        yield ""
    in_state = sum(_nbytes(slot) for parameter in parameters for slot in parameter.tensors.values())
    yield f"Total: weights {sum(map(_nbytes, weights.values())):,} B, optimizer state {in_state:,} B"
    yield _NOTES if optimizers else ""


def _parameter_lines(parameter: Parameter, weights: Weights) -> Iterator[str]:
    names, tensors = parameter.candidates, parameter.tensors
    called = ("one of " if len(names) > 1 else "") + ", ".join(names) or f"parameter {parameter.name}"
    about = _tensor(weights[names[0]]) if names else "weights not in file"
    yield f"  {printable(called)}{parameter.how}: {about}"
    if parameter.slots:
        parts = [f"step {_value(parameter.slots['step'])}"] if "step" in parameter.slots else []
        parts += [f"{printable(name)} {_tensor(slot)}" for name, slot in tensors.items() if name != "step"]
        yield f"    state: {'; '.join([f'{sum(map(_nbytes, tensors.values())):,} B', *parts])}"
    yield from _rows(weights[names[0]] if len(names) == 1 else None, tensors)


def _rows(weight: Tensor | None, slots: dict[str, Tensor]) -> Iterator[str]:
    """How many rows of a table were never touched, the steps that rows have taken, and their norms."""
    if all(tensor is None or tensor.ndim < 2 for tensor in (weight, *slots.values())):
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


def _norms(table: Tensor | None) -> Tensor:
    """The Euclidean norm of each row in float64, so of a slot per row its numbers; empty if there are no numbers."""
    if table is None or not _nbytes(table) or table.dtype.is_complex:
        return torch.empty(0)
    rows = table.reshape(len(table) if table.ndim else 1, -1)
    blocks = torch.split(rows, max(1, _BLOCK // rows.shape[1]))
    return torch.cat([torch.linalg.vector_norm(block.to(torch.float64), dim=1) for block in blocks])


def _tensor(tensor: Tensor) -> str:
    sizes = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
    size = f"{tensor.nbytes:,} B" if _is_whole(tensor) else "not a dense tensor with all its numbers"
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')}, {size}"


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if _is_whole(tensor) else 0


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is dense and has all its numbers: an expanded one may claim any size."""
    is_dense = tensor.layout == torch.strided and tensor.is_cpu and not tensor.is_quantized
    return is_dense and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _value(value: Any) -> str:
    """A short form. Only of plain values: the repr of a list that contains itself many times over has no end."""
    if isinstance(value, Tensor) and _is_whole(value) and value.numel() == 1:
        value = value.item()
    parts = value if isinstance(value, (list, tuple)) else [value]
    is_plain = all(part is None or isinstance(part, (int, float, str, torch.dtype)) for part in parts)
    return printable(str(value).removeprefix("torch.")) if is_plain else f"<{type(value).__name__}>"
