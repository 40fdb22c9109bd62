"""KV ports: rows that prefill workers store equal those that steps append, whatever else happens meanwhile."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from doubles.fake_backend import FakeBackend
from helpers import contract, r_workers
from helpers.processes import PATIENCE_SECONDS
from helpers.sessions import frame, make_key

from fastdecode.cluster.links.port import Port, Reader
from fastdecode.cluster.links.zeromq import ZmqChannel
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.mpi import MpiBackend
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.prefill.kv_feed import KvFeed, Stored
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.cluster.r_worker.kv_port import NICENESS
from fastdecode.cluster.wire.frames import Conversation, Frame, Kind
from fastdecode.cluster.wire.handshake import Security, read_security
from fastdecode.cluster.wire.messages import KV_ROWS, MOST_IN_FLIGHT, decode_refusal
from fastdecode.core.dtypes import KV_BITS, to_wire
from fastdecode.core.errors import BackendError
from fastdecode.core.types import CONTROL, SPAN, RWorkerInfo, StepPlan, Verb, WorkerPlan
from fastdecode.kinds.layout import KVLayout

LENGTH, JOB = 70, 7
LAYOUT = replace(contract.LAYOUT, kv_port="loopback")
ALL_DTYPES = [(model, kv) for model in ("float32", "float16", "bfloat16") for kv in KV_BITS]
KINDS = os.environ.get("FASTDECODE_TEST_BACKENDS", "inproc,spawn,tcp").split(",")
CASES = [
    (kind, *dtypes)
    for kind in KINDS
    for dtypes in (ALL_DTYPES if kind == "inproc" else [("float32", "float32"), ("bfloat16", "int4")])
]


def inproc(**options: Any) -> InprocBackend:
    """Return a backend of one R-worker with one thread."""
    return InprocBackend([RWorkerSize(1 << 24, 1)], contract.BLOCK_SIZE, **options)


@pytest.fixture(scope="module")
def makers() -> Iterator[dict[str, Callable[[], PoolBackend]]]:
    """Yield functions that each make a backend, whose first R-worker is used."""
    with ExitStack() as processes:
        addresses = [processes.enter_context(r_workers.listening())[1]] if "tcp" in KINDS else []
        yield {
            "inproc": inproc,
            "spawn": lambda: SpawnBackend([RWorkerSize(1 << 24, 1)], contract.BLOCK_SIZE),
            "tcp": lambda: TcpBackend(addresses, contract.BLOCK_SIZE),
            "mpi": lambda: MpiBackend(contract.BLOCK_SIZE),
        }


def rows(dtype: str, layer: int, start: int, end: int) -> tuple[np.ndarray, ...]:
    """Return q, k and v of tokens of the one prompt, as on the wire."""
    every = contract.rows(([(1, 0, end, 1)], []), 0, layer)
    return tuple(to_wire(np.ascontiguousarray(part[start:]), dtype) for part in every)


def step(backend: PoolBackend, dtype: str, spans: contract.Spans, controls: contract.Spans = ()) -> None:
    """Run a step on the first R-worker, with at most one span, whose rows are the prompt's."""
    parts = WorkerPlan(np.array(list(controls), CONTROL), (np.array(list(spans), SPAN),))
    rest = WorkerPlan(np.array([], CONTROL), (np.array([], SPAN),))
    backend.begin_step(StepPlan((parts, *(rest for _ in backend.workers[1:]))))
    for layer in range(len(contract.LAYERS) if spans else 0):
        _, start, count, attends = spans[0]
        q, k, v = rows(dtype, layer, start, start + count)
        backend.submit(0, layer, q if attends else q[:0], k, v)
        backend.collect(0)
    backend.end_step()


def answers(feed: KvFeed, count: int) -> list[Stored]:
    """Return ``count`` outcomes of the feed."""
    found: list[Stored] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count and time.monotonic() < deadline:
        found += feed.poll(0.1)
    assert len(found) == count
    return found


def store(feed: KvFeed, job_id: int, dtype: str, pieces: Sequence[tuple[int, int]]) -> None:
    """Send these rows of every layer, the last layer first, and wait for all answers."""
    for layer in range(len(contract.LAYERS)):
        for start, end in reversed(pieces):
            feed.store(job_id, layer, start, *rows(dtype, layer, start, end)[1:])
    assert not any(stored.refusal for stored in answers(feed, len(contract.LAYERS) * len(pieces)))


@pytest.fixture
def open_one() -> Iterator[Callable[..., tuple[PoolBackend, RWorkerInfo]]]:
    """Yield a function that opens an R-worker in this process with a KV port, and returns its description too."""
    with ExitStack() as opened:

        def make(layout: KVLayout = LAYOUT, **options: Any) -> tuple[PoolBackend, RWorkerInfo]:
            backend = inproc(**options)
            opened.callback(backend.close)
            return backend, backend.open(layout)[0]

        yield make


def feed_of(info: RWorkerInfo, opened: ExitStack, security: Security | None = None) -> KvFeed:
    (port,) = info.kv_ports
    feed = KvFeed(port.address, port.epoch, security or Security())
    opened.callback(feed.close)
    return feed


@pytest.mark.parametrize(("kind", "model_dtype", "kv_dtype"), CASES)
def test_stored_rows_are_appended_rows(
    makers: dict[str, Callable[[], PoolBackend]], kind: str, model_dtype: str, kv_dtype: str
) -> None:
    """Two feeds store a prompt and one after a prefix hit, in pieces that cut tiles, while another sequence decodes."""
    with ExitStack() as opened:
        backend = makers[kind]()
        opened.callback(backend.close)
        info = backend.open(replace(LAYOUT, model_dtype=model_dtype, kv_dtype=kv_dtype))[0]
        one, other, reader = (feed_of(info, opened) for _ in range(3))
        step(backend, model_dtype, [(1, 0, LENGTH, 0)])
        step(backend, model_dtype, [(9, 0, 3, 1)], [(Verb.FORK, 3, 1, 21), (Verb.RESERVE, 3, 8, LENGTH)])
        step(backend, model_dtype, [(9, 3, 1, 1)], [(Verb.RESERVE, 2, JOB, LENGTH)])
        check_prefixes(reader, backend.export(0, 1, 0, 21), kv_dtype)
        for layer in range(len(contract.LAYERS)):
            for feed, job_id, start, end in ((one, 7, 33, 70), (one, 8, 21, 40), (other, 8, 40, 70), (other, 7, 0, 33)):
                feed.store(job_id, layer, start, *rows(model_dtype, layer, start, end)[1:])
            step(backend, model_dtype, [(9, 4 + layer, 1, 1)])
        for feed in (one, other):
            assert {stored.refusal for stored in answers(feed, 2 * len(contract.LAYERS))} == {""}
        step(backend, model_dtype, [], [(Verb.COMMIT, 2, JOB, LENGTH), (Verb.COMMIT, 3, 8, LENGTH)])
        appended = backend.export(0, 1)
        for sequence_id in (2, 3):
            assert backend.export(0, sequence_id).tobytes() == appended.tobytes()
        step(backend, model_dtype, [(2, LENGTH, 1, 1)], [(Verb.RELEASE, each, 0, 0) for each in (1, 3, 9)])
        step(backend, model_dtype, [], [(Verb.RELEASE, 2, 0, 0)])
        assert backend.blocks_used == 0


def stored_bytes(layer: int, kv_dtype: str = "float32") -> int:
    """Return the bytes of one token in a layer's cache."""
    return LAYOUT.layers[layer].token_bytes(kv_dtype)


def check_prefixes(feed: KvFeed, exported: np.ndarray, kv_dtype: str) -> None:
    """Check that the 21 cached tokens of job 8 are read as ``exported``, in the form in which they are stored."""
    found = []
    for layer in range(len(contract.LAYERS)):
        stored = np.empty((21, stored_bytes(layer, kv_dtype)), np.uint8)
        feed.read(8, layer, 0, stored[:5])
        feed.read(8, layer, 5, stored[5:])
        found.append(stored)
    assert {each.refusal for each in answers(feed, 2 * len(found))} == {""}
    assert b"".join(each.tobytes() for each in found) == exported.tobytes()


def test_what_is_no_prefix_is_not_read(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """Each refusal has its reason, and prefixes are read also while the rows after them come."""
    backend, info = open_one()
    four, many = (np.empty((count, stored_bytes(0)), np.uint8) for count in (4, 9000))
    reads = [
        (99, 0, 0, four, "job 99 is unknown"),
        (8, 3, 0, four, "layer is 3; there are 3"),
        (8, 0, 18, four, "4 rows from 18 on; those of tokens [0, 21) were there before"),
        (8, 0, -1, four, "4 rows from -1 on"),
        (8, 0, 1 << 62, four, "rows from 4611686018427387904 on"),
        (JOB, 0, 0, four, "those of tokens [0, 0) were there before"),
        (8, 0, 0, many, "rows from"),
        (8, 0, 17, four, ""),
    ]
    with ExitStack() as opened:
        feed = feed_of(info, opened)
        step(backend, "float32", [(1, 0, LENGTH, 0)])
        forked = [(Verb.FORK, 3, 1, 21), (Verb.RESERVE, 3, 8, LENGTH), (Verb.RESERVE, 2, JOB, LENGTH)]
        step(backend, "float32", [], forked)
        for token, (*asked, _) in enumerate(reads, 21):
            feed.read(*asked)
            feed.store(8, 0, token, *rows("float32", 0, token, token + 1)[1:])
        found = [each for each in answers(feed, 2 * len(reads)) if each.num_rows != 1]
        for read, (*_, reason) in zip(found, reads, strict=True):
            assert bool(read.refusal) == bool(reason)
            assert reason in read.refusal
        wanted = [each.reshape(4, -1) for each in rows("float32", 0, 17, 21)[1:]]
        np.testing.assert_array_equal(four.view(np.float32), np.concatenate(wanted, axis=1))
        step(backend, "float32", [], [(Verb.RELEASE, 3, 0, 0)])
        feed.read(8, 0, 0, four)
        assert "job 8 is unknown" in answers(feed, 1)[0].refusal


@pytest.mark.parametrize("how", ["other rows", "other layer", "other lengths", "STORED"])
def test_an_answer_to_another_question_ends_the_feed(how: str) -> None:
    """No part of such an answer is taken for the rows that were asked for."""
    sent = np.full((4, stored_bytes(0)), 7, np.uint8)

    def answer(port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        job_id, start, count = reader.record(KV_ROWS)
        kind = Kind.STORED if how == "STORED" else Kind.KV
        part = sent[:3] if how == "other lengths" else sent
        record = KV_ROWS.pack(job_id, start + (how == "other rows"), count)
        port.send(identity, kind, record, part, layer=frame.layer + (how == "other layer"))

    port = Port("127.0.0.1", 0, Security(), answer)
    into = np.zeros_like(sent)
    with ExitStack() as opened:
        opened.callback(port.close)
        feed = KvFeed(port.address, port.epoch, Security())
        opened.callback(feed.close)
        feed.read(8, 0, 0, into)
        with pytest.raises(ConnectionError, match=r"a \w+ frame "):
            answers(feed, 1)
    assert not into.any()


def test_what_is_no_peer_and_does_not_wait_for_an_answer_ends_no_port() -> None:
    """A peer that speaks ZeroMQ's first protocol, says nothing and goes, a few times, ends no port."""

    def answer(port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        port.send(identity, Kind.PONG)

    with ExitStack() as opened:
        port = Port("127.0.0.1", 0, Security(), answer)
        opened.callback(port.close)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port.tcp_port)) as stranger:
                stranger.sendall(b"\x01\x00" * 9)
        channel = ZmqChannel(port.address, None)
        opened.callback(channel.close)
        conversation = Conversation(channel)
        conversation.epoch = port.epoch
        conversation.send(Kind.PING)
        answered = conversation.receive(PATIENCE_SECONDS)
    assert answered and answered.kind is Kind.PONG


def test_the_fake_backend_knows_jobs() -> None:
    """Stored rows equal appended rows, and a commit before the last row is refused."""
    fake = FakeBackend(block_size=contract.BLOCK_SIZE)
    fake.open(contract.LAYOUT)
    nothing = np.array([], SPAN)

    def control(*records: tuple[int, int, int, int]) -> None:
        fake.begin_step(StepPlan((WorkerPlan(np.array(list(records), CONTROL), (nothing,)),)))
        fake.end_step()

    control((Verb.RESERVE, 2, JOB, LENGTH))
    for layer in (0, 1, 2):
        for start, end in ((33, LENGTH), (0, 33)):
            fake.store(JOB, layer, start, *rows("float32", layer, start, end)[1:])
            if (layer, start) == (2, 33):
                with pytest.raises(BackendError, match="33 rows are missing"):
                    copy.deepcopy(fake)._apply(Verb.COMMIT, 2, JOB, LENGTH)
    control((Verb.COMMIT, 2, JOB, LENGTH))
    local = inproc()
    local.open(contract.LAYOUT)
    step(local, "float32", [(2, 0, LENGTH, 0)])
    assert fake.export(0, 2).tobytes() == local.export(0, 2).tobytes()
    local.close()


def test_no_port_opens_where_none_is_asked_for() -> None:
    backend = inproc()
    info = backend.open(contract.LAYOUT)[0]
    backend.close()
    assert info.kv_ports == ()


def test_commit_needs_every_row(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """A commit without one row of one layer is refused, and the refused plan changes nothing."""
    backend, info = open_one()
    with ExitStack() as opened:
        feed = feed_of(info, opened)
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
        store(feed, JOB, "float32", [(1, 30), (30, LENGTH)])
        with pytest.raises(BackendError, match="commit: sequence 1: 3 of its layers' rows did not come yet"):
            step(backend, "float32", [(5, 0, 3, 1)], [(Verb.RESERVE, 2, 9, 16), (Verb.COMMIT, 1, JOB, LENGTH)])
        store(feed, JOB, "float32", [(0, 1)])
        step(backend, "float32", [(5, 0, 3, 1)], [(Verb.COMMIT, 1, JOB, LENGTH)])
        assert backend.blocks_used == -(-LENGTH // contract.BLOCK_SIZE) + 1


def test_rows_that_do_not_belong_here_are_refused(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """Each refusal has its reason, and rows beside the refused ones are stored."""
    backend, info = open_one()
    k, v = (part[:4] for part in rows("float32", 0, 0, 4)[1:])
    stores = [
        (99, 0, 0, k, v, "job 99 is unknown"),
        (8, 0, 0, k, v, "job 8 is unknown"),
        (JOB, 3, 0, k, v, "layer is 3; there are 3"),
        (JOB, 0, 38, k, v, "4 rows from 38 on"),
        (JOB, 0, -1, k, v, "4 rows from -1 on"),
        (JOB, 0, 1 << 62, k, v, "rows from 4611686018427387904 on"),
        (JOB, 0, 0, k[:, :1].copy(), v, "has 128 bytes, not 256"),
        (JOB, 0, 0, k, v[:, :, :3].copy(), "has 96 bytes, not 512"),
        (JOB, 0, 0, k.astype(np.float64), v, "has 512 bytes, not 256"),
        (JOB, 0, 0, k, v, ""),
        (JOB, 0, 3, k, v, "rows [3, 7) of layer 0 came before"),
    ]
    with ExitStack() as opened:
        feed = feed_of(info, opened)
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, 40), (Verb.RESERVE, 2, 8, 40)])
        step(backend, "float32", [], [(Verb.RELEASE, 2, 0, 0)])
        for *asked, _ in stores:
            feed.store(*asked)
        for stored, (*_, reason) in zip(answers(feed, len(stores)), stores, strict=True):
            assert bool(stored.refusal) == bool(reason)
            assert reason in stored.refusal
        with pytest.raises(ValueError, match="C-contiguous"):
            feed.store(JOB, 0, 4, k[:, :, ::2], v)


def test_a_release_ends_stores(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """A release at any moment ends the stores: no block of another sequence is written, and none is lost."""
    backend, info = open_one()
    k, v = (np.full((300, 2, dim), 7, np.float32) for dim in (8, 16))
    with ExitStack() as opened:
        feed = feed_of(info, opened)
        for job_id in range(40):
            step(backend, "float32", [], [(Verb.RESERVE, 1, job_id, 300)])
            for start in range(0, 300, 20):
                feed.store(job_id, 0, start, k[start : start + 20], v[start : start + 20])
            feed.poll(0.0005 * (job_id % 5))
            step(backend, "float32", [(2, 0, LENGTH, 0)], [(Verb.RELEASE, 1, 0, 0)])
            before = backend.export(0, 2).tobytes()
            while feed.num_in_flight:
                feed.poll(0.01)
            assert backend.export(0, 2).tobytes() == before
            step(backend, "float32", [], [(Verb.RELEASE, 2, 0, 0)])
        assert backend.blocks_used == 0


HOW = ["epoch", "zero epoch", "replayed", "kind", "truncated", "no parts", "garbage"]


@pytest.mark.parametrize("how", [*HOW, "read: truncated", "read: too many", "read: payload", "read: no rows"])
def test_malformed_frames(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]], how: str) -> None:
    """Malformed frames are refused without naming the epoch, and a proper feed is served as before."""
    backend, info = open_one()
    step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
    k, v = (part.tobytes() for part in rows("float32", 0, 0, 4)[1:])
    record = KV_ROWS.pack(JOB, 0, 4)
    good = frame(Kind.KV, record, k, v, epoch=info.kv_ports[0].epoch)
    messages = {
        "epoch": [frame(Kind.KV, record, k, v, epoch=info.kv_ports[0].epoch ^ 1)],
        "zero epoch": [frame(Kind.KV, record, k, v)],
        "replayed": [good, good],
        "kind": [frame(Kind.PLAN, record, epoch=info.kv_ports[0].epoch)],
        "truncated": [frame(Kind.KV, record[:-1], k, v, epoch=info.kv_ports[0].epoch)],
        "no parts": [[good[0]]],
        "garbage": [[b"GET / HTTP/1.1"]],
        "read: truncated": [frame(Kind.READ, record[:-1], epoch=info.kv_ports[0].epoch)],
        "read: too many": [frame(Kind.READ, KV_ROWS.pack(JOB, 0, 1 << 40), epoch=info.kv_ports[0].epoch)],
        "read: payload": [frame(Kind.READ, record, k, v, epoch=info.kv_ports[0].epoch)],
        "read: no rows": [frame(Kind.READ, KV_ROWS.pack(JOB, 0, 0), epoch=info.kv_ports[0].epoch)],
    }
    with ExitStack() as opened:
        channel = ZmqChannel(info.kv_ports[0].address, None)
        opened.callback(channel.close)
        for message in messages[how]:
            channel.send(message)
            header = channel.receive(PATIENCE_SECONDS)
        assert header is not None
        body = bytearray(int.from_bytes(header[32:40], "little"))
        channel.read_into(body)
        error, reason = decode_refusal(body)
        assert error == "frame" and reason
        if how in ("epoch", "zero epoch", "garbage"):
            assert info.kv_ports[0].epoch.to_bytes(8, "little") not in header + bytes(body)
        feed = feed_of(info, opened)
        store(feed, JOB, "float32", [(4, LENGTH)])


def test_a_wrong_epoch_is_a_lost_connection(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """The epoch is that of a session that has ended."""
    _, info = open_one()
    (port,) = info.kv_ports
    with ExitStack() as opened:
        feed = feed_of(replace(info, kv_ports=(replace(port, epoch=port.epoch ^ 2),)), opened)
        feed.store(JOB, 0, 0, *rows("float32", 0, 0, 4)[1:])
        with pytest.raises(ConnectionError, match="another session"):
            answers(feed, 1)


@pytest.mark.parametrize("level", ["encrypt", "authenticate"])
def test_only_holders_of_the_key_are_let_in(
    open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]], key_file: Path, tmp_path: Path, level: str
) -> None:
    """A peer without the key is refused though it knows the epoch."""
    security = read_security(str(key_file), level)
    backend, info = open_one(security=security)
    step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
    stranger = read_security(str(make_key(tmp_path / "other", "y" * 40)), level)
    with ExitStack() as opened:
        for wrong in (stranger, Security()):
            with pytest.raises((BackendError, ConnectionError), match=r"key|prove|another session"):
                feed = feed_of(info, opened, wrong)
                feed.store(JOB, 0, 0, *rows("float32", 0, 0, 4)[1:])
                answers(feed, 1)
        store(feed_of(info, opened, security), JOB, "float32", [(0, LENGTH)])
        step(backend, "float32", [(1, LENGTH, 1, 1)], [(Verb.COMMIT, 1, JOB, LENGTH)])


def test_beyond_this_machine_it_takes_a_key(
    open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]], key_file: Path
) -> None:
    everywhere = replace(LAYOUT, kv_port="any")
    with pytest.raises(ValueError, match="takes a --key-file"):
        open_one(everywhere)
    security = read_security(str(key_file), "authenticate")
    backend, info = open_one(everywhere, security=security)
    with ExitStack() as opened:
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
        store(feed_of(info, opened, security), JOB, "float32", [(0, LENGTH)])


def test_its_thread_stands_back(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """The port's thread has a lower priority than those that attend.

    A port in use raises an error here, not in the thread.
    """
    _, info = open_one()
    (thread,) = (each for each in threading.enumerate() if each.name == "port")
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == min(mine + NICENESS, 19)
    with pytest.raises(OSError, match="in use"):
        Port("127.0.0.1", int(info.kv_ports[0].address.rpartition(":")[2]), Security(), lambda *_: None)
    assert [each for each in threading.enumerate() if each.name == "port"] == [thread]


@pytest.mark.skipif("tcp" not in KINDS, reason="of R-workers that listen")
def test_a_port_is_open_no_further_than_its_r_worker(makers: dict[str, Callable[[], PoolBackend]]) -> None:
    """An R-worker on loopback opens its KV port there only, without a key, though any address was asked for."""
    backend = makers["tcp"]()
    info = backend.open(replace(LAYOUT, kv_port="any"))[0]
    with ExitStack() as opened:
        opened.callback(backend.close)
        (port,) = info.kv_ports
        assert port.address.startswith("127.0.0.1:") and str(port.epoch) not in repr(info)
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
        store(feed_of(info, opened), JOB, "float32", [(0, LENGTH)])
        listening = {f"127.0.0.1:{port}" for port in _listening_ports()}
        assert port.address in listening


def _listening_ports() -> set[int]:
    """Return the TCP ports that are open on 127.0.0.1 and nowhere else."""
    found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    beyond = {each.laddr.port for each in found if each.laddr.ip != "127.0.0.1"}
    return {each.laddr.port for each in found} - beyond


def test_a_killed_r_worker_is_noticed() -> None:
    """A kill while frames are under way is noticed at once, and not before."""
    with ExitStack() as opened:
        process, address = opened.enter_context(r_workers.listening())
        backend = TcpBackend([address], contract.BLOCK_SIZE)
        opened.callback(backend.close)
        info = backend.open(LAYOUT)[0]
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
        feed = feed_of(info, opened)
        store(feed, JOB, "float32", [(0, LENGTH)])
        process.kill()
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                feed.store(JOB, 0, 0, *rows("float32", 0, 0, LENGTH)[1:])
                feed.poll(0.01)


def test_a_stopped_port_bounds_what_is_in_flight(open_one: Callable[..., tuple[PoolBackend, RWorkerInfo]]) -> None:
    """The feed waits when its limit of bytes is reached."""
    backend, info = open_one()
    with ExitStack() as opened:
        feed = feed_of(info, opened)
        step(backend, "float32", [], [(Verb.RESERVE, 1, JOB, LENGTH)])
        for _ in range(4 * MOST_IN_FLIGHT):
            feed.store(JOB, 0, 0, *rows("float32", 0, 0, LENGTH)[1:])
            assert feed.num_in_flight <= MOST_IN_FLIGHT
        assert sum(not stored.refusal for stored in answers(feed, 4 * MOST_IN_FLIGHT)) == 1
