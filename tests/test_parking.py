"""R-workers park sequences and wake them byte for byte, also in another process, and refuse changed files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import r_workers
from helpers.processes import PATIENCE_SECONDS

from fastdecode import _rworker
from fastdecode.cluster.pool.backend import PoolBackend, PoolParks
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker.host import RWorkerSize, block_bytes, make_rworker
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.cluster.r_worker.parking.parker import Parker
from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.parked import (
    WAKE,
    decode_chains,
    decode_park,
    decode_parked,
    decode_parking,
    decode_wake,
    encode_chains,
    encode_park,
    encode_parked,
    encode_parking,
)
from fastdecode.core.errors import BackendError, FrameError
from fastdecode.core.parked import Chain, Parked, ParkPlace, Progress
from fastdecode.core.types import CONTROL, SPAN, StepPlan, Verb, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LAYOUT = KVLayout((Dense(4, 2, 8, 16, 0.3), Dense(4, 4, 16, 8, 0.3)), "float32", "int8")
NUM_BLOCKS, BLOCK_SIZE = 85, 16  # The blocks are two whole pieces of 512 tokens, and one of 336.
SIZE = RWorkerSize(1 << 20, 1)
HASHES = [number.to_bytes(16, "big") for number in range(1, 1 + NUM_BLOCKS)]
CHAIN = Chain.of(HASHES, BLOCK_SIZE)
Make = Callable[[], PoolBackend]


@pytest.fixture(params=["inproc", "spawn", "tcp"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that opens a backend of one R-worker that parks in ``tmp_path``, each in a new process."""
    place = ParkPlace(tmp_path, None, 0.0)
    with ExitStack() as stack:

        def one() -> PoolBackend:
            stack.pop_all().close()
            backend: PoolBackend
            if request.param == "tcp":
                _, address = stack.enter_context(r_workers.listening(*place.of(0).flags()))
                backend = TcpBackend([address], BLOCK_SIZE)
            elif request.param == "spawn":
                backend = SpawnBackend([SIZE], BLOCK_SIZE, park=place)
            else:
                backend = InprocBackend([SIZE], BLOCK_SIZE, park=place)
            stack.callback(backend.close)
            assert [info.park_after for info in backend.open(LAYOUT)] == [0.0]
            return backend

        yield one


def _fill(backend: PoolBackend, sequence_id: int, num_blocks: int = NUM_BLOCKS) -> bytes:
    """Fill a sequence with drawn numbers, and return its bytes."""
    num_tokens = num_blocks * BLOCK_SIZE
    plan = WorkerPlan(np.zeros(0, CONTROL), (np.array([(sequence_id, 0, num_tokens, 0)], SPAN),))
    backend.begin_step(StepPlan((plan,)))
    numbers = np.random.default_rng(sequence_id)
    for index, layer in enumerate(LAYOUT.layers):
        shapes = (
            (num_tokens, layer.num_kv_heads, layer.key_head_dim),
            (num_tokens, layer.num_kv_heads, layer.value_head_dim),
        )
        k, v = (numbers.standard_normal(shape, dtype=np.float32) for shape in shapes)
        backend.submit(0, index, np.zeros((0, layer.num_heads, layer.key_head_dim), np.float32), k, v)
        backend.collect(0)
    backend.end_step()
    return backend.export(0, sequence_id).tobytes()


def _release(backend: PoolBackend, sequence_id: int) -> None:
    controls = np.array([(Verb.RELEASE, sequence_id, 0, 0)], CONTROL)
    backend.begin_step(StepPlan((WorkerPlan(controls, (np.zeros(0, SPAN),)),)))
    backend.end_step()


def _ended(ask: Callable[[], Parked]) -> Parked:
    while (answer := ask()).progress is Progress.UNDER_WAY:
        pass
    return answer


def test_what_was_parked_wakes_byte_for_byte_in_another_process(make: Make, tmp_path: Path) -> None:
    backend = make()
    parks, data = PoolParks(backend), _fill(backend, 7)
    assert parks.chains(0, "model") == []
    parked = _ended(lambda: parks.park(0, 7, CHAIN))
    assert (parked.progress, parked.num_tokens) == (Progress.DONE, NUM_BLOCKS * BLOCK_SIZE)
    [path] = tmp_path.rglob("*.chain")
    assert path.stat().st_size == parked.num_bytes > len(data) and path.stat().st_mode & 0o777 == 0o600

    backend = make()
    parks = PoolParks(backend)
    assert parks.chains(0, "model") == [CHAIN] and parks.chains(0, "another") == []
    assert _ended(lambda: parks.wake(0, -1, NUM_BLOCKS, CHAIN.name)).progress is Progress.FAILED
    parks.chains(0, "model")
    for sequence_id, num_blocks in ((-1, NUM_BLOCKS), (-2, 32)):
        assert _ended(partial(parks.wake, 0, sequence_id, num_blocks, CHAIN.name)).progress is Progress.DONE
        length = len(data) // NUM_BLOCKS * num_blocks
        woken = backend.export(0, sequence_id)
        assert woken.nbytes == length and (num_blocks < NUM_BLOCKS or woken.tobytes() == data)
    # The position lies within a piece.
    assert _ended(lambda: parks.wake(0, -3, 33, CHAIN.name)).progress is Progress.FAILED
    assert _ended(lambda: parks.wake(0, -3, NUM_BLOCKS, HASHES[0])).progress is Progress.FAILED
    assert _ended(lambda: parks.park(0, 99, CHAIN)).progress is Progress.FAILED  # There is no such sequence.
    assert _fill(backend, 8, 2)  # The R-worker goes on.


def test_what_the_system_has_not_in_memory_is_fetched_by_the_thread_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk's thread fetches a piece while the one before is read, none twice, each before it is read."""
    fetched: list[int] = []
    fetch = ChainReader.fetch
    monkeypatch.setattr(ChainReader, "is_cached", lambda self, number: number == 1)
    monkeypatch.setattr(ChainReader, "fetch", lambda self, number: (fetch(self, number), fetched.append(number)))
    with contextlib.closing(InprocBackend([SIZE], BLOCK_SIZE, park=ParkPlace(tmp_path, None, 0.0))) as backend:
        backend.open(LAYOUT)
        parks, data = PoolParks(backend), _fill(backend, 7)
        parks.chains(0, "model")
        _ended(lambda: parks.park(0, 7, CHAIN))
        assert _ended(lambda: parks.wake(0, -1, NUM_BLOCKS, CHAIN.name)).progress is Progress.DONE
        assert backend.export(0, -1).tobytes() == data
    assert fetched == [0, 1, 2]


def test_an_idle_r_worker_commits_memory_for_parked_chains(tmp_path: Path) -> None:
    """A new R-worker that finds a chain on the disk commits an eighth of its cache, and one without chains nothing."""
    place = ParkPlace(tmp_path, None, 0.0)
    with contextlib.closing(InprocBackend([SIZE], BLOCK_SIZE, park=place)) as backend:
        backend.open(LAYOUT)
        parks, _ = PoolParks(backend), _fill(backend, 7)
        parks.chains(0, "model")
        assert _ended(lambda: parks.park(0, 7, CHAIN)).progress is Progress.DONE
    for number, num_parts in ((0, 8), (1, SIZE.kv_cache_bytes)):
        worker = make_rworker(LAYOUT, BLOCK_SIZE, SIZE)
        expected = worker.num_blocks // num_parts * worker.block_bytes
        with (
            contextlib.closing(worker),
            contextlib.closing(ParkDirectory(place.of(number))) as directory,
            contextlib.closing(Parker(worker, directory, LAYOUT)),
        ):
            _until(partial(_has_committed, worker, expected))


def _has_committed(worker: _rworker.RWorker, num_bytes: int) -> bool:
    return worker.statistics()["bytes_committed"] == num_bytes


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_file_that_was_changed_is_refused_and_removed(make: Make, tmp_path: Path) -> None:
    backend = make()
    parks = PoolParks(backend)
    _fill(backend, 7)
    parks.chains(0, "model")
    _ended(lambda: parks.park(0, 7, CHAIN))
    [path] = tmp_path.rglob("*.chain")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    answer = _ended(lambda: parks.wake(0, -1, NUM_BLOCKS, CHAIN.name))
    assert (answer.progress, answer.num_tokens, answer.num_bytes) == (Progress.FAILED, NUM_BLOCKS * BLOCK_SIZE, 0)
    _release(backend, -1)
    assert not path.exists()
    assert backend.blocks_used == NUM_BLOCKS


def test_what_is_superseded_or_too_much_goes(tmp_path: Path) -> None:
    place = ParkPlace(tmp_path, 2 * (40 * block_bytes(LAYOUT, BLOCK_SIZE) + 5000))
    backend = InprocBackend([SIZE], BLOCK_SIZE, park=place)
    backend.open(LAYOUT)
    parks = PoolParks(backend)
    _fill(backend, 7)
    parks.chains(0, "model")
    first, second, third = (Chain.of(HASHES[start : start + 40], BLOCK_SIZE) for start in (0, 10, 20))
    for chain in (first, second):
        assert _ended(partial(parks.park, 0, 7, chain)).dropped == ()
    assert parks.park(0, 7, third).dropped == (first.name,)
    assert parks.park(0, 7, third).progress is not Progress.FAILED
    _ended(lambda: parks.park(0, 7, third))
    assert parks.chains(0, "model") == [second, third]
    longer = Chain.of(HASHES[20 : 20 + 41], BLOCK_SIZE)
    _ended(lambda: parks.park(0, 7, longer, [third.name]))
    assert parks.chains(0, "model") == [second, longer]
    # The sequence has more bytes than the folder may ever hold.
    assert parks.park(0, 7, CHAIN).progress is Progress.FAILED
    parks.park(0, 7, third)
    backend.close()  # The backend closes while a transfer is under way.
    assert not list(tmp_path.rglob("*.part"))


def test_an_r_worker_without_a_disk_says_so() -> None:
    backend = InprocBackend([SIZE], BLOCK_SIZE)
    assert backend.open(LAYOUT)[0].park_after is None
    with pytest.raises(
        BackendError, match="R-worker inproc-0 refused to park a sequence: the R-worker has no disk to park on"
    ):
        PoolParks(backend).chains(0, "model")
    backend.close()


MESSAGES: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "PARKING": (encode_parking("model"), decode_parking),
    "PARK": (encode_park(2, 7, CHAIN, HASHES[:2]), lambda data: decode_park(data, BLOCK_SIZE)),
    "PARKED": (encode_parked(Parked(Progress.FAILED, 3, 4, tuple(HASHES[:2]))), decode_parked),
    "WAKE": (WAKE.pack(2, 7, 3, HASHES[0]), decode_wake),
    "CHAINS": (encode_chains([CHAIN, Chain.of(HASHES[:3], BLOCK_SIZE)]), lambda data: decode_chains(data, BLOCK_SIZE)),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_are_read_whole_or_refused(kind: str) -> None:
    """Messages are read back; beginnings of one and longer ones are refused, and other numbers are read or refused."""
    data, decode = MESSAGES[kind]
    said = {"PARKING": "model", "PARK": (2, 7, CHAIN, tuple(HASHES[:2]))}
    said |= {"WAKE": (2, 7, 3, HASHES[0]), "PARKED": Parked(Progress.FAILED, 3, 4, tuple(HASHES[:2]))}
    assert decode(data) == said.get(kind, [CHAIN, Chain.of(HASHES[:3], BLOCK_SIZE)])
    for wrong in (*(data[:end] for end in range(len(data))), data + b"x", data + bytes(16)):
        with pytest.raises(FrameError, match=kind):
            decode(wrong)
    for place in range(0, min(len(data), 32) if kind != "PARKING" else 0, 8):
        for number in (-1, 1 << 40, (1 << 63) - 1):
            with contextlib.suppress(FrameError):
                decode(data[:place] + number.to_bytes(8, "little", signed=True) + data[place + 8 :])


def test_frames_about_parking_that_an_r_worker_refuses(tmp_path: Path) -> None:
    """Frames before PARKING, of a wrong length, or for one without a disk are refused, and the session goes on."""
    for park in (ParkPlace(tmp_path, None, 0.0), None):
        backend = SpawnBackend([SIZE], BLOCK_SIZE, park=park)
        backend.open(LAYOUT)
        [worker] = backend.workers
        for kind, body, reason in (
            (Kind.WAKE, WAKE.pack(1, 1, 2, HASHES[0]), "has not said of which model" if park else "does not take"),
            (Kind.PARK, encode_park(1, 1, CHAIN, ()), "has not said of which model" if park else "does not take"),
            (Kind.WAKE, b"x", "WAKE: 1 bytes" if park else "does not take"),
            (Kind.WAKE, WAKE.pack(1001, 1, 2, HASHES[0]), "a time limit of 1001 ms" if park else "does not take"),
            (Kind.CHAINS, b"", "does not take"),
        ):
            with pytest.raises((ValueError, BackendError), match=reason):
                worker.calls.ask(kind, body, Kind.PARKED, decode_parked)
        assert len(_fill(backend, 3, 2)) > 0
        backend.close()
