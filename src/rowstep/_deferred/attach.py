"""Bring rows up to date before anybody reads them: the hooks on embedding modules.

Before a lookup, the rows asked for. Before a state dict, a deepcopy or a pickle is taken of the module, or it goes to
eval mode or another dtype, or other weights are loaded into it, the whole table. A copy of the module is a plain one,
without hooks.

The weight of a parametrized module is computed from its tables, from all of their rows: those are flushed before.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils.hooks import RemovableHandle

from .._torch_internals import is_traced, is_wrapped, step_pre_hooks, untraced

_HOOKS = "_rowstep_hooks"
"""Where a module has its hooks. Not annotated on the class: torch.jit.script would want to compile it."""


class Owner(Protocol):
    """What the hooks need of the optimizer."""

    def bring_up_to_date(self, param: Tensor, ids: Tensor | None) -> None:
        """Bring these rows, or all of them, up to date, if the parameter is one whose rows wait."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(optimizer, args, kwargs)`` before each step."""


@runtime_checkable
class RowReader(Protocol):
    """A module that reads other rows of its weight than its input names, and says which: a sharded table."""

    def register_lookup_hook(self, hook: Callable[[nn.Module, Tensor | None], None]) -> RemovableHandle:
        """Call ``hook(module, rows)`` before these rows of its weight, or all if None, are read."""


def reads_rows(module: nn.Module) -> bool:
    """Whether this is a module whose lookups can be hooked."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag, RowReader))


def tables_of(module: nn.Module) -> list[Tensor]:
    """What a module that reads rows reads: its weight, or where that is computed, the parameters below the module."""
    weight = module._parameters.get("weight")
    return list(module.parameters()) if weight is None else [weight]


class _Hooks:
    """The hooks of one module. It does not keep the optimizer alive."""

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        self._owner: Callable[[], Owner | None] = weakref.ref(owner)
        self._module = weakref.ref(module)
        self._handles: list[RemovableHandle] = [
            module.register_lookup_hook(self._before_lookup_of)
            if isinstance(module, RowReader)
            else module.register_forward_pre_hook(self._before_lookup, with_kwargs=True),
            module.register_state_dict_pre_hook(self._before_whole_read),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._before_whole_read),  # type: ignore[no-untyped-call]
        ]
        for part in module.modules():
            if isinstance(part, ParametrizationList):  # reads of the weight outside of a lookup come by here
                self._handles.append(part.register_forward_pre_hook(self._before_whole_read))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_lookup(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor):
            return
        # Which rows vmap will read cannot be seen here.
        self._before_lookup_of(module, None if is_wrapped(ids) else ids)

    def _before_lookup_of(self, module: nn.Module, rows: Tensor | None) -> None:
        owner = self._owner()
        if owner is None:
            return
        weight = module._parameters.get("weight")
        if weight is not None:
            _bring_up_to_date(owner, weight, rows)
        else:
            self.flush()

    def _before_whole_read(self, *_: Any) -> None:
        self.flush()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def flush(self) -> None:
        owner, module = self._owner(), self._module()
        if owner is not None and module is not None:
            for table in tables_of(module):
                _bring_up_to_date(owner, table, None)

    @property
    def owner(self) -> Owner | None:
        return self._owner()

    def remove_from(self, state: dict[str, Any]) -> None:
        """Take the hooks out of a copied module state."""
        ours = {handle.id for handle in self._handles}
        for name, value in state.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs")) and not ours.isdisjoint(value):
                state[name] = type(value)((key, hook) for key, hook in value.items() if key not in ours)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        """For modules that copy their attributes themselves, as parametrized ones do. The copy is nobody's."""
        self.flush()
        copied = memo[id(self)] = object.__new__(_Hooks)
        copied._owner, copied._module = _nobody, self._module
        copied._handles = copy.deepcopy(self._handles, memo)
        return copied


def _bring_up_to_date(owner: Owner, table: Tensor, rows: Tensor | None) -> None:
    if not is_traced():
        owner.bring_up_to_date(table, rows)
        return
    with untraced():  # what torch.jit.trace records is the model, and this is no part of it
        owner.bring_up_to_date(table, rows)


def _nobody() -> None:
    """The owner of a copied module's hooks."""


class _Attached(nn.Module):
    """What an attached module overrides: the reads of a whole table for which torch has no hook."""

    def train(self, mode: bool = True) -> Any:
        if not mode:
            _flush(self)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        _flush(self)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __delattr__(self, name: str) -> None:
        if name == "weight":  # as register_parametrization does: the table goes elsewhere
            _let_go_until_next_step(self)
        super().__delattr__(name)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, which would compile the hooks."""
        _let_go_until_next_step(self)
        return self

    def __copy__(self) -> nn.Module:
        """A copy that reads the same table, so it is attached as well."""
        make, args, state, *_ = self.__reduce_ex__(2)
        copied: Any = make(*args)
        copied.__setstate__(state)
        hooks = vars(self).get(_HOOKS)
        if hooks is not None and hooks.owner is not None:
            attach(copied, hooks.owner)
        return cast(nn.Module, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _flush(self)
        _, _, state, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        state = dict(state)
        if _HOOKS in state:
            state.pop(_HOOKS).remove_from(state)
        # As copyreg makes an object without calling its constructor; pickle lets no other class through __newobj__.
        return copyreg._reconstructor, (type(self).__mro__[2], object, None), state, *rest  # type: ignore[attr-defined]


def _flush(module: nn.Module) -> None:
    hooks = vars(module).get(_HOOKS)
    if hooks is not None:
        hooks.flush()


def _let_go(module: nn.Module) -> Owner | None:
    """Flush what the module reads and take its hooks off; return the optimizer that had it, if that is alive."""
    _flush(module)
    hooks: _Hooks | None = vars(module).pop(_HOOKS, None)
    if hooks is None:
        return None
    hooks.detach()
    return hooks.owner


def _let_go_until_next_step(module: nn.Module) -> None:
    owner = _let_go(module)
    if owner is not None:
        _attach_at_next_step(module, owner)


@functools.cache
def _attached_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Attached, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _give_class(module: nn.Module) -> None:
    cls: Any = type(module)
    if issubclass(cls, _Attached):
        return
    if is_parametrized(module):  # torch has put a class of its own on top, and will want to take it off again
        (base,) = cls.__bases__
        cls.__bases__ = (_attached_class(base),)
    else:
        module.__class__ = _attached_class(cls)


def attach(module: nn.Module, owner: Owner) -> None:
    """Hook an Embedding or EmbeddingBag to the optimizer that owns its weight; once is enough."""
    if "_modules" not in vars(module):  # it is being copied or unpickled, and the optimizer is one of its attributes
        _attach_at_next_step(module, owner)
        return
    hooks = vars(module).get(_HOOKS)
    if hooks is not None and hooks.owner is owner:
        return
    _let_go(module)
    _give_class(module)
    vars(module)[_HOOKS] = _Hooks(module, owner)


class _AttachAtNextStep:
    """A hook on an optimizer. Until it steps, no row waits, so nothing is lost without hooks on the module."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def __call__(self, optimizer: Owner, args: object, kwargs: object) -> None:
        while self.modules:
            attach(self.modules.pop(), optimizer)


def _attach_at_next_step(module: nn.Module, owner: Owner) -> None:
    for hook in step_pre_hooks(owner):
        if isinstance(hook, _AttachAtNextStep):
            break
    else:
        hook = _AttachAtNextStep()
        owner.register_step_pre_hook(hook)
    hook.modules.append(module)
