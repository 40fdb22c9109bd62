"""``--r-workers spawn:N``: the processes end with the one that started them, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import contract
from helpers.processes import PATIENCE_SECONDS, alive, script, segments_of

from fastdecode._rworker import Ring
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import BackendError

pytestmark = pytest.mark.slow

DESCRIPTORS = Path("/proc/self/fd")

HOLD = """
    import time
    from helpers import contract
    backend = contract.spawn()
    backend.open(contract.LAYOUT)
    contract.run(backend, contract.FIRST)
    print(*(worker.link.process.pid for worker in backend.workers), flush=True)
    if {how} == "busy":
        backend.begin_step(contract.plan([([(9, 0, 50, 1)], [])]))
    time.sleep(1000)
"""
PREFILL_WORKERS = """
    import threading, time
    from fastdecode.cluster.prefill.connect import spawned_workers
    from fastdecode.cluster.wire.handshake import Security

    def start():
        pool = spawned_workers(1, {{"device": "cpu"}}, 1, [0], None, Security())
        pool.clients[0].open(b"")  # it listens
        print(pool.clients[0].process_id, flush=True)
        time.sleep(1000)

    threading.Thread(target=start).start()
"""

WATCHING = """
    import subprocess, sys, threading, time
    from fastdecode.core.parent import parent_flags

    def start():
        code = "import time, fastdecode.core.parent as p; p.die_with(PARENT); print(1, flush=True); time.sleep(1000)"
        code = code.replace("PARENT", parent_flags()[1])
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)

    threading.Thread(target=start).start()
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("code", "how"),
    [
        pytest.param(HOLD, "idle", marks=pytest.mark.thorough),
        (HOLD, "busy"),
        pytest.param(PREFILL_WORKERS, "idle", marks=pytest.mark.thorough),
        (WATCHING, "PARENT"),
    ],
    ids=["idle", "busy", "thread", "watching"],
)
def test_kill_9_of_the_parent_leaves_no_child_and_no_segment(code: str, how: str) -> None:
    """The children end whichever thread had started them."""
    process = subprocess.Popen(script(code.format(how=repr(how))), stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in process.stdout.readline().split()] if process.stdout else []
    assert children and all(alive(pid) for pid in children)
    segments = segments_of([process.pid, *children])
    process.kill()
    process.communicate()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in children)
    assert not any(segment.exists() for segment in segments)


def test_a_killed_worker_leaves_the_others_going(caplog: pytest.LogCaptureFixture) -> None:
    """The report names the killed R-worker; its rows read zeros, and the others' are right."""
    backend, reference = contract.spawn(), contract.spawn()
    mini_batch = ([(1, 0, 4, 1)], [(2, 0, 4, 1)])
    outputs = []
    for each in (reference, backend):
        each.open(contract.LAYOUT)
        each.begin_step(contract.plan([mini_batch]))
        if each is backend:
            backend.workers[1].link.process.kill()  # type: ignore[attr-defined]
        for layer in range(len(contract.LAYERS)):
            each.submit(0, layer, *contract.rows(mini_batch, 0, layer))
            outputs.append(each.collect(0).copy())
        report = each.end_step()
        assert report.lost == ((1,) if each is backend else ())
    wanted, found = outputs[: len(contract.LAYERS)], outputs[len(contract.LAYERS) :]
    for whole, part in zip(wanted, found, strict=True):
        assert (part[:4] == whole[:4]).all() and not part[4:].any()
    assert "R-worker spawn-1 is lost: its process was killed by SIGKILL" in caplog.text
    for each in (reference, backend):
        each.close()


def test_close_leaves_no_descriptor() -> None:
    """Descriptors are closed at once, since thousands of engines may run one after the other in one process."""
    gc.disable()
    try:
        before = set(DESCRIPTORS.iterdir())
        backend = contract.spawn()
        backend.open(contract.LAYOUT)
        contract.run(backend, contract.FIRST)
        assert set(DESCRIPTORS.iterdir()) != before
        backend.close()
        assert set(DESCRIPTORS.iterdir()) == before
    finally:
        gc.enable()


@pytest.mark.thorough
def test_a_stopped_worker_is_waited_for() -> None:
    """SIGSTOP for half a second is no loss."""
    backend = contract.spawn()
    backend.open(contract.LAYOUT)
    process = backend.workers[0].link.process  # type: ignore[attr-defined]
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, process.send_signal, [signal.SIGCONT]).start()
    contract.run(backend, contract.FIRST)
    backend.close()


@pytest.mark.thorough
def test_they_outlive_the_thread_that_started_them() -> None:
    backend = contract.spawn()
    thread = threading.Thread(target=backend.open, args=[contract.LAYOUT])
    thread.start()
    thread.join()
    contract.run(backend, contract.FIRST)
    processes = [worker.link.process for worker in backend.workers]  # type: ignore[attr-defined]
    backend.close()
    assert [process.returncode for process in processes] == [0, 0]


def test_one_that_cannot_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """The R-worker's own line is on stderr, the backend raises, and the R-worker that did start ends."""
    backend = SpawnBackend([RWorkerSize(1 << 20, 1), RWorkerSize(1 << 60, 1)], 16)
    with pytest.raises(BackendError, match="R-worker spawn-1 is lost: its process exited with 1"):
        backend.open(contract.LAYOUT)
    assert "kv_cache_memory: 1073741824.00 GiB are more than" in capfd.readouterr().err


def test_each_has_its_cores() -> None:
    """The R-workers also say whether the S-worker keeps off their cores."""
    core = max(os.sched_getaffinity(0))
    backend = SpawnBackend([RWorkerSize(1 << 20, 1, (core,))], 16)
    (info,) = backend.open(contract.LAYOUT)
    assert os.sched_getaffinity(backend.workers[0].link.process.pid) == {core}  # type: ignore[attr-defined]
    assert not info.own_cores and info.name == "spawn-0"
    backend.close()


def test_the_ring_checks_its_memory() -> None:
    memory = np.zeros(Ring.NUM_BYTES + 64, np.uint8)
    start = -memory.ctypes.data % 64
    Ring(memory[start : start + Ring.NUM_BYTES])
    for bad in (memory[start : start + Ring.NUM_BYTES - 1], memory[start + 1 :]):
        with pytest.raises(ValueError, match="memory must be a writeable uint8 array"):
            Ring(bad)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="memory must be a writeable uint8 array"):
        Ring(memory[start : start + Ring.NUM_BYTES])
