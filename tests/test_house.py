"""Marks of the product's structure as ceilings: lower a ceiling when its mark falls (docs/structure.md)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import r_workers
from helpers.modules import modules, reached, sources, trees

from fastdecode.core.optional import PARTS, optional

ROOT = Path(__file__).parent.parent

ROOMS_OF_CLUSTER = ("wire", "links", "r_worker", "pool", "prefill", "ray")
"""Packages of ``cluster`` in order: each imports only those before it and itself."""

SERVING = ("llm", "cli.serve", "cli.run_batch", "cli.r_worker", "cli.prefill_worker")
"""Modules from which processes that serve are started."""

MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_A_FUNCTION = 51

CEILINGS = {
    "import circles": 0,
    "modules that serving imports": 258,
    "lines that serving imports": 40_011,  # the setting that rounds weights again
    "lines of the product": 70_865,  # weights rounded again for the rows that they multiply
    "files over 300 lines": 0,
    "files over 300 lines beside the product": 0,  # C++, fuzzers, scripts, benchmarks
    "functions over 51 lines": 0,
    "methods of the largest class": 25,
    "module constants": 599,
    "docstrings that are fragments": 13,
}

FRAGMENT = re.compile(
    r"(What|Of|Where|Whether|Those|The same|That|By|As|With|In|At|For|How|Who|Which|From|Until|After|Before)\b"
)
"""Beginnings of a docstring that is neither a sentence nor the name of a thing."""


def lines_of(name: str) -> int:
    """Return the number of lines of module ``name``, a name under ``fastdecode``."""
    return sources()[f"fastdecode.{name}".rstrip(".")].read_text(encoding="utf-8").count("\n")


def circles() -> set[frozenset[str]]:
    """Return sets of modules that import each other, directly or not; imports for type checkers count."""
    found = {name: {other for other in names if name in reached()[other]} for name, names in reached().items()}
    return {frozenset(names) for names in found.values() if names}


def serving(optional: bool = True) -> set[str]:
    """Return the modules that a process that serves can import. ``optional``: also optional ones."""
    return set(SERVING).union(*(reached(optional)[name] for name in SERVING))


def lengths_beside() -> list[int]:
    """Return the number of lines of each C++ file, and of each Python file outside the product and its tests."""
    patterns = [f"{folder}/**/*.[ch]pp" for folder in ("rworker_cpp", "sworker/cpp")]
    patterns += [f"{folder}/**/*.py" for folder in ("fuzz", "scripts", "benchmarks", "examples")]
    found = [path.read_text(encoding="utf-8").count("\n") for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(found) > 200
    return found


@cache
def definitions() -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Return all functions and classes of the product."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, kinds)]


def methods(node: ast.ClassDef) -> int:
    """Return the number of functions that a class defines."""
    return sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)


def is_constant(node: ast.stmt) -> bool:
    """Return whether a module's statement gives a value to a name in capitals."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return bool(names) and all(name.lstrip("_").isupper() for name in names)


@cache
def measured() -> dict[str, int]:
    """Return today's marks by their names in CEILINGS."""
    served = serving(optional=False)
    lengths = {module.name: lines_of(module.name) for module in modules()}
    spans = [(node.end_lineno or 0) - node.lineno for node in definitions() if not isinstance(node, ast.ClassDef)]
    documented = [ast.get_docstring(node) or "" for node in definitions()]
    return {
        "import circles": len(circles()),
        "modules that serving imports": len(served),
        "lines that serving imports": sum(lengths[name] for name in served),
        "lines of the product": sum(lengths.values()),
        "files over 300 lines": sum(length > MOST_LINES_OF_A_FILE for length in lengths.values()),
        "files over 300 lines beside the product": sum(length > MOST_LINES_OF_A_FILE for length in lengths_beside()),
        "functions over 51 lines": sum(span > MOST_LINES_OF_A_FUNCTION for span in spans),
        "methods of the largest class": max(methods(node) for node in definitions() if isinstance(node, ast.ClassDef)),
        "module constants": sum(is_constant(node) for tree in trees().values() for node in tree.body),
        "docstrings that are fragments": sum(bool(FRAGMENT.match(each)) for each in documented),
    }


MOST_MODULES_OF_A_STEP = 40
MOST_MODULES_OF_A_SERVER = 245


@pytest.mark.slow
def test_a_greedy_step_over_tcp_crosses_few_modules() -> None:
    """Count modules in which the S-worker runs code during one steady step, and those that it has imported by then."""
    with r_workers.listening() as (_, address):
        command = [sys.executable, str(Path(__file__).parent / "helpers" / "step_modules.py"), address]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert 20 < len(found["crossed"]) <= MOST_MODULES_OF_A_STEP, "\n".join(found["crossed"])
    assert 100 < len(found["imported"]) <= MOST_MODULES_OF_A_SERVER, "\n".join(found["imported"])


@pytest.mark.parametrize("mark", CEILINGS)
def test_marks_stay_below_their_ceilings(mark: str) -> None:
    assert measured()[mark] <= CEILINGS[mark]


def test_rooms_of_the_cluster_import_in_one_direction() -> None:
    order = {room: index for index, room in enumerate(ROOMS_OF_CLUSTER)}
    upward = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in module.own
        if module.name.startswith("cluster.") and name.startswith("cluster.")
        if order[module.name.split(".")[1]] < order[name.split(".")[1]]
    ]
    assert upward == []


def test_no_serving_process_imports_the_lab() -> None:
    assert {name for name in serving() if name.startswith("perfmodel.lab")} == set()


def test_each_part_is_a_module_that_somebody_asks_for() -> None:
    asked = {name for module in modules() for name in module.optional}
    assert asked == set(PARTS.values())
    assert {f"fastdecode.{name}" for name in PARTS.values()} <= set(sources())


def test_no_part_is_imported_without_being_asked_for() -> None:
    """A part that something serving imports anyway saves nothing."""
    assert set(PARTS.values()) & serving(optional=False) == set()


@pytest.mark.slow
def test_what_is_asked_of_a_part_is_in_it() -> None:
    """No type checker sees through ``optional``, so each ``optional("part").name`` is looked up here."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    calls = [(node.value, node.attr) for node in nodes if isinstance(node.value, ast.Call)]
    asked = [(call.args[0], name) for call, name in calls if getattr(call.func, "id", "") == "optional"]
    assert len(asked) > 40
    assert [name for part, name in asked if not hasattr(optional(ast.literal_eval(part)), name)] == []


def test_circles_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest set of modules that import each other counts once, however many ways lead around it."""
    edges = {"a": frozenset("bca"), "b": frozenset("cab"), "c": frozenset("abc"), "d": frozenset("abc")}
    monkeypatch.setattr("test_house.reached", lambda: edges)
    assert circles() == {frozenset("abc")}
