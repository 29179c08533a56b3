"""An environment per package: made at first use, made anew when its requirements change."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
MINUTES = 20  # the largest wheel has several hundred megabytes


class MissingError(Exception):
    """A peer cannot take part; the message is the reason that tables show."""


@dataclass(frozen=True)
class Environment:
    name: str
    packages: tuple[str, ...]  # whose versions are shown
    newest: tuple[int, int] = (3, 13)  # Python for which its pinned versions have wheels
    oldest: tuple[int, int] = (3, 11)

    def interpreter(self) -> Path:
        """Its Python; makes the environment if it is not there. Raises MissingError."""
        requirements = REQUIREMENTS / f"{self.name}.txt"
        digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
        folder, ready = FOLDER / self.name, FOLDER / self.name / ".ready"
        if not ready.exists() or ready.read_text() != digest:
            shutil.rmtree(folder, ignore_errors=True)
            _run([str(self._base()), "-m", "venv", str(folder)])
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "-r", str(requirements)])
            ready.write_text(digest)
        return folder / "bin" / "python"

    def _base(self) -> Path:
        for candidate in _interpreters():
            if self.oldest <= _version(candidate) <= self.newest:
                return candidate
        oldest, newest = (".".join(map(str, version)) for version in (self.oldest, self.newest))
        raise MissingError(f"needs a Python from {oldest} to {newest}, and none was found on PATH or in ~/.pyenv")


def _interpreters() -> Iterator[Path]:
    """This one first, then others by name, then pyenv's, whose shims on PATH may lead nowhere."""
    yield Path(sys.executable)
    for minor in range(13, 9, -1):
        if found := shutil.which(f"python3.{minor}"):
            yield Path(found)
        yield from sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))


@functools.cache
def _version(interpreter: Path) -> tuple[int, ...]:
    """Empty if it does not run, or cannot make environments."""
    command = [str(interpreter), "-c", "import sys, ensurepip; print(*sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split()))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * MINUTES)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"could not be installed: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise MissingError(f"could not be installed: {' '.join(errors[:2]) or 'no message'}")
