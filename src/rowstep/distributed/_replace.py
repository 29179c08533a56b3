"""Find the embeddings of a model that a sharded table can take the place of, and put it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

Plain = nn.Embedding | nn.EmbeddingBag

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass
class Found:
    """The embeddings of a model."""

    modules: dict[str, Plain] = field(default_factory=dict)
    """Those that can be replaced, by name."""
    left_alone: dict[str, str] = field(default_factory=dict)
    """The others, and why."""
    _places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    """Where each is an attribute of what: one that is used twice is in two places."""

    def replace(self, tables: Mapping[str, nn.Module]) -> None:
        for parent, attribute, name in self._places:
            setattr(parent, attribute, tables[name])


def embeddings_of(model: nn.Module) -> Found:
    """All of them, in the order of the model."""
    found = Found()
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            holders.setdefault(id(param), set()).add(id(module))
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if reason := _reason_against(name, module, len(holders[id(module.weight)]) > 1):
            found.left_alone[name or "the model itself"] = reason
            continue
        if module not in names:
            names[module] = name
            found.modules[name] = module
        parent, _, attribute = name.rpartition(".")
        found._places.append((model.get_submodule(parent), attribute, names[module]))
    return found


def _reason_against(name: str, module: Plain, is_tied: bool) -> str:
    if not name:
        return "there is nothing around it in which it could be replaced"
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        return f"it is a {type(module).__name__}, whose own code would be lost"
    if is_tied:
        return "another module uses its weight"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True is not supported for sparse gradients"
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    return ""
