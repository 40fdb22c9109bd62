"""What every test rests on: the installed package, one torch thread, no deadlines on a shared machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as fastdecode.sworker.threads, which may come after torch here
TESTS = Path(__file__).resolve().parent

# After a plain `pip install .`, `python -m pytest` in the checkout would import the bare ./fastdecode folder, which
# has neither the extension nor sworker and cluster.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))  # for model_zoo

EXTENSION = os.environ.get("RWORKER_EXTENSION")
"""Another build of ``fastdecode._rworker`` to test (`make emulated`): a file; only tests that name an ``isa`` run."""

if EXTENSION:
    spec = importlib.util.spec_from_file_location("fastdecode._rworker", EXTENSION)
    if spec is None or spec.loader is None:
        raise ImportError(f"RWORKER_EXTENSION: {EXTENSION} is no extension module")
    sys.modules["fastdecode._rworker"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fastdecode._rworker"])

ONE_AT_A_TIME = {
    "test_backend_interrupts", "test_backends", "test_calibrate", "test_cli", "test_doctor", "test_elastic",
    "test_hostile_peers", "test_launch", "test_mpi", "test_r_worker", "test_recovery", "test_run_batch",
    "test_security", "test_spawn", "test_spin",
}  # fmt: skip
"""Modules that start processes and look for what these leave behind: never two of them at once."""

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tests start with one torch thread, whatever an engine before them chose; torch is not imported for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield


def native_isas() -> list[str]:
    """What the installed extension runs on this CPU; asked in another process if this one tests another extension."""
    command = "from fastdecode import _rworker; print(*_rworker.supported_isas())"
    return subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With RWORKER_EXTENSION: tests of instruction sets that cannot run otherwise, and those of `test_emulation`.

    RWORKER_TESTED names other instruction sets to leave out; empty: none.
    """
    if not EXTENSION:
        return
    named = os.environ.get("RWORKER_TESTED")
    tested = native_isas() if named is None else named.split()
    for item in list(items):
        isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
        if item.path.stem != "test_emulation" and (isa is None or isa in tested):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


class WholeModules(LoadScopeScheduling):
    """Hands a module to one process, for the sake of its fixtures, and all that start processes to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        return "processes" if Path(module).stem in ONE_AT_A_TIME else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeModules:
    """Of ``pytest -n``."""
    return WholeModules(config, log)
