"""Compiled kernels on disk: a cache that never stops a step.

Numba's own cache raises in the first call of a kernel when no directory can be written to, when the disk is full and
when a file is damaged. Two processes that save at once can leave it with one kernel under the name of another. And it
does not notice a change in a file that a kernel only calls into. Here each kernel has a file of its own, named after
everything it was made of, written in one go, with a checksum in front. What cannot be read is compiled; what cannot be
saved is used all the same, and one warning says why it was not saved.

How Numba talks to a cache is written in ``internals``. With a future Numba that does it in another way, every process
compiles its kernels.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from numba import config, njit

from . import SEMANTICS, internals

_HERE = Path(__file__).parent

# What a kernel is made of: also the text of the rule, and constants of the schedule.
SOURCES = (
    *sorted(_HERE.glob("*.py")),
    _HERE.parent / "_schedule.py",
    *(_HERE.parent / "_rules" / name for name in ("adam.py", "rounding.py")),
)

_CHECKSUM = hashlib.sha256
_CHECKSUM_SIZE = _CHECKSUM().digest_size

_has_warned = False


class Record(NamedTuple):
    """How this process came by a kernel, at its first call with certain types."""

    name: str
    path: Path | None
    """Its file; None if it could not be saved."""
    was_loaded: bool
    """If not, it was compiled."""
    trouble: str = ""
    """Why it could not be saved."""


records: list[Record] = []
"""In the order of the calls. What `rowstep warm-up` tells comes from here."""


class Kernel:
    """A function that Numba compiles for these types when it is first called, and keeps on disk."""

    __slots__ = ("_dispatcher", "_types", "call")

    def __init__(self, function: Any, types: tuple[Any, ...]) -> None:
        self._dispatcher, self._types = njit(**SEMANTICS)(function), types
        internals.set_cache(self._dispatcher, KernelCache(function))
        self.call: Any = self._compile_and_call
        """Numba's own call of a dispatcher looks at the type of every argument first: 3 µs for seven of them."""

    def _compile_and_call(self, *arguments: Any) -> Any:
        self.call = self._compiled()
        return self.call(*arguments)

    def _compiled(self) -> Any:
        with _without_interrupts(), _frozen():
            return self._dispatcher.compile(self._types)

    @property
    def is_compiled(self) -> bool:
        """Whether a call does nothing but call machine code."""
        return self.call != self._compile_and_call

    @property
    def address(self) -> int:
        """Where the machine code begins, for other kernels."""
        self.call = self._compiled()
        return internals.address_of_code(self._dispatcher.overloads[self._types])


def kernel(*types: Any) -> Callable[[Any], Kernel]:
    """A decorator: compile this function for arguments of these types, at its first call."""
    return lambda function: Kernel(function, types)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back. In the middle of a compilation, Python would free a module that LLVM has freed already."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):  # another thread's, ignored, or not Python's
        yield
        return
    struck: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: struck.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if struck:
            handler(signal.SIGINT, struck[-1])


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Let garbage collection leave alone what is there.

    Numba makes so many objects that it would go over all of torch's again and again: 2.5 s a first step, not 2.0.
    """
    if gc.get_freeze_count():  # the program has done so itself
        yield
        return
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()


def directories() -> list[Path]:
    """Where compiled kernels may be, the best place first. These are the places where Numba would keep them."""
    own_name = "rowstep-" + hashlib.sha256(str(_HERE).encode()).hexdigest()[:16]
    if config.CACHE_DIR:
        return [Path(config.CACHE_DIR) / own_name]
    users = Path(internals.user_cache_dir("numba", False))
    # Without a home directory its name begins with "~".
    return [_HERE / "__pycache__", *([users / own_name] if users.is_absolute() else [])]


class KernelCache:
    """The cache of one function, with the methods that Numba calls."""

    def __init__(self, function: Any) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The kernel for these types, from disk, or None."""
        target_context.refresh()
        for directory in directories():
            try:
                path = directory / self._file_name(signature, target_context.codegen())
                content = path.read_bytes()
            except Exception:
                continue
            try:
                loaded = _unpacked(content, target_context)
                records.append(Record(self._name, path, was_loaded=True))
                return loaded
            except Exception:
                # A damaged file. If it cannot be removed either, it is compiled anew every time.
                _remove(path)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write a kernel to the first directory that takes it."""
        reasons = []
        for directory in directories():
            try:
                name = self._file_name(signature, compiled.codegen)
                _write(directory, name, _packed(compiled))
                self._remove_older(directory)
                records.append(Record(self._name, directory / name, was_loaded=False))
                return
            except Exception as error:
                reasons.append(str(error))
        trouble = "; ".join(reasons)
        records.append(Record(self._name, None, was_loaded=False, trouble=trouble))
        _warn_once(trouble)

    def _file_name(self, signature: Any, codegen: Any) -> str:
        # Numba asks with types alone, or with a signature when one kernel calls another.
        key = repr((getattr(signature, "args", signature), internals.processor(codegen))).encode()
        return f"{self._name}-{_versions()}-{hashlib.sha256(key).hexdigest()[:24]}.nbc"

    def _remove_older(self, directory: Path) -> None:
        """Remove what was made of other sources, by this Python: nobody will ask for it again."""
        for path in directory.glob(f"{self._name}-{_python()}-*.nbc"):
            if not path.name.startswith(f"{self._name}-{_versions()}-"):
                _remove(path)


@functools.cache
def _python() -> str:
    return sys.implementation.cache_tag + getattr(sys, "abiflags", "")


@functools.cache
def _versions() -> str:
    """Which Python runs, and a name for the sources and for what compiles them."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return f"{_python()}-{digest.hexdigest()[:16]}"


# Now, while the files are those that were imported: if the package is updated under a running process, what that
# compiles later must not go by the name of the new sources, nor must it load what was made of them.
with contextlib.suppress(OSError):
    _versions()


def _packed(compiled: Any) -> bytes:
    content = internals.packed(compiled)
    return _CHECKSUM(content).digest() + content


def _unpacked(content: bytes, target_context: Any) -> Any:
    if _CHECKSUM(content[_CHECKSUM_SIZE:]).digest() != content[:_CHECKSUM_SIZE]:
        raise ValueError("the checksum is wrong")
    return internals.unpacked(content[_CHECKSUM_SIZE:], target_context)


def _write(directory: Path, name: str, content: bytes) -> None:
    """Write a file so that nobody ever sees a part of it."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{name}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("xb") as file:
            file.write(content)
        unfinished.replace(directory / name)
    except BaseException:
        _remove(unfinished)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _warn_once(reason: str) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        "rowstep cannot cache its compiled kernels, so every process recompiles them, which adds a few seconds to its "
        f"first step: {reason}. Set NUMBA_CACHE_DIR to a writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )
