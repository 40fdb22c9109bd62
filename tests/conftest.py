"""What every test rests on: the installed package, one torch thread, no deadlines on a shared machine."""

from __future__ import annotations

import importlib.util
import os
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


def _use_extension(path: str) -> None:
    """Tests the extension at ``path``, one with emulated instructions, in place of the package's own."""
    spec = importlib.util.spec_from_file_location("fastdecode._rworker", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import fastdecode

    sys.modules["fastdecode._rworker"] = fastdecode._rworker = module  # type: ignore[attr-defined]


if "RWORKER_EXTENSION" in os.environ:
    _use_extension(os.environ["RWORKER_EXTENSION"])

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


class WholeModules(LoadScopeScheduling):
    """Hands a module to one process, for the sake of its fixtures, and all that start processes to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        return "processes" if Path(module).stem in ONE_AT_A_TIME else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeModules:
    """Of ``pytest -n``."""
    return WholeModules(config, log)
