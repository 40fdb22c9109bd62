"""Ctrl-C at any moment of a step abandons the step of a backend over processes, and the next step is right."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator

import pytest
from helpers import contract, r_workers

from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.tcp import TcpBackend

pytestmark = pytest.mark.slow

NUM_INTERRUPTS = 40
STEP = [([(1, 40, 1, 1), (2, 20, 1, 1)], [(3, 33, 1, 1)]), ([], [(5, 1, 1, 1)])]


@pytest.fixture(params=["spawn", "tcp"])
def backend(request: pytest.FixtureRequest) -> Iterator[PoolBackend]:
    with r_workers.listening() as (_, first), r_workers.listening() as (_, second):
        made = contract.spawn() if request.param == "spawn" else TcpBackend([first, second], contract.BLOCK_SIZE)
        made.open(contract.LAYOUT)
        yield made
        made.close()


def test_ctrl_c_at_any_moment(backend: PoolBackend) -> None:
    """The interrupt comes from another thread, since the test's time limit uses the process's alarm."""
    contract.run(backend, contract.FIRST)
    backend.begin_step(contract.plan(STEP))
    wanted = steps_outputs(backend)
    backend.abandon_step()
    moments, me = random.Random(0), threading.get_ident()
    for _ in range(NUM_INTERRUPTS):
        caught = threading.Event()
        presser = threading.Thread(target=press_until, args=(caught, me, 0.001 + moments.random() * 0.01), daemon=True)
        try:
            presser.start()
            while True:
                backend.begin_step(contract.plan(STEP))
                steps_outputs(backend)
                backend.abandon_step()
        except KeyboardInterrupt:
            caught.set()
        presser.join()
        backend.abandon_step()
    backend.begin_step(contract.plan(STEP))
    assert steps_outputs(backend) == wanted
    backend.end_step()


def press_until(caught: threading.Event, thread_id: int, delay: float) -> None:
    """Send Ctrl-C after ``delay`` seconds, and again where it was lost.

    Python drops exceptions that its collector's callbacks raise.
    """
    while not caught.wait(delay):
        signal.pthread_kill(thread_id, signal.SIGINT)
        delay = 5.0


def steps_outputs(backend: PoolBackend) -> list[bytes]:
    """Return o of every layer and mini-batch of STEP, with both mini-batches under way at once."""
    outputs = []
    for layer in range(len(contract.LAYERS)):
        for index in range(2):
            backend.submit(index, layer, *contract.rows(STEP[index], index, layer))
        outputs += [backend.collect(index).tobytes() for index in range(2)]
    return outputs
