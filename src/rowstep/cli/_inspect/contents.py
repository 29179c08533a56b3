"""Find weights and optimizer states in a tree of dicts and lists, and which of them belong together.

An optimizer's state dict is known by its ``param_groups``; every other tensor is a weight. Unless states have names, as
those of ``named_parameters()`` do, only shapes and order connect them with weights: where as many states of one group
as weights have a shape, they are matched in order. Anything else would be a guess: one of several weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rowstep._part import ROW_ORDER
from rowstep.cli._inspect.reading import Stored, stored

Shape = tuple[int | None, ...]
_PER_ROW = ("row_step", "exp_avg_sq_row")


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
    """The weights by name, and the optimizers."""
    leaves = list(_walk(tree, (), set()))
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Stored)}
    weights = {".".join(path) or "the tensor": leaf for path, leaf in tensors.items()}
    optimizers = [leaf for _, leaf in leaves if not isinstance(leaf, Stored)]
    for _, parameters in optimizers:
        _match(parameters, weights)
    return weights, optimizers


def _walk(node: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], Stored | Optimizer]]:
    """All tensors and optimizers. A container that occurs again, maybe in itself, is looked at once."""
    if isinstance(node, (Tensor, Stored)):
        yield path, stored(node) if isinstance(node, Tensor) else node
    elif isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
        seen.add(id(node))
        items = dict(node) if isinstance(node, Mapping) else dict(enumerate(node))
        groups, states = items.get("param_groups"), items.get("state", {})
        groups = list(groups.values()) if isinstance(groups, Mapping) else groups  # a directory has lists by number
        if isinstance(groups, list) and isinstance(states, Mapping) and all(isinstance(g, Mapping) for g in groups):
            yield path, (groups, _parameters(groups, states))
        else:
            for key, value in items.items():
                yield from _walk(value, (*path, str(key)), seen)


def _parameters(groups: list[Any], states: Mapping[Any, Any]) -> list[Parameter]:
    slots = {str(key): state for key, state in states.items() if isinstance(state, Mapping)}
    found: dict[str, Parameter] = {}
    for number, group in enumerate([*groups, {"params": list(slots)}]):  # then those that no group has
        keys = group.get("params", [])
        names = group.get("param_names", keys)
        for key, name in zip(map(str, keys), map(str, names), strict=True):
            state = {str(k): stored(v) if isinstance(v, Tensor) else v for k, v in slots.get(key, {}).items()}
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
