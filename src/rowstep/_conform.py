"""One kind of state made into another: when torch's is loaded, when options change, and for torch to load.

    element to row          r_i is the mean over the row
    element to factored     r_i and c_j are the means over rows and columns: r_i c_j / s is what Adafactor makes of v
    row to factored         every c_j is s, so that v stays what it was
    factored to row         r stays
    row, factored to element    v_ij is written out

A first moment that was not kept begins with 0. Nothing else is made up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._rules.adam import Kept
from ._state import State, compute_dtype, ensure_moments, has_moments, lasting, misplaced, slots_in, zeros_like

OverRanks = Callable[[Tensor], Tensor]


def _alone(local: Tensor) -> Tensor:
    return local


def conform(
    state: State, param: Tensor, kept: Kept, lead: tuple[int, ...] | None = None, over_ranks: OverRanks = _alone
) -> list[str]:
    """Make this state what is to be kept of a parameter whose rows run over ``lead``; tell in words what that took.

    What does not exist yet is created. All is made before anything is changed: memory may run out. ``over_ranks`` adds
    up what the ranks that share a table have.
    """
    lead = tuple(param.shape[:1]) if lead is None else lead
    if has_moments(state, kept):
        return []
    if not any(name in state for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row")):
        ensure_moments(state, param, kept, lead)
        return []
    with lasting():
        new, words = _second_moment(state, param, kept, lead, over_ranks)
        for slot in slots_in(kept):
            before = state.get(slot.name, new.get(slot.name))
            if slot.per == "element" and before is not None and kept.dtype not in (None, before.dtype):
                new[slot.name] = zeros_like(before, kept.dtype).copy_(before)
                words.append(f"{slot.name!r} rounded to {kept.dtype}")
        if "exp_avg" in state and not kept.first:
            words.append("'exp_avg' dropped, because beta1 is 0")
        made = state | new
        dropped = misplaced(made, kept)
        ensure_moments(made, param, kept, lead)
        for name in dropped:
            if name not in new:
                made.pop(name, None)
                state.pop(name, None)
        state.update(made)
    return words if int(state["step"]) else []


def _second_moment(
    state: State, param: Tensor, kept: Kept, lead: tuple[int, ...], over_ranks: OverRanks
) -> tuple[State, list[str]]:
    """The slots of the second moment that are not there in the kind that is to be kept, and how they were made."""
    wide = compute_dtype(param.dtype)
    row = state.get("exp_avg_sq_row")
    if kept.second == "element":
        if "exp_avg_sq" in state:
            return {}, []
        written_out = expanded(state, param, over_ranks).to(kept.dtype or param.dtype)
        return {"exp_avg_sq": written_out}, ["'exp_avg_sq_row' written out to 'exp_avg_sq'"]
    new: State = {}
    words = []
    if row is None or tuple(row.shape) != lead:
        table = state["exp_avg_sq"] if row is None else expanded(state, param, over_ranks)
        row = new["exp_avg_sq_row"] = table.reshape(*lead, -1).mean(dim=-1, dtype=wide)
        words.append("'exp_avg_sq' reduced to its mean over each row")
    if kept.second == "factored" and ("exp_avg_sq_column" not in state or new):
        columns = param.shape[len(lead) :]
        total, rows = over_ranks(_total_and_rows(row)).tolist()
        mean = torch.full(columns, total / max(rows, 1), dtype=wide, device=param.device)
        if "exp_avg_sq" in state:
            squares = state["exp_avg_sq"].reshape(row.numel(), -1).sum(dim=0, dtype=torch.float64)
            mean = (over_ranks(squares) / max(rows, 1)).to(wide).reshape(columns)
            words.append("'exp_avg_sq' reduced to its mean over each column")
        total = torch.tensor(total, dtype=torch.float64, device=param.device)
        new |= {"exp_avg_sq_column": mean, "exp_avg_sq_sum": total}
    return new, words


def _total_and_rows(row: Tensor) -> Tensor:
    return torch.stack([row.sum(dtype=torch.float64).cpu(), torch.tensor(float(row.numel()), dtype=torch.float64)])


def expanded(state: State, param: Tensor, over_ranks: OverRanks = _alone) -> Tensor:
    """A second moment per row, or a factored one, written out for every weight."""
    row = state["exp_avg_sq_row"]
    second = row.reshape(-1, 1)
    if "exp_avg_sq_column" in state:
        _, rows = over_ranks(_total_and_rows(row)).tolist()
        mean = float(state["exp_avg_sq_sum"]) / max(rows, 1)
        scale = 1 / mean if mean > 0 else 0.0
        second = (second.double() * scale).to(row.dtype) * state["exp_avg_sq_column"].reshape(1, -1)
    columns = param.numel() // max(row.numel(), 1)
    written_out: Tensor = second.expand(row.numel(), columns).reshape(param.shape).clone()
    return written_out
