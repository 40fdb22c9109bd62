"""Set-up of all tests: the installed package, one torch thread, and no Hypothesis deadlines."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.examples import SEES_ALL
from helpers.forks import ForkedPopen
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from helpers.servers import RunningServer

# Fewer turns than fastdecode sets: tests share cores, and a thread that spins keeps a core from other tests.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

EXTENSION = os.environ.get("RWORKER_EXTENSION")
"""File of another build of ``fastdecode._rworker`` (`make emulated`); then only tests with an ``isa`` run."""

if EXTENSION:
    spec = importlib.util.spec_from_file_location("fastdecode._rworker", EXTENSION)
    if spec is None or spec.loader is None:
        raise ImportError(f"RWORKER_EXTENSION: {EXTENSION} is no extension module")
    sys.modules["fastdecode._rworker"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["fastdecode._rworker"])

TESTS = Path(__file__).parent

SHARED = {
    "mpi": {"test_doctor", "test_launch", "test_mpi", "test_mpi_prefill", "test_run_batch"},
    "cores": {"test_calibrate", "test_cli", "test_elastic", "test_recovery", "test_spin", "test_threads"},
    "sources": {"test_floors", "test_house"},
    "chat_server": {
        "test_http",
        "test_logprobs",
        "test_responses",
        "test_server",
        "test_text_limits",
        "test_tool_calls",
    },
}
"""Modules that share a resource; one process runs them one after another, and before all others.
These are MPI jobs, whose ranks never sleep, tests that measure or pin cores, those that parse all sources, and tests
that share a server.
"""

subprocess.Popen = ForkedPopen  # type: ignore[misc]  # those that the product starts, too

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


def pytest_configure(config: pytest.Config) -> None:
    """Make all processes of this run share what transformers generates (helpers/model_zoo.py)."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="references")
        config.add_cleanup(folder.cleanup)
        os.environ["FASTDECODE_TEST_REFERENCES"] = folder.name


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each ``pytest -n`` process import a share of the modules first, so that not each compiles all of them."""
    if hasattr(session.config, "workerinput"):
        told = session.config.workerinput
        for path in sorted(TESTS.rglob("test_*.py"))[int(told["workerid"][2:]) :: told["workercount"]]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting the module reports the error
                importlib.import_module(".".join(path.relative_to(TESTS).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Exclude loaded modules and collected tests from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Undo the ignoring of Ctrl-C, which a shell's background jobs and their children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Start each test with one torch thread, without importing torch."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the demo model with a chat template, for tests that do not change it."""
    from helpers.servers import CHAT_TEMPLATE, MODEL, serving

    flags = ["--served-model-name", f"{MODEL},other", "--chat-template", CHAT_TEMPLATE, "--max-num-seqs", "32"]
    flags += ["--reasoning-parser", "qwen3"]
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A key file that both sides may use."""
    path = tmp_path / "key"
    path.write_text("5" * 64)
    path.chmod(0o600)
    return path


@pytest.fixture
def mpi_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Open MPI's shared memory for this test alone."""
    folder = tmp_path / "segments"
    folder.mkdir()
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(folder))
    return folder


def native_isas() -> list[str]:
    """Return the instruction sets of the installed extension on this CPU."""
    if not EXTENSION:
        from fastdecode import _rworker

        return list(_rworker.supported_isas())
    command = "from fastdecode import _rworker; print(*_rworker.supported_isas())"
    return subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()


def isa_of(item: pytest.Item) -> str | None:
    """Return the instruction set that a test names; None if it names none."""
    return item.callspec.params.get("isa") if hasattr(item, "callspec") else None


def group_of(module: str) -> str:
    """Return the resource that a module shares, or the module itself."""
    return next((resource for resource, modules in SHARED.items() if module in modules), module)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put groups first, mark slow and thorough kernel tests, and choose tests for another extension.

    Slow, besides marked tests: kernel tests of all instruction sets except this CPU's best. With RWORKER_EXTENSION:
    only tests of instruction sets that cannot run otherwise, and `test_emulation`. RWORKER_TESTED names other
    instruction sets to leave out; empty: none. Thorough tests run in ``make test-all``. They include kernel tests of
    `avx512_vnni` where `avx512_bf16` runs, since these share most kernels. They also include three in four cases of
    lower instruction sets, and five in six cases of emulated ones.
    """
    items.sort(key=lambda item: group_of(item.path.stem) not in SHARED)
    native = native_isas()
    lower: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        isa = isa_of(item)
        if isa is not None and isa != native[-1]:
            item.add_marker("slow")
            lower.setdefault((isa, item.nodeid.split("[")[0]), []).append(item)
        if isa_of(item) == "avx512_vnni" and "avx512_bf16" in native:
            item.add_marker("thorough")
    isas = list(dict.fromkeys(isa for isa, _ in lower))
    for (isa, _), same in lower.items():
        every = 4 if isa in native else 6
        first = isas.index(isa) % min(every, len(same))
        for number, item in enumerate(same):
            if (number - first) % every:
                item.add_marker("thorough")
    if not SEES_ALL:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if not EXTENSION:
        return
    named = os.environ.get("RWORKER_TESTED")
    tested = native if named is None else named.split()
    for item in list(items):
        isa = isa_of(item)
        if item.path.stem != "test_emulation" and (isa is None or isa in tested):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


class WholeModules(LoadScopeScheduling):
    """Gives each module to one process, so that its fixtures are made once, and a shared resource to one process."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        name = group_of(Path(module).stem)
        return name if name in SHARED else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeModules:
    """Return the scheduler of ``pytest -n``: modules in the order of collection."""
    config.option.loadscopereorder = False
    return WholeModules(config, log)
