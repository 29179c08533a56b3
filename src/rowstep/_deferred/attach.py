"""Bring rows up to date before anybody reads them: the hooks on embedding modules.

Before a lookup, the rows asked for. Before a state dict, a deepcopy or a pickle is taken of the module, or it goes to
eval mode, or other weights are loaded into it, the whole table. A copy of the module is a plain one, without hooks.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """What the hooks need of the optimizer."""

    def bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> None:
        """Bring these rows, or all of them, up to date, if the parameter is one whose rows wait."""


@runtime_checkable
class RowReader(Protocol):
    """A module that reads other rows of its weight than its input names, and says which: a sharded table."""

    def register_lookup_hook(self, hook: Callable[[nn.Module, Tensor | None], None]) -> RemovableHandle:
        """Call ``hook(module, rows)`` before these rows of its weight, or all if None, are read."""


def reads_rows(module: nn.Module) -> bool:
    """Whether this is a module whose lookups can be hooked."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag, RowReader))


class _Hooks:
    """The hooks of one module. It does not keep the optimizer alive."""

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._handles: list[RemovableHandle] = [
            module.register_lookup_hook(self._before_rows)
            if isinstance(module, RowReader)
            else module.register_forward_pre_hook(self._before_lookup, with_kwargs=True),
            module.register_state_dict_pre_hook(self._before_whole_read),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._before_whole_read),  # type: ignore[no-untyped-call]
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_lookup(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        owner = self._owner()
        if owner is None or not isinstance(ids, Tensor):
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(ids):
            owner.bring_up_to_date(cast(Tensor, module.weight), None)  # which rows vmap will read cannot be seen here
        else:
            owner.bring_up_to_date(cast(Tensor, module.weight), ids)

    def _before_rows(self, module: nn.Module, rows: Tensor | None) -> None:
        owner = self._owner()
        if owner is not None:
            owner.bring_up_to_date(cast(Tensor, module.weight), rows)

    def _before_whole_read(self, module: nn.Module, *_: Any) -> None:
        self.flush(module)

    def flush(self, module: nn.Module) -> None:
        owner = self._owner()
        if owner is not None:
            owner.bring_up_to_date(cast(Tensor, module.weight), None)

    def belongs_to(self, owner: Owner) -> bool:
        return self._owner() is owner

    def remove_from(self, state: dict[str, Any]) -> None:
        """Take the hooks out of a copied module state."""
        ours = {handle.id for handle in self._handles}
        for name, value in state.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs")) and not ours.isdisjoint(value):
                state[name] = type(value)((key, hook) for key, hook in value.items() if key not in ours)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Attached(nn.Module):
    """What an attached module overrides: the reads of a whole table for which torch has no hook."""

    _rowstep_hooks: _Hooks

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self._rowstep_hooks.flush(self)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._rowstep_hooks.flush(self)
        _, _, state, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        state = dict(state)
        state.pop("_rowstep_hooks").remove_from(state)
        # As copyreg makes an object without calling its constructor; pickle lets no other class through __newobj__.
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state, *rest  # type: ignore[attr-defined]


@functools.cache
def _attached_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Attached, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def attach(module: nn.Module, owner: Owner) -> None:
    """Hook an Embedding or EmbeddingBag to the optimizer that owns its weight; once is enough."""
    hooks = getattr(module, "_rowstep_hooks", None)
    if hooks is not None:
        if hooks.belongs_to(owner):
            return
        hooks.flush(module)
        hooks.detach()
    else:
        module.__class__ = _attached_class(type(module))  # type: ignore[arg-type]  # mypy: a class is hashable
    cast(_Attached, module)._rowstep_hooks = _Hooks(module, owner)
