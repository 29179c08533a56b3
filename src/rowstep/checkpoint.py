"""Checkpoints that leave this library: a state of any kind as one that torch's own classes can load."""

from __future__ import annotations

import functools
import warnings

import torch
from torch.optim.optimizer import StateDict

from ._conform import conform
from ._optimizer import RowOptimizer
from ._options import parameter_name
from ._part import as_global_state, as_local_state, for_each_param, part_of, summed_over_ranks
from ._rules.adam import kept_under
from ._state import State, zeros_like

__all__ = ["to_torch"]

_OWN_OPTIONS = (
    "force_sparse",
    "bias_correction",
    "nonfinite",
    "second_moment",
    "state_dtype",
    "stochastic_rounding",
    "seed",
)


def to_torch(optimizer: RowOptimizer) -> StateDict:
    """A state dict of ``optimizer`` for torch.optim.Adam, AdamW and SparseAdam.

    State dicts of these optimizers load into torch's as they are, as long as tables keep what torch keeps. Under
    ``second_moment="row"`` or ``"factored"`` and under ``state_dtype`` they keep less. Here a second moment per row is
    written out for every weight, a first moment that was not kept begins with 0, and moments get the parameter's dtype.
    A warning says what had to be written out. Options that torch does not know are left out.

    The optimizer is not changed. What is written out takes memory: eight bytes a weight in float32.

    Args:
        optimizer: a ``SparseAdam``, ``DeferredAdam`` or ``DeferredAdamW``.

    Returns:
        A state dict with torch's slots and options.

    Examples:
        >>> import warnings
        >>> import torch
        >>> import rowstep
        >>> table = torch.nn.Embedding(100, 8, sparse=True)
        >>> optimizer = rowstep.SparseAdam(table.parameters(), second_moment="row", betas=(0, 0.999))
        >>> table(torch.tensor([1])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['exp_avg_sq_row', 'step']
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # it says what it writes out
        ...     state_dict = rowstep.checkpoint.to_torch(optimizer)
        >>> sorted(state_dict["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
        >>> torch.optim.SparseAdam(table.parameters()).load_state_dict(state_dict)
    """
    if not isinstance(optimizer, RowOptimizer):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; expected rowstep.SparseAdam, DeferredAdam or DeferredAdamW"
        )
    groups = optimizer.param_groups
    places = {
        id(param): (group, at, index) for at, group in enumerate(groups) for index, param in enumerate(group["params"])
    }

    def as_torch(state: State, param: torch.Tensor) -> State:
        group, at, index = places[id(param)]
        state = as_local_state(dict(state), param) if part_of(param) is not None else dict(state)
        words = _written_out(state, param, bool(group["amsgrad"]))
        if words:
            warnings.warn(f"{parameter_name(group, at, index)}: {'; '.join(words)}", stacklevel=4)
        return as_global_state(state, param)

    params = [param for group in groups for param in group["params"]]
    state_dict = for_each_param(optimizer.state_dict(), params, as_torch)
    state_dict["param_groups"] = [
        {key: value for key, value in group.items() if key not in _OWN_OPTIONS} for group in state_dict["param_groups"]
    ]
    return state_dict


def _written_out(state: State, param: torch.Tensor, amsgrad: bool) -> list[str]:
    """Make this state what torch keeps of a parameter; tell in words what that took."""
    if "exp_avg_sq" not in state and "exp_avg_sq_row" not in state:
        return []
    plain = kept_under({"amsgrad": amsgrad})
    lacks_first = "exp_avg" not in state
    lead = tuple(state["exp_avg_sq_row"].shape) if "exp_avg_sq_row" in state else None
    words = conform(state, param, plain, lead, functools.partial(summed_over_ranks, param))
    if lacks_first:
        words.append("'exp_avg' begins with 0, because beta1 is 0")
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        if name in state and state[name].dtype != param.dtype:
            words.append(f"{name!r} is {state[name].dtype} and becomes {param.dtype}")
            state[name] = zeros_like(state[name], param.dtype).copy_(state[name])
    state.pop("row_step", None)
    return words
