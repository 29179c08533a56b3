"""A run that is killed at any moment: what is called clean is what was synced, bit for bit, and nothing is mixed.

``ROWSTEP_LONG=1`` kills 50 times.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from pathlib import Path

import torch

from rowstep import storage
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
