"""The product's modules, parsed once: the imports of each, and the lengths of its parts."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastdecode.core.optional import PARTS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "fastdecode": "fastdecode",
    "sworker": "fastdecode.sworker",
    "cluster": "fastdecode.cluster",
    "perfmodel": "fastdecode.perfmodel",
}
"""Folders of the checkout, with their package names."""


@dataclass(frozen=True)
class Module:
    """A module's name under ``fastdecode`` and every dotted name it imports, inside functions too.

    ``optional``: modules that it imports as ``optional`` once settings ask for them (``fastdecode.core.optional``).
    """

    name: str
    imports: frozenset[str]
    optional: frozenset[str] = frozenset()

    @property
    def own(self) -> set[str]:
        """Imports from this project, as names under ``fastdecode``; optional ones too."""
        return self.always | self.optional

    @property
    def always(self) -> set[str]:
        """Imports from this project that need no setting."""
        return {name.partition(".")[2] for name in self.imports if name.split(".")[0] == "fastdecode"}

    @property
    def others(self) -> set[str]:
        """Top-level names of all other imports outside the standard library."""
        return {name.split(".")[0] for name in self.imports} - {"fastdecode"} - sys.stdlib_module_names


@cache
def sources() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module by its dotted name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sources().items()}


def read_module(name: str, tree: ast.Module, known: set[str]) -> Module:
    """Return the module ``name`` with its imports.

    ``from package import x`` counts as ``package.x`` where that is a module, else as ``package``. Imports under
    TYPE_CHECKING count, except in the package's own __init__, which hands names of upper floors through.
    """
    found, optional = set(), set()
    for node in _nodes(tree, name == ""):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "optional":
            optional |= {PARTS[each.value] for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member if member in known else node.module for member in members}
    return Module(name, frozenset(found), frozenset(optional))


@cache
def modules() -> tuple[Module, ...]:
    """Return all modules of the product."""
    known = {*sources(), "fastdecode._rworker", "fastdecode._sworker"}
    return tuple(read_module(name.partition(".")[2], tree, known) for name, tree in trees().items())


@cache
def reached(optional: bool = True) -> dict[str, frozenset[str]]:
    """Return for each module all modules that importing it can bring, by names under ``fastdecode``.

    ``optional``: with the modules that only some settings ask for.
    """
    names = {module.name for module in modules()} - {""}
    edges = {module.name: (module.own if optional else module.always) & names for module in modules()}

    def all_from(start: str) -> frozenset[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            more = edges[waiting.pop()] - found
            found |= more
            waiting += more
        return frozenset(found)

    return {name: all_from(name) for name in edges}


def _nodes(tree: ast.AST, skip_type_checking: bool) -> Iterator[ast.AST]:
    if not skip_type_checking:
        yield from ast.walk(tree)
        return
    for node in ast.iter_child_nodes(tree):
        if skip_type_checking and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _nodes(node, skip_type_checking)
