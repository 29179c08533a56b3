"""The state of parameters in files: for each of its slots a safetensors file of ``rowstep.storage``, and for its steps.

The next optimizer over the same folder takes them up. Numbers are where a step writes them, so nothing is copied, and
each step writes its count as well. The count is -1 from when a first step begins to make the files until it is counted:
what it leaves if it does not get that far has no history, and is deleted.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _fork
from ._memory import before_sync
from ._options import parameter_name
from ._state import SLOTS, State, StateSpec, misfit, steps_taken


class _Files:
    """Those of one parameter."""

    def __init__(self, param: Tensor, stem: str, name: str) -> None:
        self.param, self.stem, self.name = param, stem, name
        self.count: Any = None
        """The steps, as an array of one number in the file; None if there are no files."""

    def path(self, slot: str) -> str:
        return f"{self.stem}.{slot}.safetensors"

    def slots(self) -> list[str]:
        return [name for name in SLOTS if os.path.exists(self.path(name))]

    def read(self) -> State:
        """The state that is in the files; empty if there are none."""
        from . import storage  # which needs Linux

        there = self.slots()
        if not os.path.exists(self.path("step")):
            if there:
                missing = f"{self.path('step')} is missing; expected it beside {self.path(there[0])}"
                raise ValueError(f"{missing}. Delete what is left")
            return {}
        try:
            count = storage.open(self.path("step"), "step", writable=True)
        except storage.FileFormatError:
            if there:
                raise
            count = torch.tensor(-1)  # it is made first of all, and was not
        if int(count) < 0:
            self.delete()
            return {}
        self.count = count.numpy()
        state: State = {name: storage.open(self.path(name), name, writable=True) for name in there}
        if not self.param.dim():
            state = {name: slot[0] for name, slot in state.items()}
        return {**state, "step": int(count)}

    def begin(self) -> None:
        """Make the first file, which says that not all of them are there."""
        from . import storage

        if self.count is not None and self.count[0] <= 0:
            self.delete()  # without history: of a step that was interrupted, or under other options
        elif there := [path for path in map(self.path, (*SLOTS, "step")) if os.path.exists(path)]:
            found = f"{there[0]} was not there when the optimizer was made"
            raise FileExistsError(f"{found}; expected no file of this name. Delete it, or use another state_dir")
        os.makedirs(os.path.dirname(self.path("step")), exist_ok=True)
        self.count = [-1]  # from here on, what is there is ours, wherever an interrupt comes
        try:
            made = storage.create(self.path("step"), 1, (), torch.int64, lambda count: count.fill_(-1), key="step")
        except FileExistsError:  # another process was faster
            self.count = None
            raise
        self.count = made.numpy()

    def create(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        from . import storage

        rows, *dim = shape or (1,)
        return storage.create(self.path(name), rows, dim, dtype, key=name).view(tuple(shape))

    def delete(self) -> None:
        """The count last, which says that the others are not to be used."""
        if self.count is not None:
            self.count[0] = -1
        for path in map(self.path, (*SLOTS, "step")):
            for each in (path, f"{path}.rowstep.json", *glob.glob(f"{glob.escape(path)}.rowstep.*.new")):
                if os.path.lexists(each):  # no, if its name is too long
                    os.unlink(each)
        self.count = None


_owners: MutableMapping[str, _Files] = weakref.WeakValueDictionary()
"""By where they are: the files of all optimizers that are alive."""


class StateFiles:
    """The files of one optimizer."""

    def __init__(self) -> None:
        self.of: dict[int, _Files] = {}
        """By the id of a parameter, which they hold, so that no other can have its id."""
        self._new: list[_Files] = []

    def release(self) -> None:
        """Let others have the files, because the optimizer could not be made."""
        for files in self.of.values():
            _owners.pop(files.stem, None)

    def take_up(self, optimizer: Any, group: Mapping[str, Any], at: int) -> None:
        """Make what the files of a group have the state of its parameters, and claim those that it will make."""
        claimed: dict[int, _Files] = {}
        specs = [StateSpec.under(group), StateSpec.under(group, in_a_table=False)]
        states = []
        try:
            for index, param in enumerate(group["params"]):
                if id(param) in self.of or id(param) in claimed:
                    continue  # it is listed twice
                files = _Files(param, _stem(group, at, index), parameter_name(group, at, index))
                self._refuse_owned(files, claimed)
                claimed[id(param)] = _owners[files.stem] = files
            for files in claimed.values():
                states.append(state := files.read())
                if state:
                    _check(state, files, specs)
        except BaseException:
            for files in claimed.values():
                del _owners[files.stem]
            raise
        self.of.update(claimed)  # now that all of them fit
        for files, state in zip(claimed.values(), states, strict=True):
            if state:
                optimizer.state[files.param] = state

    def _refuse_owned(self, files: _Files, claimed: Mapping[int, _Files]) -> None:
        if (owner := _owners.get(files.stem)) is None:
            return
        is_ours = any(owner is other for other in (*self.of.values(), *claimed.values()))
        name = owner.name
        if not is_ours:
            del owner
            gc.collect()  # an optimizer that nobody uses any more may still be there
            if files.stem not in _owners:
                return
        whose = "of the same optimizer" if is_ours else "of another optimizer that is still there"
        raise ValueError(
            f"the state of {files.name} would be in {files.path('*')}, which is for {name} {whose}; expected files of "
            "its own. Use another state_dir or another name for one of them, or delete the other optimizer first"
        )

    def make(self, param: Tensor, state: State, spec: StateSpec) -> tuple[State, list[str]]:
        """``spec.made_of``, in new files if the state of this parameter is to be in files."""
        files = self.of.get(id(param))
        if files is None or spec.is_met_by(state):
            return spec.made_of(state, param)
        if steps := steps_taken(state):
            raise ValueError(
                f"{files.name}: its files have {_described(state)}, of {steps} steps; expected {', '.join(spec.names)} "
                f"for second_moment={spec.second!r} and state_dtype={spec.dtype}. Files are not converted: use the "
                "options that they were made with, or load the state_dict() of such an optimizer into one without "
                "state_dir"
            )
        self._new.append(files)
        files.begin()
        return spec.made_of({}, param, files.create)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Delete the files that are made in here if this does not get to its end."""
        self._new = []
        try:
            yield
        except BaseException:
            for files in self._new:
                if files.count is not None and files.count[0] < 0:
                    files.delete()
            raise

    def write_counts(self, states: Mapping[Tensor, State], params: Iterable[Tensor] | None = None) -> None:
        """Write how many steps these parameters have taken, or all of them."""
        for files in self.of.values() if params is None else map(self.of.get, map(id, params)):
            if files is not None and files.count is not None and (state := states.get(files.param)):
                steps = steps_taken(state)
                if files.count[0] != steps:  # what is written counts as changed until it is synced
                    files.count[0] = steps


def make_absolute(options: dict[str, Any]) -> None:
    """Let a folder stay the same when the program changes its own."""
    if options.get("state_dir") is not None:
        options["state_dir"] = os.path.abspath(options["state_dir"])


def without_files(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, for state in memory."""
    return options if options.get("state_dir") is None else {**options, "state_dir": None}


def _stem(group: Mapping[str, Any], at: int, index: int) -> str:
    """The path of a parameter's files without their endings: another one for every name."""
    names = group.get("param_names")
    name = names[index].replace("%", "%25").replace(os.sep, "%2F") if names else f"{at}.{index}"
    return os.path.join(os.path.realpath(group["state_dir"]), name)


def _check(state: State, files: _Files, specs: Sequence[StateSpec]) -> None:
    """Raise unless this state fits the parameter and what the options of its group ask for."""
    if reason := misfit(state, files.param):
        raise ValueError(f"{files.path('step')} and the files beside it are not this parameter's: {reason}")
    if not any(spec.is_met_by(state) for spec in specs):
        raise ValueError(
            f"{files.path('step')} lies beside {_described(state)}; expected what the options of the group ask for"
        )


def _described(state: State) -> str:
    return ", ".join(f"{name} of {state[name].dtype}" for name in SLOTS if name in state)


# Before files are synced, and when the process ends


def _write_all(seconds: float) -> None:
    """Let every optimizer write what belongs into files, and then raise what kept the first one from it."""
    errors: list[Exception] = []
    for optimizer in _fork.optimizers():
        if optimizer._process != os.getpid():
            continue  # what it has not written yet is left to the process that this one was forked from
        lock, acquired = optimizer._bare_lock, list[bool]()
        try:
            # One call: an interrupt comes before it, or after it in here.
            acquired.extend(filter(None, map(lock.acquire, [True], [seconds])))
            if not acquired:
                in_step = f"another thread has been in a step of {type(optimizer).__name__} for {seconds} s"
                raise TimeoutError(f"{in_step}; expected its end. Files may lack moves")
            with optimizer._lock:  # which waits for tables at work
                optimizer._write_to_files()
        except Exception as error:
            errors.append(error)
        finally:
            for _ in acquired:
                lock.release()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or a traceback would keep itself, and what is open, alive


before_sync.append(_write_all)
