"""gsplat's training of Gaussian splats: https://github.com/nerfstudio-project/gsplat, examples/simple_trainer.py.

Every attribute of the splats is a parameter with an optimizer of its own, made with ``fused=True``. With
``sparse_grad`` the rows of the splats that a camera sees become a sparse gradient that is marked as coalesced.
Densifying and pruning make new parameters, move ``optimizer.state`` over to them, and there resize everything but
``step`` (gsplat/strategy/ops.py). Spherical harmonics have rows of 15 x 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rowstep import DeferredAdam, SparseAdam
from tests.clients.side_by_side import Seen, assert_same_as_adam, assert_same_bits, assert_same_run

RATES = {"means": 1.6e-2, "opacities": 5e-2, "sh0": 2.5e-2, "shN": 2.5e-2 / 20}
SPLATS, SEEN_AT_ONCE = 150, 40


def create_splats(dtype: torch.dtype) -> nn.ParameterDict:
    colours = torch.randn(SPLATS, 16, 3, dtype=dtype)
    parts = {
        "means": torch.rand(SPLATS, 3, dtype=dtype),
        "opacities": torch.full((SPLATS,), 0.1, dtype=dtype).logit(),
        "sh0": colours[:, :1, :],
        "shN": colours[:, 1:, :],
    }
    # The program moves them to a GPU, which makes views contiguous; torch's fused Adam would ignore their strides.
    return nn.ParameterDict({name: nn.Parameter(part.contiguous()) for name, part in parts.items()})


def image(splats: nn.ParameterDict, ids: Tensor, camera: Tensor) -> Tensor:
    """Stands for the rasterizer: a colour at each visible splat's place, from all attributes of that splat."""
    colours = torch.cat([splats["sh0"][ids], splats["shN"][ids]], 1)
    view = (splats["means"][ids] - camera).sum(1)
    waves = torch.cos(torch.arange(16, dtype=camera.dtype) * view[:, None])
    return splats["opacities"][ids].sigmoid()[:, None] * (waves[:, :, None] * colours).sum(1)


Change = Callable[[Tensor], Tensor]


@torch.no_grad()
def replace(splats: nn.ParameterDict, optimizers: dict[str, Any], new_rows: Change, new_state: Change) -> None:
    for name, optimizer in optimizers.items():
        old = splats[name]
        new = nn.Parameter(new_rows(old))
        splats[name] = new
        state = optimizer.state.pop(old)
        for key in state:
            if key != "step":
                state[key] = new_state(state[key])
        optimizer.param_groups[0]["params"] = [new]
        optimizer.state[new] = state


def densify(splats: nn.ParameterDict, optimizers: dict[str, Any]) -> None:
    """Duplicate the splats that are easy to see; the copies start without moments."""
    chosen = torch.where(splats["opacities"].detach() > splats["opacities"].detach().median())[0][:20]

    def new_state(moment: Tensor) -> Tensor:
        return torch.cat([moment, torch.zeros(len(chosen), *moment.shape[1:])])

    replace(splats, optimizers, lambda rows: torch.cat([rows, rows[chosen]]), new_state)


def prune(splats: nn.ParameterDict, optimizers: dict[str, Any]) -> None:
    """Remove the splats that are hard to see."""
    kept = splats["opacities"].detach().argsort()[15:].sort()[0]
    replace(splats, optimizers, lambda rows: rows[kept], lambda moment: moment[kept])


def train(make: Any, sparse: bool, seen: Seen, dtype: torch.dtype = torch.float64) -> None:
    splats = create_splats(dtype)
    optimizers = {
        name: make([{"params": splats[name], "lr": rate, "name": name}], eps=1e-15, betas=(0.9, 0.999), fused=True)
        for name, rate in RATES.items()
    }
    target = torch.rand(3, dtype=dtype)
    for step in range(1, 36):
        ids = torch.randperm(len(splats["means"]))[:SEEN_AT_ONCE].sort()[0]
        loss = (image(splats, ids, torch.rand(3, dtype=dtype)) - target).abs().mean()
        loss.backward()
        if sparse:
            for param in splats.values():
                param.grad = torch.sparse_coo_tensor(
                    ids[None], param.grad[ids], param.shape, is_coalesced=True, check_invariants=False
                )
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            densify(splats, optimizers)
        if step % 12 == 0:
            prune(splats, optimizers)
        seen.after_step(loss.detach(), splats, optimizers)


def torchs(*args: Any, fused: bool, **options: Any) -> torch.optim.SparseAdam:
    """torch's class does not know ``fused``, and the program as it stands ends there."""
    with pytest.raises(TypeError, match="fused"):
        torch.optim.SparseAdam(*args, fused=fused, **options)  # type: ignore[call-arg]
    return torch.optim.SparseAdam(*args, **options)


def test_sparse_adam() -> None:
    assert_same_run("gsplat, SparseAdam", train, torchs, SparseAdam)
    in_float32 = partial(train, dtype=torch.float32)
    assert_same_bits("gsplat, SparseAdam in float32", in_float32, torchs, SparseAdam, tables=RATES)


def test_deferred_adam() -> None:
    """What the program does without ``sparse_grad``, at the cost of the splats that a camera sees."""
    assert_same_as_adam("gsplat, DeferredAdam", train, DeferredAdam)
