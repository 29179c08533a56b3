"""Imports flow one way. Each layer names the layers that it may import; here the sources are held against that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCES = Path(__file__).parents[2] / "src"


class Layer(NamedTuple):
    modules: tuple[str, ...]
    """Modules and packages right below ``rowstep``; "" is ``rowstep`` itself, "*" what no other layer has."""
    may_import: tuple[str, ...]
    """Other layers, at any depth of nesting and for type checkers as well."""
    without: tuple[str, ...] = ()
    """Packages of others that it must not import."""


LAYERS = {
    "plain": Layer(("_choice", "_fork", "_rules", "_schedule", "_warnings"), may_import=(), without=("torch",)),
    "kernels": Layer(("_kernels", "_triton"), may_import=("plain",), without=("torch",)),
    "arrays": Layer(("arrays",), may_import=("plain", "kernels"), without=("torch",)),
    "tensors": Layer(
        ("_gradient", "_ids", "_memory", "_rule", "_state", "_table", "_torch_internals", "_torch_version", "_waiting"),
        may_import=("plain",),
    ),
    "storage": Layer(("storage",), may_import=("plain", "tensors"), without=("numba", "safetensors")),
    "host": Layer(("_host",), may_import=("tensors", "core", "storage")),
    "backends": Layer(("_backends",), may_import=("plain", "kernels", "tensors")),
    "core": Layer(("*",), may_import=("plain", "tensors", "backends", "storage")),
    "deferred": Layer(("_deferred",), may_import=("plain", "tensors", "backends", "core")),
    "public": Layer(("",), may_import=("core", "deferred", "host")),
    "distributed": Layer(("distributed",), may_import=("tensors", "core")),
    "cli": Layer(("__main__", "cli"), may_import=("kernels", "arrays", "tensors", "backends", "core", "public")),
}

NOWHERE = ("unittest", "tests", "benchmarks")

EXCEPTIONS = {
    ("rowstep._rules.adam", "torch")  # for type checkers only
}


# What torch and Numba do not promise to keep is used in one file each.
TORCH_INTERNALS, NUMBA_INTERNALS = "rowstep._torch_internals", "rowstep._kernels.internals"
PRIVATE_MODULES = ("numba.core", "numba.misc", "numba.np")
PRIVATE_ATTRIBUTES = {
    TORCH_INTERNALS: (
        "_C", "_indices", "_values", "_version", "_is_zerotensor", "_cdata", "_module_parameters",
        "_get_active_ddp_module", "_make_subclass", "_execution_engine", "_nnz",
        "_set_params_and_buffers_to_ignore_for_model", "_disable_dynamo",
    ),
    NUMBA_INTERNALS: ("_cache", "_reduce", "_rebuild", "magic_tuple", "_launch_threads", "call_internal_no_propagate"),
}  # fmt: skip


class Import(NamedTuple):
    name: str
    """In full. Of ``from a import b`` it is ``a.b``, which may be a module."""
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """All of them: in functions and for type checkers as well."""
    package = path.parent.relative_to(SOURCES).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join([*above, node.module] if node.module else above)
            yield from (Import(f"{origin}.{alias.name}", node.lineno) for alias in node.names)


MODULES = {module_name(path): list(imports_of(path)) for path in sorted(SOURCES.rglob("*.py"))}


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return name.split(".")[0] in packages


def top_level(name: str) -> str:
    """The module or package right below ``rowstep`` that this is, or is in; "" for ``rowstep`` itself."""
    first_two = name.split(".")[:2]
    return first_two[1] if ".".join(first_two) in MODULES and len(first_two) == 2 else ""


def layer_of(name: str) -> str:
    layers = (layer for layer, (modules, *_) in LAYERS.items() if top_level(name) in modules)
    return next(layers, "core")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_it_may(layer: str) -> None:
    _, others, without = LAYERS[layer]
    found = []
    for module in (module for module in MODULES if layer_of(module) == layer):
        for name, line in MODULES[module]:
            is_ours = is_within(name, ("rowstep",))
            is_wrong = layer_of(name) not in (layer, *others) if is_ours else is_within(name, (*NOWHERE, *without))
            if is_wrong and (module, name.split(".")[0]) not in EXCEPTIONS:
                found.append(f"{module} imports {name} in line {line}")
    assert not found, f"{layer} may import {others or 'nothing of ours'}, without {(*NOWHERE, *without)}"


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=module_name)
def test_private_interfaces_are_used_in_one_file(path: Path) -> None:
    module = module_name(path)
    for name, line in MODULES[module]:
        if is_within(name, ("torch", "numba")) and module not in (TORCH_INTERNALS, NUMBA_INTERNALS):
            is_private = any(part.startswith("_") for part in name.split("."))
            is_private |= any(name.startswith(f"{private}.") for private in PRIVATE_MODULES)
            assert not is_private, f"{name} in line {line}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for home, names in PRIVATE_ATTRIBUTES.items():
            if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node):
                assert module == home, f"{node.attr} in line {node.lineno}"


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"
