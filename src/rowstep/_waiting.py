"""Tensors whose rows wait: whoever touches one of them from Python comes by here first.

While rows of a table wait for steps that they have missed, its parameter and its moments have a class of their own,
with torch's ``__torch_function__``. Every torch function, method and property that is handed one of them is seen here
before it runs:

    a lookup            F.embedding and F.embedding_bag, also when modules call them: the rows that it reads catch up
    no numbers at all   shape, dtype, grad and the like: nothing happens
    anything else       a read or a write, of one row or of all: the whole table catches up

With its last row up to date, a table has its plain class again, until a step makes rows wait. So copies and pickles are
plain, and a table is never read or written without the steps that dense Adam would have made by then. An alias made
earlier (``weight.data``, a view) is a plain tensor, and reads what lies in memory: see ``docs/deferred.md``.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documents have it

from ._torch_internals import (
    as_its_class,
    break_graph,
    call_without_torch_function,
    dispatches_itself,
    is_making_a_parameter,
    is_traced,
    is_wrapped,
    leave_uncompiled,
    untraced,
    without_torch_function,
)

_HOLD = "_rowstep_hold"


class _Hold:
    """The attribute of a waiting tensor: its keeper, the optimizer, and which table it is of (None: the tensor itself).

    Some programs copy all attributes of a parameter to another tensor: it is not the other one's, and copies to None.
    And torch.utils.swap_tensors refuses a tensor that has a weak reference to it, as it should.
    """

    __slots__ = ("keeper", "owner", "table")

    def __init__(self, tensor: Tensor, table: Tensor, keeper: weakref.ref[Any]) -> None:
        self.owner, self.keeper = weakref.ref(tensor), keeper
        self.table = None if tensor is table else table

    def __reduce__(self) -> Any:
        return type(None), ()


def _hold_of(tensor: Tensor) -> _Hold | None:
    hold = vars(tensor).get(_HOLD)
    return hold if hold is not None and hold.owner() is tensor else None


class Waiting:
    """What the class of a waiting tensor adds to its plain one."""

    __slots__ = ()

    plain: type[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # compiled code must call this anew in every run
            break_graph(
                "rows of this table wait for steps of a rowstep optimizer, and which of them have to catch up before "
                "this read depends on the ids, so it cannot be part of a graph. Use fullgraph=False"
            )
        if func in _LOOKUPS:
            found = call_without_torch_function(_look_up, (), (func, types, args, kwargs or {}), {})
            if found is not None:
                return found
        return _see(func, types, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own, which is called without a word to ``__torch_function__``."""
        bring_all_up_to_date([self, args, kwargs])
        return without_torch_function(Tensor.set_, self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if bring_all_up_to_date([self]):
            return copy.deepcopy(self, memo)
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        release([copied], None)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if bring_all_up_to_date([self]):
            return self.__reduce_ex__(protocol)  # that of its plain class
        return super().__reduce_ex__(protocol)


leave_uncompiled(Waiting.__torch_function__)


def _see(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that is handed something that waits, once that is up to date."""
    if func in _WITHOUT_NUMBERS or (func in _LIKE_ANOTHER and not isinstance(args[0], Waiting)):
        if len(args) > 1 and isinstance(args[1], Waiting) and func in _GRADIENT_SETTERS:
            bring_all_up_to_date(args[1:])  # steps read a gradient without coming by here
        return without_torch_function(func, *args, **kwargs)
    if bring_all_up_to_date((args, kwargs)):
        if func is Tensor.detach and is_making_a_parameter(sys._getframe(2)):
            return as_its_class(args[0])
        return func(*args, **kwargs)  # other classes among the arguments may still have something to say
    return without_torch_function(func, *args, **kwargs)


@functools.cache
def _waiting_class(cls: type[Tensor]) -> type[Tensor]:
    return type(cls.__name__, (Waiting, cls), {"__module__": cls.__module__, "plain": cls})


def watch(tensors: Iterable[Tensor], param: Tensor, keeper: weakref.ref[Any]) -> None:
    """From now on, ask the keeper before any torch function touches these tensors."""
    for tensor in tensors:
        cls: Any = type(tensor)
        if not issubclass(cls, Waiting):
            vars(tensor)[_HOLD] = _Hold(tensor, param, keeper)
            tensor.__class__ = _waiting_class(cls)


def release(tensors: Iterable[Tensor], keeper: weakref.ref[Any] | None) -> None:
    """Give these tensors back their plain class: nothing of them waits under this keeper, nor under another."""
    for tensor in tensors:
        hold = _hold_of(tensor) if isinstance(tensor, Waiting) else None
        if isinstance(tensor, Waiting) and (hold is None or hold.keeper is keeper):
            tensor.__class__ = tensor.plain  # type: ignore[assignment]
            vars(tensor).pop(_HOLD, None)


def keeper_of(tensor: Any) -> Any:
    """The optimizer under which rows of this tensor wait, if any do."""
    hold = vars(tensor).get(_HOLD)
    return None if hold is None or hold.owner() is not tensor else hold.keeper()


def plain_class(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, or what it will be again when nothing of it waits."""
    return type(tensor).plain if isinstance(tensor, Waiting) else type(tensor)


def bring_all_up_to_date(things: Any) -> bool:
    """Bring all tables among these up to date, whether they lie in lists or dicts; return whether all are plain now.

    If none is found although there must be one, the answer is no: whoever called would ask again, for ever.
    """
    found = list(_waiting_in(things))
    for tensor in found:
        param, keeper = _table_and_keeper(tensor)
        if keeper is not None:
            with untraced():  # what torch.jit.trace records is the model, and this is no part of it
                keeper._bring_up_to_date(param, None)
    return bool(found) and not any(isinstance(tensor, Waiting) for tensor in found)


def _waiting_in(things: Any) -> Iterator[Tensor]:
    if isinstance(things, Waiting):
        yield things  # type: ignore[misc]
    elif isinstance(things, (list, tuple)):
        for thing in things:
            yield from _waiting_in(thing)
    elif isinstance(things, dict):
        yield from _waiting_in(list(things.values()))


def _look_up(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What a lookup finds, once the rows that it reads are up to date; None if it cannot be seen which those are."""
    first, second = _LOOKUPS[func]
    weight: Any = args[1] if len(args) > 1 else kwargs.get(second)
    ids: Any = args[0] if args else kwargs.get(first)
    if first == "weight":
        weight, ids = ids, weight
    if (
        not isinstance(weight, Waiting)
        or not isinstance(ids, Tensor)
        or not _see_through(types)
        or ids.dtype is torch.bool  # not ids, and torch will say so
        or is_wrapped(ids)
        or ids.is_nested  # which rows are read cannot be seen
        or is_traced()  # what is traced reads other rows later
    ):
        return None
    factors = kwargs.get("per_sample_weights")  # torch hands on by name all but the first two
    if isinstance(factors, Waiting):
        bring_all_up_to_date([factors])
    table: Any = weight
    param, keeper = _table_and_keeper(table)
    if keeper is None:
        return func(*args, **kwargs)
    if kwargs.get("max_norm") is None:
        keeper._bring_up_to_date(param, ids)
        return func(*args, **kwargs)
    with keeper._lock:  # it writes, and another thread's lookup must not take that for a write behind our back
        if not keeper._bring_up_to_date(param, ids):  # torch renormalises the other rows before it raises
            keeper._bring_up_to_date(param, None)
        try:
            return func(*args, **kwargs)
        finally:  # torch may find out that it cannot go on when it has renormalised the rows
            keeper._accept_writes(param)


@functools.cache
def _see_through(types: tuple[type[Tensor], ...]) -> bool:
    """Whether nobody but us has a say in what is done with tensors of these classes."""
    return not any(dispatches_itself(kind.plain if issubclass(kind, Waiting) else kind) for kind in types)


def _table_and_keeper(tensor: Tensor) -> tuple[Tensor, Any]:
    hold = vars(tensor).get(_HOLD)
    if hold is None or hold.owner() is not tensor or (keeper := hold.keeper()) is None:
        # It is gone, and has left nothing that waits.
        release([tensor], None if hold is None else hold.keeper)
        return tensor, None
    return tensor if hold.table is None else hold.table, keeper


# What their two first arguments are called.
_LOOKUPS: dict[Any, tuple[str, str]] = {
    F.embedding: ("input", "weight"),
    F.embedding_bag: ("input", "weight"),
    torch.embedding: ("weight", "indices"),
}


# These take only the shape, dtype and device of their other arguments.
_LIKE_ANOTHER = frozenset([Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as])


def _functions_without_numbers() -> Iterator[Any]:
    """What neither reads nor writes the numbers of a tensor, nor tells where they are."""
    properties = (
        "shape dtype device layout ndim is_leaf requires_grad grad grad_fn _grad _grad_fn grad_dtype _version itemsize "
        "nbytes names output_nr _backward_hooks _post_accumulate_grad_hooks _base name retains_grad is_cpu is_cuda "
        "is_meta is_mkldnn is_mps is_mtia is_xpu is_hpu is_ipu is_maia is_vulkan is_xla is_quantized is_nested "
        "is_sparse is_sparse_csr"
    )
    methods = (
        "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_floating_point "
        "is_complex is_signed is_neg is_conj is_inference is_pinned is_shared is_same_size is_coalesced has_names "
        "get_device sparse_dim dense_dim register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad "
        "_is_view _is_zerotensor __len__ __hash__ new_empty new_zeros new_ones new_full new_empty_strided"
    )
    functions = (
        "numel is_floating_point is_complex is_signed is_neg is_conj is_inference is_same_size get_device "
        "empty_like zeros_like ones_like full_like rand_like randn_like result_type _has_compatible_shallow_copy_type"
    )
    for name in properties.split():
        if hasattr(Tensor, name):
            yield getattr(Tensor, name).__get__
    for name in ["grad", "_grad", "grad_dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"]:
        if hasattr(Tensor, name):
            yield getattr(Tensor, name).__set__
            yield getattr(Tensor, name).__delete__
    for owner, names in ((Tensor, methods), (torch, functions)):
        for name in names.split():
            if hasattr(owner, name):
                yield getattr(owner, name)


_WITHOUT_NUMBERS = frozenset(_functions_without_numbers())
_GRADIENT_SETTERS = frozenset(getattr(Tensor, name).__set__ for name in ("grad", "_grad") if hasattr(Tensor, name))
