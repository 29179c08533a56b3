"""All deferrals of an optimizer, by parameter: when one begins, how long it goes on, and when it ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._backends import Backend, in_plain_torch
from .._rules.adam import Kept
from .._schedule import Schedule
from .._state import State, compute_dtype, count_tensor
from .._torch_internals import without_modes
from .._waiting import Keeper
from .deferral import Deferral, Options, new_schedule


class Deferrals(dict[Tensor, Deferral]):
    """The deferrals of all parameters that may have waiting rows."""

    def __init__(self, keeper: weakref.ref[Keeper]) -> None:
        super().__init__()
        self._keeper = keeper

    def begin(
        self, param: Tensor, state: State, lead: tuple[int, ...], taken: int, group: Mapping[str, Any], kept: Kept
    ) -> Deferral:
        """Begin to defer, if that has not begun: every row is up to date now, after the steps taken so far."""
        if not isinstance(state["step"], Tensor):
            state["step"] = count_tensor(state["step"])
        if param not in self:
            options = options_of(group)
            schedule = self._schedule_at(taken, param.dtype, options)
            self[param] = Deferral(param, state, lead, options, schedule, self._keeper, kept)
        return self[param]

    def _schedule_at(self, taken: int, dtype: torch.dtype, options: Options) -> Schedule:
        """A schedule for a parameter that has taken so many steps: that of another one, or its own."""
        for other in self.values():
            if other.step == taken and not other.schedule.step and other.options == options and other.dtype == dtype:
                return other.schedule.twin()
        return new_schedule(options, dtype, taken)

    def going_on(
        self,
        param: Tensor,
        state: State | None,
        group: Mapping[str, Any] | None,
        backend: Backend,
        taken: int | None = None,
    ) -> Deferral | None:
        """The deferral of this parameter, if rows may wait under the state, the options and the dtype it has now.

        If not, what waits is settled, and the deferral ends. The same happens if the step count was edited; waiting
        rows catch up to the old count. ``taken`` is the count if a step asks; then the rows must be the same too.
        """
        deferral = self.get(param)
        if deferral is None:
            return None
        is_same = taken is None or (taken == deferral.step and param.shape[:1] == deferral.lead)
        if is_same and group is not None and deferral.is_under(state, param.dtype, options_of(group)):
            return deferral
        self.end(param, state, backend)
        return None

    def end(self, param: Tensor, state: State | None, backend: Backend) -> None:
        """Bring every row up to date, under what it has waited under, and defer no more.

        If the state, or something in it, was cleared or replaced by hand, and the table has other rows now, none waits.
        """
        deferral = self[param]
        if deferral.has_its_state(state) or param.shape[:1] == deferral.lead:
            deferral.flush(backend)
        self.drop(param)

    def drop(self, param: Tensor) -> None:
        """Defer no more, whatever waits."""
        deferral = self.pop(param, None)
        if deferral is not None:
            deferral.release()


def options_of(group: Mapping[str, Any]) -> Options:
    """The options of a group that a row's path depends on besides lr and weight decay."""
    beta1, beta2 = group["betas"]
    return (
        (float(beta1), float(beta2)), float(group["eps"]), bool(group["amsgrad"]),
        group["second_moment"], group["state_dtype"], group["stochastic_rounding"], group["seed"],
    )  # fmt: skip


@torch.no_grad()
def flush_orphans(deferrals: Deferrals) -> None:
    """Bring up to date what a dropped optimizer leaves behind.

    Garbage collection calls this, in the middle of anything: of a compilation, of a launch, of a trace. So it waits for
    no lock and compiles nothing, and takes the reference, in plain torch operations.
    """
    with without_modes():
        for deferral in deferrals.values():
            with contextlib.suppress(ValueError):  # the table was replaced by another: nothing waits in that one
                deferral.flush(in_plain_torch)
            deferral.release()


def raise_maximum(state: State, beta2: float) -> None:
    """Raise amsgrad's maximum to what the next step without a gradient would make it.

    It must not change while rows wait, and it would if amsgrad had been off while the moments grew.
    """
    largest, second = state["max_exp_avg_sq"], state["exp_avg_sq"]
    wide = compute_dtype(largest.dtype, second.dtype)  # a state of 16 bits may have a maximum of 32
    largest.copy_(torch.maximum(largest.to(wide), second.to(wide) * beta2))
