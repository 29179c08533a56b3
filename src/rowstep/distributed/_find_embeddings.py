"""Find the embeddings of a model that a sharded table can take the place of, and put it there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

Plain = nn.Embedding | nn.EmbeddingBag


def embeddings_of(model: nn.Module) -> tuple[dict[str, Plain], dict[str, str]]:
    """Those that can be replaced, by name, and for the others the reason why not."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which knows its old embeddings; expected the model "
            "itself. Replace its embeddings first, and then wrap it by rowstep.distributed.ddp"
        )
    holders = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    found: dict[str, Plain] = {}
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if reason := _reason_against(name, module, holders[id(module.weight)] > 1):
                left_alone[name or "the model itself"] = reason
            else:
                found[name] = module
    return found, left_alone


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put others into the places of these modules, of which each may have several."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])


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
    if any(hooks for key, hooks in vars(module).items() if key.endswith("_hooks")) or module.weight._backward_hooks:
        return "it has hooks, which would be lost"
    if [*module._parameters] != ["weight"] or module._buffers or module._modules or "forward" in vars(module):
        return "it has more than a weight (parameters, buffers, modules or a forward of its own), which would be lost"
    return ""
