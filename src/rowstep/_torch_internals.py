"""Everything of torch's that torch does not promise to keep. No other file of this package reaches for it.

what                                  for what                                  without it
``_indices``, ``_values``             a gradient's entries, uncoalesced         nothing works: tests fail at once
``_increment_version``                tell autograd of a write                  a public function, 1 µs slower
``_version``                          whether torch has written to a tensor     the same
``_is_zerotensor``                    gradients that have no memory             torch refuses such a gradient
``is_functorch_wrapped_tensor``       ids under vmap                            each lookup flushes its table
``_get_tracing_state`` and ``_set_``  keep catch-ups out of torch.jit.trace     they are traced
``_disable_dynamo``                   an import without torch's compiler        rowstep takes 1 s longer to import
``set_code_exec_strategy``            lookups run as they are in compiled       they are compiled up to 8 times, and
                                      models                                    torch warns that it gives up
``_dynamo.graph_break``               fullgraph=True fails with our reason      it fails with another
``step.hooked``, ``profile_hook_step``, a step without torch's wrapper, where    torch wraps every step: 60 µs more
``_profiler_enabled``, hook dicts     nobody profiles or hooks it
``_disabled_torch_function_impl``     our own looks at tensors that wait        nothing works: tests fail at once
``Parameter.__new__``,                a Parameter made of one that waits        it raises; a second call does not
``_make_subclass``
``_len_torch_dispatch_stack``,        tensors that only stand for shapes        catch-ups run on them, and fail
``detect_fake_mode``, ``FakeTensor``
``_disable_current_modes``            a flush in a finalizer                    it runs under the modes in force
``_module_parameters``,               what DistributedDataParallel reduces      no error for a sharded table in torch's
``_get_active_ddp_module``                                                      own DDP, nor for surgery under ours
``_execution_engine``                 work at the end of a backward pass        ``distributed.ddp`` fails at once
``_current_graph_task_id``            tables that a rank has not used           the same
``_set_params_and_buffers_to_         sharded tables inside DDP                 the same
ignore_for_model``
``_new_process_group_helper``,        a group whose name its ranks agree on     the same
``_world``
``_device_types``, ``_get_backend``,  the timeout of a group                    the same
``_timeout``

``_waiting`` also has a list of properties by name, some of them private; it skips those that are not there. Underscored
methods that subclasses are meant to override (``Module._apply``, ``_save_to_state_dict``) are not listed.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import _torch_version as _torch_version  # imported first: it refuses a torch that is too old

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_R = TypeVar("_R")

_functorch: Any = getattr(torch._C, "_functorch", None)
_get_tracing_state: Any = getattr(torch._C, "_get_tracing_state", None)
_set_tracing_state: Any = getattr(torch._C, "_set_tracing_state", None)
_modes_in_force: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)

try:
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor
except ImportError:
    FakeTensor = None  # type: ignore[assignment,misc]

try:
    from torch.utils._python_dispatch import _disable_current_modes
except ImportError:
    _disable_current_modes = contextlib.nullcontext  # type: ignore[assignment]

without_modes: Any = _disable_current_modes

call_without_torch_function: Any = torch._C._disabled_torch_function_impl

# What torch.compile neither traces nor changes. ``torch.compiler.disable`` does the same, but imports the compiler at
# once, 0.9 s of work that torch leaves to the first optimizer that is made.
never_compiled: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:
    set_code_exec_strategy = None  # type: ignore[assignment]


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Let torch.compile neither compile this function nor what it calls, where a compiled model calls it.

    As ``never_compiled``, but nothing is wrapped around the function, which would take 1.3 µs in every call.
    """
    if set_code_exec_strategy is not None:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def break_graph(reason: str) -> None:
    """End the graph that torch.compile is building here. With ``fullgraph=True`` this is an error, for this reason."""
    torch._dynamo.graph_break(msg=reason)


# Optimizer.step

try:
    from torch._C._autograd import _profiler_enabled
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
except ImportError:
    _profiler_enabled = None  # type: ignore[assignment]


def optimizer_step(step: Callable[..., Any]) -> Any:
    """Decorate the ``step`` of an optimizer: without autograd, never compiled, with torch's hooks and profiler.

    torch wraps every step in ``record_function``, which takes 13 µs in a tight loop and 40 in a training loop even when
    nobody profiles. Here its wrapper is called only where there is a hook to call or a profiler that listens.
    """

    def without_autograd(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        was_enabled = is_grad_enabled()
        try:
            set_grad_enabled(False)  # bare: as a context manager it takes 3 µs
            call_without_torch_function(step, (), (self,), {})
        finally:
            set_grad_enabled(was_enabled)
        return loss

    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
    uncompiled = never_compiled(functools.wraps(step)(without_autograd))
    if _profiler_enabled is None:
        return uncompiled  # torch wraps it when the first optimizer is made
    with_hooks: Any = torch.optim.Optimizer.profile_hook_step(uncompiled)

    @functools.wraps(step)
    def shell(self: Any, closure: Callable[[], float] | None = None) -> Any:
        if (
            _profiler_enabled() or torch.compiler.is_compiling()  # by this name dynamo knows it
            or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
            or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        ):  # fmt: skip
            return with_hooks(self, closure)
        return without_autograd(self, closure)

    shell.hooked = True  # type: ignore[attr-defined]  # torch adds no wrapper of its own
    return shell


# Sparse tensors


indices_of: Any = Tensor._indices
values_of: Any = Tensor._values
"""The indices and the values of a sparse gradient as they are: with duplicates, in order of occurrence."""


# Memory

note_writes: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
"""Tell autograd that these tensors were written to."""


writes_to: Any = operator.attrgetter("_version")
"""How often torch has written to a tensor; not for one that was made in inference mode."""


def has_no_memory(grad: Tensor) -> bool:
    """Whether this is one of torch's zeros that exist in name only."""
    return hasattr(grad, "_is_zerotensor") and grad._is_zerotensor()


# Tracing


def is_faked(ids: Tensor | None = None) -> bool:
    """Whether tensors are fake just now, for the sake of their shapes: then no row is read, and none can be moved."""
    if FakeTensor is None:
        return False
    if isinstance(ids, FakeTensor):
        return True
    return (_modes_in_force is None or _modes_in_force() > 0) and detect_fake_mode() is not None


is_wrapped: Any = getattr(_functorch, "is_functorch_wrapped_tensor", lambda _: True)
"""Whether vmap or another transform has these ids, so that their numbers cannot be seen."""


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """What torch.jit.trace does not record."""
    tracing = _get_tracing_state() if _get_tracing_state is not None and _set_tracing_state is not None else None
    if tracing is None:
        yield
        return
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(tracing)


is_traced: Any = _get_tracing_state or (lambda: None)
"""Something, while torch.jit.trace is recording; otherwise None."""


def without_torch_function(function: Callable[..., _R], *args: Any, **options: Any) -> _R:
    """Call a function with ``__torch_function__`` disabled: the class of a tensor has no say in what is done with it.

    Not a ``with`` statement: an interrupt that strikes where that ends would leave it in force.
    """
    result: _R = call_without_torch_function(function, (), args, options)
    return result


def dispatches_itself(cls: type[Tensor]) -> bool:
    """Whether a class of tensors has its own idea of what functions do with them."""
    return cls not in (Tensor, nn.Parameter) and getattr(cls, "__torch_function__", None) != call_without_torch_function


def as_its_class(tensor: Tensor) -> Tensor:
    """The same numbers in another tensor of the same class, apart from autograd."""
    return Tensor._make_subclass(type(tensor), tensor)


def is_making_a_parameter(frame: Any) -> bool:
    """Whether this frame is in ``nn.Parameter(data)``, which wants ``data.detach()`` to be of the class of ``data``."""
    return frame.f_code is nn.Parameter.__new__.__code__


# DistributedDataParallel


def parameters_of_ddp(wrapper: DistributedDataParallel) -> tuple[Tensor, ...]:
    """The parameters whose gradients this wrapper reduces."""
    return tuple(vars(wrapper).get("_module_parameters", ()))


def running_ddp() -> nn.Module | None:
    """The wrapper whose forward pass is running."""
    active: Any = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    return active if isinstance(active, nn.Module) else None


def hide_from_ddp(model: nn.Module, names: set[str]) -> None:
    """Let DistributedDataParallel leave these parameters and buffers alone, as well as those named before."""
    names = names | hidden_from_ddp(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))  # type: ignore[no-untyped-call]


def hidden_from_ddp(model: nn.Module) -> set[str]:
    """The parameters and buffers of this model that DistributedDataParallel leaves alone."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def after_backward(action: Callable[[], None]) -> None:
    """Do this when the backward pass that is running has ended on this rank."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def number_of_backward() -> int:
    """The number of the backward pass that is running. No two have the same."""
    return torch._C._current_graph_task_id()


# Process groups


def new_group(name: str, ranks: list[int], *, backend: str, timeout: timedelta) -> ProcessGroup:
    """A group of these ranks in this order, of which this process is one. All of them must give the same new name.

    ``torch.distributed.new_group`` does the same, but chooses the name itself.
    """
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    make: Any = c10d._new_process_group_helper  # Any: only newer versions have a type for names, which are strings
    everyone = c10d._get_default_group()
    rank, (_, store) = ranks.index(everyone.rank()), world.pg_map[everyone]
    options: Any = {"timeout": timeout, "device_id": everyone.bound_device_id}
    group: Any
    group, _ = make(len(ranks), rank, ranks, c10d.Backend(backend), store, name, **options)
    world.pg_group_ranks[group] = {member: number for number, member in enumerate(ranks)}
    made: ProcessGroup = group
    return made


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long a collective of this group may take."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    timeouts: list[timedelta] = [backend.options._timeout for backend in backends]
    return max(timeouts)
