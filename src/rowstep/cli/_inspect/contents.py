"""What in a tree of dicts and lists are weights, and what are optimizers.

An optimizer's state dict is known by its ``param_groups``, wherever it lies; every other tensor is a weight. Nothing
else in the tree matters: it may hold epochs, schedules and configurations in any form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rowstep._part import ROW_ORDER
from rowstep._state import BY_ROW, MOMENTS
from rowstep.cli._inspect import text
from rowstep.cli._inspect.reading import Checkpoint, UnreadableError
from rowstep.cli._inspect.stored import Stored, in_memory, in_models

_DEEPEST = 32
# Tied weights are listed twice. But ten thousand tensors over the same numbers would take for ever to read.
_MOST_SHARED, _FREE = 16, 64 << 20

Path = tuple[str, ...]


@dataclass(frozen=True)
class Optimizer:
    where: str
    groups: list[Mapping[Any, Any]]
    states: dict[str, dict[str, Any]]
    """By the parameter's number or name: slots that are ``Stored`` or any other value."""


@dataclass(frozen=True)
class Contents:
    kind: str
    size: int
    weights: dict[str, Stored]
    optimizers: list[Optimizer]


def of(checkpoint: Checkpoint) -> Contents:
    tensors: dict[Path, Stored] = {}
    optimizers, sharded = [], []
    for path, leaf in _walk(checkpoint.tree, (), set()):
        if isinstance(leaf, Optimizer):
            optimizers.append(leaf)
        elif path and path[-1].split(".")[-1] == ROW_ORDER:
            sharded.append((*path[:-1], path[-1].removesuffix(ROW_ORDER) + "weight"))
        else:
            tensors[path] = leaf
    for path in sharded:
        if path in tensors:
            tensors[path] = in_models(tensors[path], 2)
    if not tensors and not optimizers:
        raise UnreadableError("it holds no tensor; expected the state dict of a module or of an optimizer")
    slots = [slot for optimizer in optimizers for state in optimizer.states.values() for slot in state.values()]
    claimed = sum(slot.nbytes for slot in [*tensors.values(), *slots] if isinstance(slot, Stored))
    if claimed > _FREE + _MOST_SHARED * checkpoint.size:
        raise UnreadableError(
            f"its tensors have {claimed} bytes, in {checkpoint.size} bytes on disk; expected at most {_MOST_SHARED} "
            "times as many, as when some share memory"
        )
    return Contents(checkpoint.kind, checkpoint.size, _named(tensors), optimizers)


def _walk(node: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Stored | Optimizer]]:
    """All tensors and optimizers. A container that occurs again, maybe in itself, is looked at once."""
    if isinstance(node, (Tensor, Stored)):
        yield path, _stored(node)
        return
    if not isinstance(node, (Mapping, list, tuple)) or id(node) in seen or len(path) > _DEEPEST:
        return
    seen.add(id(node))
    if isinstance(node, Mapping) and (optimizer := _optimizer(node, ".".join(path))):
        yield path, optimizer
        return
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        yield from _walk(value, (*path, _key(key)), seen)


def _optimizer(node: Mapping[Any, Any], where: str) -> Optimizer | None:
    groups = _values(node.get("param_groups"))
    if groups is not None and all(isinstance(group, Mapping) for group in groups):
        states = node.get("state", {})
        if isinstance(states, Mapping):
            slots = {_key(key): _slots(state) for key, state in states.items() if isinstance(state, Mapping)}
            return Optimizer(where, groups, slots)
    return _flattened_optimizer(node, where)


def _flattened_optimizer(node: Mapping[Any, Any], where: str) -> Optimizer | None:
    """Of keys such as ``state.embedding.weight.exp_avg``, which ``flatten_optimizer_state_dict`` makes."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in node.items():
        part, _, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        name, dot, field = rest.rpartition(".")
        if part not in found or not dot:
            return None
        found[part].setdefault(name, {})[field] = value
    if not found["param_groups"]:
        return None
    groups: dict[str, dict[str, Any]] = {}
    for name, options in found["param_groups"].items():
        same = ", ".join(f"{key}={text.value(value)}" for key, value in options.items())
        groups.setdefault(same, {**options, "params": []})["params"].append(name)
    return Optimizer(where, list(groups.values()), {name: _slots(state) for name, state in found["state"].items()})


def _slots(state: Mapping[Any, Any]) -> dict[str, Any]:
    slots = {
        _key(key): _stored(value) if isinstance(value, (Tensor, Stored)) else value
        for key, value in state.items()
        if key != ROW_ORDER
    }
    if ROW_ORDER in state:
        for name in BY_ROW:
            if isinstance(slot := slots.get(name), Stored):
                slots[name] = in_models(slot, 2 if name in MOMENTS else 1)
    return slots


def _values(node: Any) -> list[Any] | None:
    """The elements of a list, also of one that has become a dict by number."""
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, (list, tuple)) else None


def _stored(leaf: Tensor | Stored) -> Stored:
    return leaf if isinstance(leaf, Stored) else in_memory(leaf)


def _key(key: object) -> str:
    return key if isinstance(key, str) else text.value(key)


def _named(tensors: dict[Path, Stored]) -> dict[str, Stored]:
    """Weights by the names they have in their state dict, and by their full path if there are several state dicts."""
    several = len({path[:-1] for path in tensors}) > 1
    named: dict[str, Stored] = {}
    for path, stored in tensors.items():
        name = ".".join(path if several else path[-1:]) or "(the tensor)"
        named[name if name not in named else f"{name} (at {' / '.join(path)})"] = stored
    return named
