"""The floors of the code: an upper module may import a lower one, never back (docs/structure.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from helpers.modules import ROOT, Module, modules, read_module, sources, trees

FLOORS = [
    {"", "core", "kinds", "api", "drafting.speculative_config"},
    {"scheduler", "perfmodel", "perfmodel.lab.planner", "_rworker", "_sworker"}
    | {"perfmodel.lab.gpu_only", "perfmodel.lab.draft_times", "perfmodel.lab.cache_room", "perfmodel.lab.step_mix"},
    {"cycle"},
    {"sworker", "cluster", "perfmodel.lab.simulate"},
    {"engine", "tensor_parallel", "prefills", "drafting"} | {"journal"} | {"api.request", "api.text"},
    {"cli", "server", "llm", "batch", "perfmodel.lab"},
]
"""Names under ``fastdecode``, where "" is the package itself; a name stands for all modules in it."""

APART = {1, 3}
"""Floors whose entries may not import each other: a module imports lower floors and its own entry."""

OUTSIDE = {0: {"numpy", "msgspec"}, 1: {"numpy"}, 2: {"numpy"}}
"""Third-party packages that these floors may import."""

LIVES_IN = {"torch": "sworker", "transformers": "sworker", "safetensors": "sworker", "greenlet": "sworker"}
LIVES_IN |= {"llguidance": "sworker", "opentelemetry": "server"}
LIVES_IN |= {"mpi4py": "cluster", "zmq": "cluster", "ray": "cluster"}
KNOW_CLUSTER = {
    "engine.compose.backends",
    "engine.compose.own_caches",
    "cli.r_worker",
    "cli.prefill_worker",
    "prefills.worker",
    "cli.cache",
    "cli.doctor_parking",
}
"""The modules that may import ``cluster``: the choice of a backend, R-workers, prefill workers, and readers of disks.
"""

IN_ONE_FILE = {"mpi4py", "ray"}
WITH_ZMQ = {"cluster.links.zeromq", "cluster.links.zmq_socket"}
NEVER = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


@cache
def room_of(name: str) -> str:
    """Return the longest entry of FLOORS that contains ``name``."""
    rooms = [room for floor in FLOORS for room in floor if name == room or (room and name.startswith(room + "."))]
    if not rooms:
        raise AssertionError(f"fastdecode.{name} has no floor: enter it in FLOORS")
    return max(rooms, key=len)


@cache
def floor_of(name: str) -> int:
    return next(index for index, floor in enumerate(FLOORS) if room_of(name) in floor)


def violations(modules: Sequence[Module]) -> list[str]:
    """Return one line per broken rule."""
    return [line for module in modules for line in (*_own_violations(module), *_other_violations(module))] + [
        f"{name} is imported in several files: {', '.join(users)}"
        for name in sorted(IN_ONE_FILE)
        if len(users := [module.name for module in modules if name in module.others]) > 1
    ]


def _own_violations(module: Module) -> Iterator[str]:
    for name in sorted(module.own):
        mine, other = floor_of(module.name), floor_of(name)
        strangers = (
            mine == other and mine in APART and room_of(module.name).split(".")[0] != room_of(name).split(".")[0]
        )
        if other > mine or strangers:
            yield f"{module.name or 'fastdecode'} (floor {mine}) imports {name} (floor {other})"
    knows_cluster = "cluster" in {room_of(name) for name in module.own}
    if knows_cluster and room_of(module.name) != "cluster" and module.name not in KNOW_CLUSTER:
        yield f"{module.name} imports the R side, which only {', '.join(sorted(KNOW_CLUSTER))} may"
    if "_rworker" in module.own and room_of(module.name) not in ("cluster", "cli", "perfmodel.lab"):
        yield f"{module.name} imports the extension, which only cluster (and cli and the lab, to report it) may"
    if "_sworker" in module.own and room_of(module.name) != "sworker":
        yield f"{module.name} imports the S-part's extension, which only sworker may"


def _other_violations(module: Module) -> Iterator[str]:
    room = room_of(module.name)
    for name in sorted(module.others):
        if name in LIVES_IN and room != LIVES_IN[name]:
            yield f"{module.name} imports {name}, which lives in {LIVES_IN[name]}"
        if name not in OUTSIDE.get(floor_of(module.name), module.others):
            yield f"{module.name} imports {name}, and its floor knows only the standard library and numpy"
    if "zmq" in module.others and module.name not in WITH_ZMQ:
        yield f"{module.name} imports zmq, which only {', '.join(sorted(WITH_ZMQ))} may"
    banned = {name.split(".")[0] for name in module.imports} & NEVER
    if banned:
        yield f"{module.name} imports {', '.join(sorted(banned))}"


@pytest.mark.slow
def test_floors_are_kept() -> None:
    found = modules()
    assert {"core.types", "scheduler.scheduler", "sworker.run.s_worker", "cluster.pool.backend", "engine.engine"} <= {
        m.name for m in found
    }
    assert violations(found) == []


@pytest.mark.slow
def test_only_the_engine_and_prefill_workers_know_both_sides() -> None:
    """The composition root knows the S side as such, and the R side as the backend that it asks for."""
    doors = {"engine.compose.backends", "engine.compose.own_caches"}
    rooms = {m.name: {room_of(name) for name in m.own} for m in modules()}
    assert [name for name, own in rooms.items() if {"sworker", "cluster"} <= own] == ["prefills.worker"]
    assert [m.name for m in modules() if "sworker" in rooms[m.name] and doors & set(m.own)] == [
        "engine.compose.build",
        "tensor_parallel.ranks",
    ]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core.types", "from fastdecode.scheduler import Scheduler"),
        ("api.config", "import psutil"),
        ("core.errors", "def f():\n    import fastdecode.engine"),
        ("", "from fastdecode.llm import LLM"),
        ("scheduler.scheduler", "from fastdecode.perfmodel import equations"),
        ("scheduler.scheduler", "from fastdecode import sworker"),
        ("scheduler.scheduler", "import torch"),
        ("perfmodel.equations", "from fastdecode.perfmodel.lab.simulate import run"),
        ("sworker.s_worker", "from fastdecode.cluster.pool import InprocBackend"),
        ("sworker.s_worker", "import fastdecode.engine"),
        ("sworker.s_worker", "from fastdecode import _rworker"),
        ("sworker.s_worker", "import zmq"),
        ("cluster.pool", "from fastdecode import _sworker"),
        ("cluster.pool", "from fastdecode.sworker.run.staging import to_numpy"),
        ("cluster.pool", "if TYPE_CHECKING:\n    import torch.nn"),
        ("cluster.pool", "from pickle import dumps"),
        ("engine", "from transformers import AutoConfig"),
        ("engine", "from fastdecode.cli.flags import engine_config"),
        ("llm", "from fastdecode.cluster.pool import InprocBackend"),
        ("api.text", "import greenlet"),
    ],
)
def test_a_breach_is_found(name: str, source: str) -> None:
    known = {*sources(), "fastdecode._rworker", "fastdecode._sworker", "fastdecode.perfmodel.lab.simulate"}
    assert len(violations([read_module(name, ast.parse(source), known)])) >= 1


def test_transports_live_in_one_file_each() -> None:
    modules = [Module(f"cluster.{name}", frozenset({"mpi4py"})) for name in ("a", "b")]
    assert violations(modules[:1]) == []
    assert violations(modules) == ["mpi4py is imported in several files: cluster.a, cluster.b"]


def test_no_assert_statements() -> None:
    """Checks of input must survive ``python -O``."""
    asserting = [
        f"{sources()[name].relative_to(ROOT)}:{node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert asserting == []


def test_an_r_worker_starts_without_torch(tmp_path: Path) -> None:
    """The process is started outside the checkout; cli.main is imported by `fastdecode r-worker`."""
    code = """
import importlib, sys
for name in ("fastdecode", "fastdecode.scheduler", "fastdecode.cluster.r_worker.session",
             "fastdecode.cluster.pool.backend",
             "fastdecode.perfmodel.equations", "fastdecode.cli.main"):
    importlib.import_module(name)
    heavy = {"torch", "transformers", "greenlet", "fastdecode.sworker"} & set(sys.modules)
    if heavy:
        sys.exit(f"import {name} brings {sorted(heavy)}")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
