"""R-workers as actors of a real Ray cluster of three nodes on this machine: placed, killed, drained and ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import model_zoo
from helpers.elastic import Job, make_llm
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import Watched
from helpers.processes import PATIENCE_SECONDS, alive
from helpers.r_workers import pool_of

from fastdecode.api.config import EngineConfig
from fastdecode.cluster.ray.actor_server import choose_cores
from fastdecode.cluster.ray.ray_backend import RayJob
from fastdecode.cluster.ray.resources import Ask, Node, check_fits, choose_ask
from fastdecode.core.errors import BackendError, CapacityError, ConfigError
from fastdecode.core.machine import numa_nodes, usable_cores
from fastdecode.engine.engine import LLMEngine

pytestmark = pytest.mark.slow

BREAK_SECONDS = 0.03
"""A pause after each step of a job while Ray starts processes, so that these get the cores."""

WIDE = 6 if SEES_ALL else 3
"""R-workers on the three nodes; each costs some seconds of CPU time to start."""

NODE: dict[str, Any] = {"num_cpus": 4, "memory": 1 << 30, "object_store_memory": 80 << 20, "include_dashboard": False}

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}
QUICK |= {"health_check_failure_threshold": 2, "prestart_worker_first_driver": False, "enable_worker_prestart": False}
"""Ray misses a dead node after one second, and not 15, and starts no Python process that nothing runs in."""

HOSTS = [Node("a", 8, 8 << 30), Node("b", 8, 8 << 30), Node("c", 2, 4 << 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start three raylets, found by RAY_ADDRESS, once for all tests, since that takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        temp = Path(tempfile.mkdtemp(prefix="fd-test-"))  # The path is short, since it holds sockets.
        (temp / "ray").mkdir()
        patch.setenv("RAY_TMPDIR", str(temp))
        nodes = Cluster()
        try:
            nodes.add_node(**NODE, _system_config=QUICK)
            for _ in range(2):
                nodes.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", nodes.address)
            nodes.temp = temp
            yield nodes
        finally:
            nodes.shutdown()
            wait_until(lambda: is_removed(temp))


def actors() -> list[psutil.Process]:
    """Return the processes of R-workers on Ray, whichever raylet has started them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if "ray::RWorkerActor" in " ".join(process.info["cmdline"] or ()) and alive(process.pid):
            found.append(process)
    return found


def claims() -> int:
    """Return how many R-workers on Ray hold cores of this machine."""
    return Path("/proc/net/unix").read_text().count("@fastdecode-ray-r-worker-")


def is_removed(folder: Path) -> bool:
    """Return whether the folder is gone, after another try to remove it; an ending process may still write there."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_nothing_left() -> None:
    wait_until(lambda: not actors() and not claims())


def present(engine: LLMEngine) -> int:
    return len(engine.scheduler.snapshot().present)


def run_until_replaced(job: Job, victims: int, before: set[int]) -> None:
    """Step until as many R-workers as were killed are back, in processes that Ray has started since."""
    engine, joined = job.engine, len(job.engine.backend.joined)  # type: ignore[attr-defined]
    job.step_until(lambda: len(engine.backend.joined) >= joined + victims, BREAK_SECONDS)  # type: ignore[attr-defined]
    assert len([process for process in actors() if process.pid not in before]) >= victims
    job.step_until(lambda: present(engine) == WIDE, BREAK_SECONDS)


@pytest.mark.thorough
def test_each_rank_has_actors_and_prefill_workers_their_key(folder: Path, cluster: Any) -> None:
    """Two ranks have two actors each, of which one is killed.

    Then one rank has prefill workers, and no key of its own.
    """
    with make_llm(folder, r_workers="ray:2", pool_listen=None, tensor_parallel_size=2) as llm:
        job, pool = Job(llm.engine), pool_of(llm.engine)
        assert len(actors()) == 4
        for _ in range(5):
            job.step()
        actors()[-1].kill()
        job.step_until(lambda: len(pool.joined) > 0 and present(llm.engine) == 2)
        job.finish()
        assert_nothing_held(llm.engine)
    assert_nothing_left()
    settings = {"r_workers": "ray:1", "pool_listen": None, "prefill_workers": "spawn:1", "prefill_threads": 1}
    with make_llm(folder, **settings) as llm:
        there = Watched(llm, [0])
        job = Job(llm.engine)
        job.finish()
        assert len(there.computed) == len(there.handed) == len(job.wanted)
    assert_nothing_left()


def assert_key_is_nowhere(engine: LLMEngine, temp: Path) -> None:
    """Assert that the key is on no command line, in no environment and not in Ray's logs."""
    secret = engine.backend.security.secret  # type: ignore[attr-defined]
    assert len(secret) == 64
    shown = [Path(f"/proc/{process.pid}/{name}") for process in actors() for name in ("cmdline", "environ")]
    shown += [path for path in temp.glob("ray/session_*/logs/**/*") if path.is_file()]
    assert len(shown) > 20
    assert not [path for path in shown if secret in path.read_bytes()]


@pytest.mark.thorough
def test_a_node_that_ray_drains_is_left_first(folder: Path, cluster: Any) -> None:
    """No sequence is computed again, and the R-worker is back once Ray has a place for it."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    leaves = next(iter(cluster.worker_nodes))
    pid = leaves.all_processes["raylet"][0].process.pid
    with make_llm(folder, r_workers="ray:3:strict-spread", pool_listen=None, key_file=None) as llm:
        engine, job = llm.engine, Job(llm.engine)
        job.step_until(lambda: all(engine.scheduler.snapshot().r_workers[index].num_sequences for index in range(3)))
        assert sum(process.ppid() == pid for process in actors()) == 1
        preempted = engine.scheduler.statistics.preemptions
        reason, until = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, int(time.time() * 1000) + 600_000
        GcsClient(cluster.address).drain_node(leaves.node_id, reason, "spot", until)
        job.step_until(lambda: present(engine) == 2, BREAK_SECONDS)
        assert engine.scheduler.statistics.preemptions == preempted, "all have moved"
        cluster.add_node(**NODE)
        cluster.remove_node(leaves)
        job.step_until(lambda: present(engine) == 3, BREAK_SECONDS)
        job.finish()
    assert_nothing_left()


def test_nothing_is_left_of_an_engine_that_was_killed(cluster: Any) -> None:
    code = """
from fastdecode.cluster.ray.ray_backend import RayJob
import time
job = RayJob(2, 1, 64 << 20)
job.start("127.0.0.1:9")
print(job.process.pid, flush=True)
time.sleep(600)
"""
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout
        driver = int(engine.stdout.readline())
        wait_until(lambda: len(actors()) == 2)
    finally:
        engine.kill()
        engine.communicate()
    assert_nothing_left()
    wait_until(lambda: not alive(driver))


@pytest.mark.thorough
def test_a_cluster_started_here_ends_with_its_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One R-worker takes this machine's cores; neither processes nor the session's folder remain."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    before = set(Path(tempfile.gettempdir()).glob("fd-ray-*"))
    job = RayJob(1, None, 64 << 20)
    started = psutil.Process(job.process.pid).children(recursive=True)
    try:
        assert (job.host, job.is_alone, job.security.encrypts) == ("127.0.0.1", True, False)
        assert len(started) > 1 and set(Path(tempfile.gettempdir()).glob("fd-ray-*")) > before
    finally:
        job.end()
    wait_until(lambda: not any(alive(process.pid) for process in started))
    assert set(Path(tempfile.gettempdir()).glob("fd-ray-*")) == before


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((13, 1, 1 << 20), r"cannot place 13 R-worker\(s\) of 1 CPU\(s\) .* room for 12\. Missing: 1 CPU\(s\)"),
        pytest.param(
            (1, 5, 1 << 20),
            r"cannot place 1 R-worker\(s\) of 5 CPU\(s\) .* 4 CPU\(s\) and 1\.00 GiB; .* room for 0",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (1, 1, 2 << 30), r"2\.00 GiB each, .* Missing: 1 CPU\(s\) and 2\.00 GiB more", marks=pytest.mark.thorough
        ),
        ((4, 1, 1 << 20, True), r"each on a node of its own\. .* Missing: 1 more node"),
    ],
    ids=str,
)
def test_what_no_node_has_is_refused(cluster: Any, asked: Any, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        RayJob(*asked)


@pytest.mark.thorough
def test_waiting_for_room_ends(cluster: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Other jobs have the room, or no autoscaler brings a node in time; the error comes before the model is loaded."""
    monkeypatch.setenv("FASTDECODE_RAY_SECONDS", "1")
    with pytest.raises(CapacityError, match=r"did not place 13 .* within 1 s: .* 12 of 12 CPU\(s\) .* free"):
        make_llm(folder, r_workers="ray:13", kv_cache_memory="1MiB", pool_listen=None)
    monkeypatch.setenv("FASTDECODE_RAY_SECONDS", "soon")
    with pytest.raises(ConfigError, match="FASTDECODE_RAY_SECONDS must be a number of seconds, not 'soon'"):
        RayJob(1, 1, 1 << 20)


def test_an_actor_that_cannot_start_says_why(cluster: Any) -> None:
    """The node has less free memory than Ray counts there."""
    job = RayJob(1, 1, 64 << 20)
    try:
        job.start("no-such-host.invalid:1")
        deadline = time.monotonic() + PATIENCE_SECONDS
        with pytest.raises(ConfigError, match=r"join: no-such-host\.invalid cannot be reached from here"):
            while time.monotonic() < deadline:
                job.check()
                time.sleep(0.05)
    finally:
        job.end()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:10001", "must run on a node of the cluster.* ray job submit"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises((BackendError, ConfigError), match=message):
        RayJob(1, 1, 1 << 20)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray:N needs Ray: pip install 'fastdecode\[ray\]'"):
        make_llm(folder, r_workers="ray:2", pool_listen=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r_workers": "ray:0"}, "r_workers must be"),
        ({"r_workers": "ray:2:spread"}, "r_workers must be"),
        ({"r_workers": "ray"}, "r_workers must be"),
        ({"r_cores": "0"}, "r_cores: this process does not start these R-workers"),
        ({"profile": __file__}, "profile: a profile names R-workers by address"),
        ({"prefill_workers": "127.0.0.1:1"}, "prefill_workers: .* need the same --key-file"),
        ({"prefill_workers": "spawn:1", "tensor_parallel_size": 2}, "prefill_workers: .* need the same --key-file"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"r_workers": "ray:2", **settings})


def test_memory_is_that_of_rays_nodes() -> None:
    config = EngineConfig(r_workers="ray:2:strict-spread", kv_cache_memory="999GiB", r_threads=64, security="encrypt")
    assert (config.r_worker_spec.strict_spread, config.num_r_workers) == (True, 2)


@pytest.mark.parametrize(
    ("count", "threads", "memory", "strict", "wanted"),
    [
        (2, None, None, False, Ask(2, 8, int(0.4 * (8 << 30)))),
        (3, None, None, False, Ask(3, 4, int(0.4 * (8 << 30)) // 2)),
        (3, None, 1 << 30, True, Ask(3, 2, 1 << 30, True)),
        (6, 2, 5, False, Ask(6, 2, 5)),
        (99, None, None, False, Ask(99, 1, int(0.4 * (8 << 30)) // 8)),
    ],
)
def test_shares_of_a_cluster(count: int, threads: int | None, memory: int | None, strict: bool, wanted: Ask) -> None:
    """Shares are equal, and as large as all of them can be."""
    assert choose_ask(count, HOSTS, threads, memory, strict) == wanted


def test_room_is_where_both_cpus_and_memory_are() -> None:
    check_fits(Ask(5, 3, 3 << 30), [*HOSTS, Node("d", 3, 3 << 30)])
    with pytest.raises(CapacityError, match=r"room for 4\. Missing: 6 CPU\(s\) and 6\.00 GiB more"):
        check_fits(Ask(6, 3, 3 << 30), HOSTS)
    with pytest.raises(CapacityError, match="The cluster has no node: room for 0"):
        check_fits(Ask(1, 1, 1), [])


def test_cores_are_those_of_one_numa_node() -> None:
    nodes = [[0, 1, 2, 3], [8, 9, 10, 11]]
    dealt = [choose_cores(slot, 2, nodes) for slot in range(5)]
    assert dealt == [[0, 1], [8, 9], [2, 3], [10, 11], [0, 1]]
    assert choose_cores(1, 3, nodes) == [8, 9, 10]
    assert choose_cores(0, 6, nodes) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert sorted(core for node in numa_nodes() for core in node) == usable_cores()


def test_what_is_killed_is_replaced(folder: Path, cluster: Any) -> None:
    """An actor and then a whole node end by ``kill -9`` under load, and each sequence gets its tokens.

    This is the last test of the cluster, which then has a node less.
    """
    with make_llm(folder, r_workers=f"ray:{WIDE}", pool_listen=None) as llm:
        engine = llm.engine
        lost: list[int] = []
        engine.on_step = lambda record: lost.append(record.lost_workers)
        each_node = Counter(process.ppid() for process in actors())
        assert list(each_node.values()) == [WIDE // 3] * 3
        assert_key_is_nowhere(engine, cluster.temp)
        job = Job(engine)
        for num_killed in (2, 2) if SEES_ALL else (1,):
            for _ in range(5):
                job.step()
            before = actors()
            for process in before[:num_killed]:
                process.kill()
            run_until_replaced(job, num_killed, {each.pid for each in before})
        before = actors()
        raylet = next(iter(cluster.worker_nodes))
        pid = raylet.all_processes["raylet"][0].process.pid
        on_node = sum(process.ppid() == pid for process in before)
        os.kill(pid, signal.SIGKILL)
        run_until_replaced(job, on_node, {each.pid for each in before})
        job.finish()
        # More are lost where a loaded machine keeps one silent for too long.
        assert sum(lost) >= (4 if SEES_ALL else 1) + on_node and on_node >= 1
        assert_nothing_held(engine)
    assert_nothing_left()
