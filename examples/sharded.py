"""Sharded tables, checkpoints, and a run that survives losing workers and machines.

    python examples/sharded.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/sharded.py --checkpoints DIR

Add ``--die-at 25 --die-rank 1`` to kill a worker: the run still ends with the same bits. The ranks split one batch per
step, so any number of ranks does the same work. A run resumes from the newest complete checkpoint, with however many
ranks there are. If machines may be lost and come back, start this on each of them, with DIR on a disk that all can see:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME examples/sharded.py --checkpoints DIR
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not to mypy
from torch.distributed.tensor import DTensor

import rowstep.distributed
from rowstep import DeferredAdamW
from rowstep.distributed import ShardedEmbedding, ShardedEmbeddingBag

SEED, USERS, WORDS, BATCH = 0, 1001, 301, 2001


class Ratings(nn.Module):
    """What a user thinks of an item, of which a few words are known."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users = ShardedEmbedding(USERS, width)
        self.words = ShardedEmbeddingBag(WORDS, width, mode="mean")
        self.tower = nn.Sequential(nn.Linear(3 * width, 32), nn.SiLU(), nn.Linear(32, 1))
        with torch.no_grad():
            for table in (self.users, self.words):
                table.weight.mul_(0.1)  # rows drawn anew here would depend on how many the rank has

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        user, item = self.users(users), self.words(words)
        rating: Tensor = self.tower(torch.cat([user, item, user * item], 1)).squeeze(1)
        return rating


class Batch(NamedTuple):
    users: Tensor  # (BATCH,)
    words: Tensor  # (BATCH, 3)
    ratings: Tensor  # (BATCH,)


def batch_of(step: int) -> Batch:
    """The batch of all ranks together. It depends on the step alone: a run that was interrupted sees what it missed."""
    planted = torch.Generator().manual_seed(SEED)
    traits, meanings = torch.randn(USERS, 4, generator=planted), torch.randn(WORDS, 4, generator=planted)
    drawn = torch.Generator().manual_seed(1_000_003 * (SEED + 1) + step)
    users = (USERS * torch.rand(BATCH, generator=drawn) ** 2).long()  # small ids are the popular ones
    words = (WORDS * torch.rand(BATCH, 3, generator=drawn) ** 2).long()
    return Batch(users, words, (traits[users] * meanings[words].mean(1)).sum(1).tanh())


def join() -> None:
    """Become one of the ranks that torchrun has started; without torchrun, the only one.

    Ranks find each other through a store. By default it is torchrun's own and outlives the workers, so those of the
    next attempt would find, and call, the addresses of those that died. There are two ways out:

    - Within one torchrun, a prefix for each attempt: the count of restarts, which all ranks are told.
    - Several torchruns each count for themselves, and do not count at all when one joins or leaves. Nothing that
      workers are told names the round of the rendezvous, and ranks with different prefixes would wait for each other.
      With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchruns agree on a new port for each round, where rank 0 opens a new
      store. It also spares the others from calling a torchrun that is lost for the store it had.
    """
    env, timeout = os.environ, timedelta(minutes=1)  # how long to wait for a rank that is lost without a word
    if "RANK" not in env:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    elif env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=timeout)
    elif env["GROUP_WORLD_SIZE"] == "1":
        rank, ranks, port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
        shared = TCPStore(env["MASTER_ADDR"], port, is_master=False, timeout=timeout)
        store = PrefixStore(f"attempt-{env['TORCHELASTIC_RESTART_COUNT']}", shared)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    else:
        raise SystemExit(
            f"{env['GROUP_WORLD_SIZE']} torchruns share a store that outlives workers; start each of them with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d"
        )


def newest_complete(checkpoints: Path) -> Path | None:
    """The checkpoint to go on from, the same on all ranks."""
    # .metadata is written last, and renamed into place: a folder without it was not finished. One rank looks, because
    # two that look for themselves may see different things on a shared disk.
    finished = sorted(checkpoints.glob("step-*/.metadata")) if dist.get_rank() == 0 else []
    answer = [finished[-1].parent if finished else None]
    dist.broadcast_object_list(answer)
    return answer[0]


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments of all ranks; all must call this together. Their rows lie in one order for any number."""
    state: dict[str, Any] = model.state_dict()
    for number, moments in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{name}": value for name, value in moments.items()}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def digest(state: dict[str, Tensor]) -> str:
    """Two runs that print the same have ended with the same bits."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items()):
        sha.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def main(
    checkpoints: Path | None = None,
    steps: int = 60,
    save_every: int = 10,
    die_at: int | None = None,
    die_rank: int | None = None,
    lose_machine: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """Train; return the loss on ratings not seen before, and the state at the end."""
    join()
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)  # the same on all ranks, which then make the same model as one would
        model = Ratings()
        trained = rowstep.distributed.ddp(model)  # saved is the model inside, whose names are those of any other run
        optimizer = DeferredAdamW(model, lr=0.02, weight_decay=0.01)

        run: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        if checkpoints and (found := newest_complete(checkpoints)):
            rowstep.distributed.load(run, found)
        if rank == 0:
            print(f"{ranks} rank(s) start at step {run['step']}", flush=True)

        for step in range(run["step"] + 1, steps + 1):
            users, words, ratings = (part[rank::ranks] for part in batch_of(step))
            errors = trained(users, words) - ratings
            optimizer.zero_grad()
            # Gradients are averaged over ranks: this makes theirs the whole batch's mean, also where it cuts unevenly.
            torch.autograd.backward(errors.square().sum() * (ranks / BATCH))
            if step == die_at and die_rank in (None, rank) and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                die(lose_machine)
            optimizer.step()
            if checkpoints and (step % save_every == 0 or step == steps):
                run["step"] = step
                dcp.save(run, checkpoint_id=checkpoints / f"step-{step:06d}")  # type: ignore[attr-defined]

        model.eval()
        with torch.no_grad():
            unseen = batch_of(steps + 1)  # whole, on every rank
            loss = (model(unseen.users, unseen.words) - unseen.ratings).square().mean().item()
        state = whole_state(model, optimizer)
        if rank == 0:
            print(f"loss {loss:.4f}, where guessing the mean gives {unseen.ratings.var():.4f}; sha256 {digest(state)}")
        return loss, state
    finally:
        dist.destroy_process_group()


def die(lose_machine: bool) -> None:
    """End without a word, as processes do that run out of memory; or with torchrun, as when a machine is lost."""
    if lose_machine:  # the parent is torchrun: only there a count of restarts is 0, and main comes here
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def arguments() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="where to save, and to go on from")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill this worker there, in its first attempt")
    parser.add_argument("--die-rank", type=int, metavar="RANK", help="kill only this one")
    parser.add_argument("--lose-machine", action="store_true", help="when killing a worker, kill its torchrun too")
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**arguments())
