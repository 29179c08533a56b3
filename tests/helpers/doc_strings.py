"""The public names of the package, as the pages of the reference list them, and what their docstrings say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helpers.doc_blocks import ROOT

MODULES = ("rowstep", "rowstep.arrays", "rowstep.distributed")
_ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options:\n      members: \[([\w, ]*)\]\n)?", re.MULTILINE)


@dataclass(frozen=True)
class Documented:
    """A public class or function, or a method of a public class."""

    name: str
    thing: Any
    is_method: bool

    @property
    def text(self) -> str:
        return inspect.getdoc(self.thing) or ""

    @property
    def parameters(self) -> list[str]:
        """The names that its ``Args`` must list."""
        if not self.is_method and isinstance(self.thing, type) and issubclass(self.thing, (Exception, tuple)):
            return []  # errors take a message; the fields of a record have docstrings of their own
        found = inspect.signature(self.thing).parameters
        names = [f"**{name}" if param.kind is param.VAR_KEYWORD else name for name, param in found.items()]
        return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]

    @property
    def listed(self) -> list[str]:
        """The names that its ``Args`` do list."""
        section = re.search(r"^Args:\n((?:    .*\n|\n)*)", self.text + "\n", re.MULTILINE)
        return re.findall(r"^    (\**\w+): ", section[1], re.MULTILINE) if section else []

    @property
    def sections(self) -> list[str]:
        return re.findall(r"^(Args|Returns|Yields|Raises|Examples):$", self.text, re.MULTILINE)


def reference() -> dict[str, list[str] | None]:
    """What the pages of the reference show: names, and the members of each if the page chooses them."""
    text = "".join(page.read_text(encoding="utf-8") + "\n" for page in sorted((ROOT / "docs/api").glob("*.md")))
    return {name: members.replace(",", " ").split() or None for name, members in _ENTRY.findall(text)}


def public() -> Iterator[Documented]:
    shown = reference()
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            thing = getattr(importlib.import_module(module), name)
            yield Documented(full, thing, is_method=False)
            if isinstance(thing, type):
                for method in shown.get(full) or _own_methods(thing):
                    yield Documented(f"{full}.{method}", getattr(thing, method), is_method=True)


def _own_methods(kind: type) -> list[str]:
    """Public functions that this package defines for a class, here or in a base class."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("rowstep")]
    names = {name: None for base in ours for name in vars(base) if not name.startswith("_")}
    return [name for name in names if callable(getattr(kind, name)) and not isinstance(getattr(kind, name), type)]


def run_examples(each: Documented) -> int:
    """Run the examples of a docstring; return how many lines there are. Raise if one prints something else."""
    test = doctest.DocTestParser().get_doctest(each.text, {}, each.name, None, None)
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test)
    return len(test.examples)
