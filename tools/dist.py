"""`make dist`: build what would be published, and use it as a stranger would.

    python tools/dist.py [--torch 2.13.0]

Builds an sdist and a wheel into `dist/` and looks at what is in them. Then the wheel goes into an empty environment
outside the checkout, where the README's example, the demo and steps of every optimizer run: first as usual, then where
neither the package nor the home directory can be written. The exit code is 0 only if all of it worked.
"""

from __future__ import annotations

import argparse
import ctypes
import email.message
import html.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WARNING = "rowstep cannot cache its compiled kernels"

# Whether the README's example has trained.
AFTER_EXAMPLE = """
(steps,) = {int(state["step"]) for state in optimizer.state.values()}
assert steps > 0
print(f"{steps} steps")
"""

STEPS = """
import torch, rowstep
from torch import nn

def train(optimizer_class, sparse, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(3000, 32, sparse=sparse), nn.Linear(32, 1)).double()
    optimizer = optimizer_class(model, options)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randint(3000, (200, 10))).square().mean().backward()
        rowstep.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()["0.weight"]

class TorchSparse:
    def __init__(self, model, options):
        self.parts = torch.optim.SparseAdam([model[0].weight]), torch.optim.Adam(model[1].parameters())
    def zero_grad(self):
        [part.zero_grad() for part in self.parts]
    def step(self):
        [part.step() for part in self.parts]

def of(kind):
    return lambda model, options: kind(model.parameters(), **options)

for threads in (1, 2):
    torch.set_num_threads(threads)
    for ours, theirs, is_sparse in (
        (rowstep.SparseAdam, TorchSparse, True),
        (rowstep.DeferredAdam, of(torch.optim.Adam), False),
        (rowstep.DeferredAdamW, of(torch.optim.AdamW), False),
    ):
        torch.testing.assert_close(train(of(ours), True), train(theirs, is_sparse), rtol=1e-9, atol=1e-12)
        print(f"{ours.__name__}, threads: {threads}: as torch")
"""

TRY_TO_WRITE = """
import pathlib, rowstep
for folder in (pathlib.Path(rowstep.__file__).parent / "_kernels" / "__pycache__", pathlib.Path.home()):
    try:
        (folder / "probe").touch()
    except OSError as error:
        print(f"cannot write: {error}")
    else:
        raise SystemExit(f"{folder} can be written; nothing would be shown here")
"""

RENDER = "import sys, readme_renderer.markdown as m; print(m.render(sys.stdin.read()) or sys.exit('not rendered'))"


class FailedError(Exception):
    """Something is wrong with what was built."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise FailedError(what)


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: object, cwd: Path = ROOT, text: str = "") -> str:
    """Run a command that must succeed, and return what it prints; of its complaints only the last matter."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, input=text, capture_output=True, text=True)
    expect(done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}\nexit code {done.returncode}: {command}")
    return done.stdout


# What was built


def build(tools: Path) -> tuple[Path, Path]:
    """The wheel, made of the sdist, and the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(tools, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as other:
        run(tools, "-m", "build", "--wheel", "--outdir", other, ROOT)
        (direct,) = Path(other).iterdir()
        expect(
            (direct.name, direct.read_bytes()) == (wheel.name, wheel.read_bytes()),
            "the sdist builds another wheel than the checkout",
        )
    print(run(tools, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist), end="")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> email.message.Message:
    """Hold the files in both against the sources. Return the metadata."""
    name, version = wheel.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    about = {f"{info}/{part}" for part in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    wanted = sources | {"rowstep/py.typed"} | about
    expect(inside == wanted, f"the wheel lacks {wanted - inside}, and should not have {inside - wanted}")
    with tarfile.open(sdist) as archive:
        packed = {path.partition("/")[2] for path in archive.getnames()}
    for part in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "tests/conftest.py", "src/rowstep/py.typed"):
        expect(part in packed, f"the sdist lacks {part}")
    stray = [path for path in packed if "__pycache__" in path or path.endswith((".pyc", ".nbc"))]
    expect(not stray, f"the sdist should not have {stray}")
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size >> 10} KiB; {sdist.name}: {len(packed)} files")
    return metadata


class Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.targets += [value or "" for key, value in attrs if key in ("href", "src", "srcset")]


def check_description(tools: Path, metadata: email.message.Message) -> None:
    """Look at what an index shows: its links must be good anywhere."""
    payload = metadata.get_payload(decode=True)
    assert isinstance(payload, bytes)
    links = Links()
    links.feed(run(tools, "-c", RENDER, text=payload.decode()))
    relative = [link for link in links.targets if not link.startswith(("https://", "#"))]
    expect(bool(links.targets) and not relative, f"links in the description that lead nowhere: {relative}")
    print(f"description: {len(links.targets)} links, all absolute")
    for label in ("Author", "License-Expression", "Requires-Python"):
        expect(bool(metadata[label]), f"the metadata has no {label}")
    named = {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])}
    expect(named >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}, f"the metadata has URLs of {named}")


# How it works elsewhere


class Stranger:
    """Somebody with the wheel in an environment of their own, and nothing else of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.out = folder, folder / "home", folder / "out"
        run(sys.executable, "-m", "venv", folder / "venv")
        self.home.mkdir()
        self.out.mkdir()
        self.python = folder / "venv" / "bin" / "python"
        unwanted = ("PYTHON", "NUMBA_", "ROWSTEP_", "XDG_", "VIRTUAL_ENV")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        self.is_denied = False

    def install(self, *what: str) -> None:
        run(self.python, "-m", "pip", "install", "--quiet", *what, cwd=self.folder)

    @property
    def package(self) -> Path:
        (package,) = (self.folder / "venv").glob("lib/python*/site-packages/rowstep")
        return package

    def kernels(self) -> list[Path]:
        return sorted(path for root in (self.package, self.home) for path in root.rglob("*.nbc"))

    def forget_kernels(self) -> None:
        for path in self.kernels():
            path.unlink()

    def deny_writing(self) -> None:
        """From now on neither the package nor the home directory can be written."""
        self.forget_kernels()
        for root in (self.package, self.home):
            for path in (root, *root.rglob("*")):
                path.chmod(path.stat().st_mode & ~0o222)
        self.is_denied = True

    def does(self, *arguments: object, code: int = 0, warnings: int | None = None) -> None:
        """Run the environment's Python; expect this exit code, and warnings about the cache exactly where due."""
        done = subprocess.run(
            [str(self.python), *map(str, arguments)], capture_output=True, text=True, check=False, cwd=self.out,
            env=self.environment | {"HOME": str(self.home)}, preexec_fn=drop_rights if self.is_denied else None,
        )  # fmt: skip
        print(done.stdout, done.stderr, sep="", end="", flush=True)
        expect(done.returncode == code, f"exit code {done.returncode}, not {code}: {' '.join(map(str, arguments))}")
        wanted = int(self.is_denied) if warnings is None else warnings
        expect(done.stderr.count(WARNING) == wanted, f"the warning about the cache was expected {wanted} times")


def drop_rights() -> None:
    """Let file permissions bind root too: drop its rights to pass them over, for this process and what it starts."""
    if os.geteuid() == 0:
        libc, drop_from_bounding_set = ctypes.CDLL(None, use_errno=True), 24
        for capability in range(64):
            libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)


def example() -> str:
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    expect(bool(blocks), "the README has no example")
    return blocks[0] + AFTER_EXAMPLE


def check_use(stranger: Stranger, wheel: Path, torch: str) -> None:
    version = wheel.name.split("-")[1]
    say(f"an empty environment: the wheel and torch {torch}")
    stranger.install(f"torch=={torch}", str(wheel))
    shown = run(stranger.python.parent / "rowstep", "--version", cwd=stranger.out)
    expect(shown == f"rowstep {version}\n", f"rowstep --version says {shown!r}; expected {version}")
    stranger.does("-m", "rowstep", "--version")
    say("the README's example")
    stranger.does("-W", "error", "-c", example())
    say("steps of every optimizer, beside torch's")
    stranger.does("-W", "error", "-c", STEPS)
    say("the demo")
    stranger.does("-m", "rowstep", "demo", "--steps", 100)
    say("rowstep warm-up, then steps that must find all kernels")
    stranger.forget_kernels()
    stranger.does("-m", "rowstep", "warm-up", "--dtype", "float32", "float64")
    warm = stranger.kernels()
    stranger.does("-c", STEPS)
    stranger.does("-c", example())
    expect(bool(warm) and stranger.kernels() == warm, "kernels were compiled after the warm-up")


def check_use_without_writing(stranger: Stranger) -> None:
    say("the package and the home directory cannot be written")
    stranger.deny_writing()
    stranger.does("-c", TRY_TO_WRITE, warnings=0)
    stranger.does("-c", example())
    stranger.does("-c", STEPS)
    stranger.does("-m", "rowstep", "demo", "--steps", 100)
    stranger.does("-m", "rowstep", "warm-up", code=1, warnings=0)
    expect(not stranger.kernels(), "kernels were saved where nothing can be written")


def main() -> int:
    parser = argparse.ArgumentParser(description="build a wheel and an sdist, and try the wheel elsewhere")
    parser.add_argument("--torch", default="2.13.0", help="the version in the environment of the trial")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowstep-dist-") as name:
        folder, tools = Path(name), Path(name) / "tools" / "bin" / "python"
        try:
            say("build, twine check, contents")
            run(sys.executable, "-m", "venv", folder / "tools")
            run(tools, "-m", "pip", "install", "--quiet", "build", "twine", "readme_renderer[md]")
            wheel, sdist = build(tools)
            check_description(tools, check_contents(wheel, sdist))
            stranger = Stranger(folder)
            check_use(stranger, wheel, arguments.torch)
            check_use_without_writing(stranger)
        except FailedError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print(f"OK: {wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} are fit to be published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
