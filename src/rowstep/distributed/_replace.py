"""Find the embeddings of a model that a sharded table can take the place of, and put it there."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

Plain = nn.Embedding | nn.EmbeddingBag

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Found(NamedTuple):
    """The embeddings of a model."""

    modules: dict[str, Plain]
    """Those that can be replaced, by name."""
    left_alone: dict[str, str]
    """The others, and why."""
    places: list[tuple[nn.Module, str, str]]
    """Where each is an attribute of what: one that is used twice is in two places."""


def embeddings_of(model: nn.Module) -> Found:
    """All of them, in the order of the model."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which knows its old embeddings; expected the model "
            "itself. Replace its embeddings first, and then wrap it by rowstep.distributed.ddp"
        )
    found = Found({}, {}, [])
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            holders.setdefault(id(param), set()).add(id(module))
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if reason := _reason_against(name, module, len(holders.get(id(module.weight), ())) > 1):
            found.left_alone[name or "the model itself"] = reason
            continue
        if module not in names:
            names[module] = name
            found.modules[name] = module
        parent, _, attribute = name.rpartition(".")
        found.places.append((model.get_submodule(parent), attribute, names[module]))
    return found


def _reason_against(name: str, module: Plain, is_tied: bool) -> str:
    if not name:
        return "there is nothing around it in which it could be replaced"
    if is_parametrized(module):
        return "its weight is parametrized"
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        return f"it is a {type(module).__name__}, whose own code would be lost"
    if is_tied:
        return "another module uses its weight"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True is not supported for sparse gradients"
    if any(getattr(module, hooks, None) for hooks in _HOOKS) or module.weight._backward_hooks:
        return "it has hooks, which would be lost"
    if [*module._parameters] != ["weight"] or module._buffers or module._modules or "forward" in vars(module):
        return "it has more than a weight (parameters, buffers, modules or a forward of its own), which would be lost"
    return ""
