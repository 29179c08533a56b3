"""A run that is killed at any moment: what is called clean is what was synced, bit for bit, and nothing is mixed.

``ROWSTEP_LONG=1`` kills 50 times.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from rowstep import HostEmbedding, SparseAdam, prefetched, storage
from tests.storage.others import Others

KILLS = 50 if os.environ.get("ROWSTEP_LONG") == "1" else 8

# After step n, all numbers are n. A step writes part after part, as a kernel does.
TRAIN = """
from pathlib import Path
folder = Path(sys.argv[1])
paths = [folder / "weight.safetensors", folder / "state.safetensors"]
if paths[1].exists():
    tensors = [storage.open(path, "weight", writable=True) for path in paths]
else:
    tensors = [storage.create(path, 2_000, 64) for path in paths]
print(os.getpid(), flush=True)
step = int(tensors[0].max())
while True:
    step += 1
    for part in range(0, 2_000, 100):
        for tensor in tensors:
            tensor[part : part + 100] = step
    print("stepped", step, flush=True)
    storage.sync()
    print("synced", step, flush=True)
    if step % 3 == 0:
        storage.snapshot(folder / f"step-{step}")
        print("copied", step, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path, others: Others) -> None:
    rng, paths = random.Random(0), [tmp_path / "weight.safetensors", tmp_path / "state.safetensors"]
    found = {"clean": 0, "unclean": 0}
    for _ in range(KILLS):
        others.start(TRAIN, tmp_path)
        while not (line := others.line()).strip().isdigit():
            assert "UserWarning" in line or line.startswith(" "), line
        time.sleep(rng.random() * 0.2)
        done: dict[str, int] = {"stepped": 0, "synced": 0, "copied": 0}
        for words in map(str.split, others.kill(int(line)).splitlines()):
            if words[0] in done:
                done[words[0]] = int(words[1])

        for path in paths:
            is_clean = check(path, at_least=done["stepped"])
            found["clean" if is_clean else "unclean"] += 1
        first, second = map(storage.status, paths)
        if first.clean and second.clean and first.synced_at == second.synced_at:
            assert last_step(paths[0]) == last_step(paths[1])
        for folder in tmp_path.glob("step-*"):
            if not folder.name.endswith(".rowstep-partial"):
                for path in paths:
                    assert check(folder / path.name, at_least=0), folder
                    assert last_step(folder / path.name) == int(folder.name[5:])
        assert not done["copied"] or (tmp_path / f"step-{done['copied']}").is_dir()
    assert found["clean"], found
    assert found["unclean"], found


def check(path: Path, at_least: int) -> bool:
    """Whether a file is called clean. If so, it is one step; if not, opening it says so. No step is lost."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensor = storage.open(path, "weight")
    is_clean = bool(storage.status(path).clean)
    assert bool(caught) is not is_clean
    steps = set(tensor.flatten().tolist())
    assert len(steps) <= (1 if is_clean else 2), steps
    assert min(steps) >= at_least
    return is_clean


def last_step(path: Path) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.max(storage.open(path, "weight")).item()


# A step is made by two threads. The first sync comes after step 1.
TRAIN_AHEAD = """
import os, time
from pathlib import Path
from tests.storage.test_kill import TABLE, trained
folder, shown = Path(sys.argv[1]), int(sys.argv[2])
storage.create(folder / TABLE, 300, 8)
def show(step):
    if step == shown:
        print(os.getpid(), flush=True)
        time.sleep(60 * step)
trained(folder, 10**6, show)
"""
TABLE = "table.safetensors"


def trained(folder: Path | None, steps: int, after: Callable[[int], None] = lambda _: None) -> dict[str, Tensor]:
    """A host table and its state after so many steps, in files that every other step syncs, or in memory."""
    if folder is None:
        table, state_dir = HostEmbedding.from_pretrained(torch.zeros(300, 8), freeze=False), None
    else:
        table, state_dir = HostEmbedding(300, 8, path=folder / TABLE), folder / "state"
    optimizer = SparseAdam([("table", table.weight)], lr=0.1, state_dir=state_dir)
    batches = (torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(step)) for step in range(steps))
    for step, ids in enumerate(prefetched(batches, {table: lambda ids: ids})):
        optimizer.zero_grad()
        (table(ids) - 1).square().sum().backward()
        optimizer.step()
        if folder is not None and step % 2:
            storage.sync()
        after(step)
    return {"weight": table.weight, **optimizer.state[table.weight]}


def test_a_prefetched_run_that_is_killed(tmp_path: Path, others: Others) -> None:
    """The table and its state are those of the same step in memory, where all of them are clean; else opening warns."""
    rng = random.Random(0)
    for turn in range(KILLS // 2):
        folder, is_synced = tmp_path / str(turn), turn % 2
        folder.mkdir()
        others.start(TRAIN_AHEAD, folder, is_synced)
        while not (line := others.line()).strip().isdigit():
            assert "ended with" not in line, line
        time.sleep(0 if is_synced else rng.random() * 0.2)
        others.kill(int(line))
        paths = {path.suffixes[-2][1:]: path for path in (folder / "state").glob("*.safetensors")}
        paths["weight"] = folder / TABLE
        judged = [storage.status(path) for path in paths.values()]
        are_clean = all(each.clean for each in judged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tensors = {name: storage.open(path, name) for name, path in paths.items()}
            if are_clean and len({each.synced_at for each in judged}) == 1:
                expected = trained(None, int(tensors["step"]))
                assert all(torch.equal(tensors[name], expected[name]) for name in tensors if name != "step")
            del tensors
            trained(folder, 3)
        assert bool(caught) is not are_clean
        assert are_clean or not is_synced
