"""Links over shared memory: control frames whose parts nobody reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastdecode.cluster.links.shared_memory import SharedMemoryLink, make_memory
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.cluster.wire.frames import Kind
from fastdecode.core.types import CONTROL, SPAN, SpanMode, StepPlan, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LARGE = bytes(1 << 22)
"""More bytes than the buffers of a socket pair hold."""

LAYOUT = KVLayout((Dense(1, 1, 256, 256, 0.1),), "float32", "float32")
NUM_TOKENS = 1000


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryLink, SharedMemoryLink]]:
    """Yield the S-worker's and the R-worker's end of a link."""
    mine, theirs = socket.socketpair()
    memory = make_memory()
    both = SharedMemoryLink(mine, memory, True), SharedMemoryLink(theirs, os.dup(memory), False)
    yield both
    for each in both:
        each.close()


@pytest.mark.parametrize("from_r_worker", [True, False])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_large_frame_that_is_not_read_holds_nobody_up(
    ends: tuple[SharedMemoryLink, SharedMemoryLink], from_r_worker: bool, num_parts: int
) -> None:
    """The sender of such a frame can send the next one, which arrives, with its part."""
    receiver, sender = ends if from_r_worker else reversed(ends)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, Kind.AUDITED, *[LARGE] * num_parts)
        following = pool.submit(sender.send, Kind.DATA, b"next")
        first = receiver.receive(30.0)
        second = receiver.receive(5.0)
        if second is None:  # free the sender, so that the test can end
            receiver.channel.close()
        else:
            sent.result()
            following.result()
    assert first and first.kind is Kind.AUDITED
    assert second and second.kind is Kind.DATA and receiver.body(second) == b"next"


def test_a_step_is_abandoned_whose_audit_has_a_large_answer() -> None:
    """The R-worker answers with all keys and values of the audited row, which the S-worker does not read any more."""
    backend = SpawnBackend([RWorkerSize(1 << 24, 1)], 16)
    backend.set_audit(1.0, 0)
    backend.open(LAYOUT)
    rows = np.random.default_rng(0).standard_normal((3, NUM_TOKENS + 1, 1, 256), dtype=np.float32)
    try:
        begin(backend, 0, NUM_TOKENS, SpanMode.APPEND)
        backend.submit(0, 0, rows[0, :0], *rows[1:, :NUM_TOKENS])
        backend.collect(0)
        backend.end_step()
        found = []
        for _ in range(2):
            backend.abandon_step()
            begin(backend, NUM_TOKENS, 1, SpanMode.ATTEND)
            backend.submit(0, 0, *rows[:, NUM_TOKENS:])
            found.append(backend.collect(0).tobytes())
        report = backend.end_step()
        assert found[0] == found[1] and (report.num_audited, report.lost, report.faulty) == (1, (), ())
    finally:
        backend.close()


def begin(backend: SpawnBackend, context_len: int, num_rows: int, mode: SpanMode) -> None:
    """Begin a step of one span."""
    spans = np.array([(1, context_len, num_rows, mode)], SPAN)
    backend.begin_step(StepPlan((WorkerPlan(np.array([], CONTROL), (spans,)),)))
