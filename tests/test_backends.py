"""The contract of attention backends, on every one: the fake, threads, processes here, processes over TCP.

``FASTDECODE_TEST_BACKENDS`` names those to test: tests/test_mpi.py runs this file with "mpi" on a job's first rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from doubles.fake_backend import FakeBackend
from helpers import r_workers
from helpers.contract import (
    BLOCK_SIZE,
    FIRST,
    LAYERS,
    LAYOUT,
    SECOND,
    SECOND_CONTROLS,
    Spans,
    inproc,
    plan,
    rows,
    run,
    spawn,
    story,
)
from helpers.ranges import RangeDriver
from msgspec.structs import replace

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.mpi import MpiBackend
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import BackendError, CapacityError
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import StepPlan, Verb
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

BACKENDS = os.environ.get("FASTDECODE_TEST_BACKENDS", "fake,inproc,spawn,tcp").split(",")
Makers = dict[str, Callable[[], AttentionBackend]]


@pytest.fixture(scope="module")
def makers() -> Iterator[Makers]:
    """Yield functions that each make a backend of two workers.

    Backends over TCP are served by the same two processes, one after another.
    """
    with ExitStack() as processes:
        listening = [r_workers.listening() for _ in range(2 * ("tcp" in BACKENDS))]
        addresses = [processes.enter_context(each)[1] for each in listening]
        every: Makers = {
            "fake": lambda: FakeBackend(num_workers=2, block_size=BLOCK_SIZE),
            "inproc": inproc,
            "spawn": spawn,
            "tcp": lambda: TcpBackend(addresses, BLOCK_SIZE),
            "mpi": lambda: MpiBackend(BLOCK_SIZE),
        }
        yield {name: every[name] for name in BACKENDS}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, makers: Makers) -> Iterator[AttentionBackend]:
    """Yield an open backend."""
    made = makers[request.param]()
    made.open(LAYOUT)
    yield made
    made.close()


def test_every_backend_computes_the_same(backend: AttentionBackend) -> None:
    """Every backend is close to the slow oracle, and R-workers give the same bits wherever they run."""
    oracle, local = FakeBackend(num_workers=2), inproc()
    for each in (oracle, local):
        each.open(LAYOUT)
    mine, slow, threads = story(backend), story(oracle), story(local)
    for got, want, bits in zip(mine, slow, threads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert isinstance(backend, FakeBackend) or got.tobytes() == bits.tobytes()
    local.close()


def at_home(sequence_id: int, index: int) -> int:
    """Return the R-worker of a range."""
    return (sequence_id + index) % 2


def beside(sequence_id: int, index: int) -> int:
    """Return the other R-worker for a range."""
    return 1 - at_home(sequence_id, index)


@pytest.mark.parametrize("copy", [None, beside], ids=["one copy", "two copies"])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "fake"])
def test_a_sequence_over_both_has_the_bits_of_a_whole_one(
    name: str, copy: Callable[[int, int], int] | None, makers: Makers
) -> None:
    """Five ranges in turn, with a tail that fills and one that begins, have the bits of a whole sequence.

    Where every range has two copies, now one attends and now the other.
    """
    layout = KVLayout((LAYERS[0], replace(LAYERS[2], window=900)), "bfloat16", "float32")
    over_both = RangeDriver(makers[name](), layout, 512, at_home, copy)
    whole = RangeDriver(inproc(), layout)
    for driver in (over_both, whole):
        driver.fill(0, 2558)
        driver.fill(1, 20)
    for counts in ([{0: 1, 1: 1}], [{1: 1}, {0: 1}], [{0: 30}, {1: 2}], [{0: 1}]):
        mine, local = over_both.step(counts), whole.step(counts)
        for sequence_id, layers in mine.items():
            assert [o.tobytes() for o in layers] == [o.tobytes() for o in local[sequence_id]]
    over_both.backend.close()
    whole.backend.close()


def test_reports_are_on_this_clock(backend: AttentionBackend) -> None:
    """Times of work lie within the step on this process's clock, and free blocks are reported."""
    before = time.perf_counter()
    _, report = run(backend, FIRST)
    after = time.perf_counter()
    for worker, used in zip(report.workers, ([True, False, False], [True, False, True]), strict=True):
        assert worker.busy_start.shape == worker.busy_end.shape == (3, len(LAYERS))
        assert worker.transfer_seconds >= 0 and worker.bytes_read >= 0
        if not isinstance(backend, FakeBackend):
            assert (worker.busy_end > 0).tolist() == [[ran] * len(LAYERS) for ran in used]
            ran = worker.busy_end > 0
            assert before - 1.0 <= worker.busy_start[ran].min() and worker.busy_end.max() <= after + 1.0
            assert (worker.busy_start[ran] <= worker.busy_end[ran]).all()
    if isinstance(backend, FakeBackend):
        return
    free = run(backend, [([], [])], ([(Verb.RELEASE, 1, 0, 0), (Verb.RELEASE, 2, 0, 0)], []))[1]
    assert free.workers[0].blocks_free - report.workers[0].blocks_free == 3 + 2


@pytest.mark.parametrize("num_submitted", [0, 1, 2, 3])
def test_an_abandoned_step_leaves_nothing(backend: AttentionBackend, num_submitted: int) -> None:
    """Abandoning stops all work, but keeps the controls; abandoning again has no effect."""
    backend.abandon_step()
    run(backend, FIRST)
    backend.begin_step(plan(SECOND, SECOND_CONTROLS))
    for index in range(num_submitted):
        backend.submit(index, 0, *rows(SECOND[index], index, 0))
    backend.abandon_step()
    backend.abandon_step()
    again, _ = run(backend, SECOND)
    oracle = inproc()
    oracle.open(LAYOUT)
    run(oracle, FIRST)
    for got, want in zip(again, run(oracle, SECOND, SECOND_CONTROLS)[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    oracle.close()


def test_a_bad_plan_is_refused_and_the_next_is_not(backend: AttentionBackend) -> None:
    """The plan is wrong for the second worker only, when the first has begun already."""
    run(backend, FIRST)
    with pytest.raises(BackendError, match="sequence 5"):
        backend.begin_step(plan([([(1, 40, 1, 1)], [(5, 7, 1, 1)])]))
    run(backend, [([(1, 40, 1, 1)], [(5, 1, 1, 1)])])


def test_what_the_oracle_does_not_check(backend: AttentionBackend) -> None:
    """Unknown sequences, rows of another shape and a step that ends too soon are refused with the worker's name."""
    if isinstance(backend, FakeBackend):
        return
    run(backend, FIRST)
    name = backend.workers[1].name  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=f"{name} refused the step's plan: sequence 77 is unknown"):
        backend.begin_step(plan([([], [])], ([], [(Verb.RELEASE, 77, 0, 0)])))
    backend.begin_step(plan(SECOND, SECOND_CONTROLS))
    q, k, v = rows(SECOND[0], 0, 0)
    with pytest.raises((BackendError, ValueError), match=r"PAYLOAD|q must be"):
        backend.submit(0, 0, q[:, :, :4].copy(), k, v)
        backend.collect(0)
    backend.abandon_step()
    backend.begin_step(plan(SECOND))
    with pytest.raises(BackendError, match="layer 0 was never submitted"):
        backend.end_step()
    backend.abandon_step()
    run(backend, SECOND)


def test_sequences_travel(backend: AttentionBackend) -> None:
    """Sequences of several frames' size move from worker to worker, and to threads of this process and back."""
    run(backend, FIRST)
    data = backend.export(0, 1)
    assert data.dtype == np.uint8 and data.shape == (40 * LAYOUT.kv_bytes_per_token,)
    backend.import_(1, 11, 40, data)
    assert backend.export(1, 11).tobytes() == data.tobytes()
    local = inproc()
    local.open(LAYOUT)
    local.import_(0, 1, 40, data)
    local.import_(0, 8, 0, np.zeros(0, np.uint8))
    backend.import_(0, 8, 0, local.export(0, 8))
    assert local.export(0, 1).tobytes() == data.tobytes()
    local.close()
    backend.import_(1, 13, 32, backend.export(0, 1, 0, 32))
    backend.import_(1, 13, 8, backend.export(0, 1, 32, 8), 32)
    assert backend.export(1, 13).tobytes() == data.tobytes()
    with pytest.raises(BackendError, match="41 tokens from token 0 on; sequence 1 has 40"):
        backend.export(0, 1, 0, 41)
    with pytest.raises(BackendError, match="export: -1 tokens from token 0 on"):
        backend.export(0, 1, 0, -1)
    with pytest.raises(BackendError, match="start is 32, and sequence 13 has 40 tokens"):
        backend.import_(1, 13, 40, data, 32)
    with pytest.raises(BackendError, match=r"import.*tokens"):
        backend.import_(0, 12, 39, data)
    with pytest.raises(BackendError, match="sequence 99 is unknown"):
        backend.export(0, 99)
    with pytest.raises(BackendError, match="there is no R-worker 2; there are 2"):
        backend.export(2, 1)


def test_a_long_sequence_travels_in_pieces(backend: AttentionBackend) -> None:
    """A sequence that is larger than a frame and than a socket's buffer moves in pieces."""
    data = np.random.default_rng(0).integers(0, 256, 8000 * LAYOUT.kv_bytes_per_token, np.uint8)
    data.view(np.float32)[~np.isfinite(data.view(np.float32))] = 0
    backend.import_(1, 7, 8000, data)
    assert backend.export(1, 7).tobytes() == data.tobytes()
    run(backend, FIRST)


def test_close_twice_and_serve_the_next(makers: Makers, request: pytest.FixtureRequest) -> None:
    """A backend that is closed leaves its workers free for the next one."""
    for name, make in makers.items():
        for _ in range(2):
            backend = make()
            infos = backend.open(LAYOUT)
            assert len(infos) == 2 and len({info.name for info in infos}) == 2
            assert all(info.block_size == BLOCK_SIZE and info.num_blocks > 0 for info in infos)
            assert all((info.read_gb_per_s > 0) == (name not in ("fake", "inproc")) for info in infos)
            _, report = run(backend, FIRST)
            free = [info.num_blocks - worker.blocks_free for info, worker in zip(infos, report.workers, strict=True)]
            assert name == "fake" or free == [2 + 3, 3 + 1]
            backend.close()
            backend.close()


def test_too_little_memory_is_said(makers: Makers) -> None:
    """One block of this layout takes more memory than these tests' R-workers have."""
    large = KVLayout((Dense(64, 64, 512, 512, 1.0),) * 80, "float32", "float32")
    for name, make in makers.items():
        if name != "fake":
            with pytest.raises(CapacityError, match="holds not even one block of 16 tokens"):
                make().open(large)
            again = make()
            again.open(LAYOUT)
            again.close()


PROMPT = [([(2, 0, 20, 1), (1, 0, 40, 0)], ())]
DECODE = [([(1, 40, 1, 1), (2, 20, 1, 1)], ())]


def alone(own_cores: bool) -> InprocBackend:
    """Return a backend of one R-worker in this process.

    On the S-worker's cores the S-worker's thread attends in ``collect``.
    """
    backend = InprocBackend([RWorkerSize(1 << 24, 2)], BLOCK_SIZE, own_cores)
    backend.open(LAYOUT)
    return backend


def alone_plan(mini_batches: Sequence[tuple[Spans, Spans]]) -> StepPlan:
    return StepPlan(plan(mini_batches).workers[:1])


@pytest.mark.parametrize("own_cores", [False, True])
def test_on_shared_cores_the_caller_attends(own_cores: bool) -> None:
    """On shared cores a step's one mini-batch is attended only when it is collected; an abandoned layer is not."""
    backend = alone(own_cores)
    oracle = inproc()
    oracle.open(LAYOUT)
    for mini_batches in (PROMPT, DECODE):
        expected, _ = run(oracle, mini_batches)
        assert len(expected) == len(LAYERS)
        backend.begin_step(alone_plan(mini_batches))
        backend.submit(0, 0, *rows(mini_batches[0], 0, 0))
        backend.abandon_step()
        backend.begin_step(alone_plan(mini_batches))
        collecting = []
        for layer, o in enumerate(expected):
            backend.submit(0, layer, *rows(mini_batches[0], 0, layer))
            while own_cores and not backend.ready(0):
                time.sleep(0)
            assert backend.ready(0)
            collecting.append(time.perf_counter())
            assert backend.collect(0).tobytes() == o.tobytes()
        started = backend.end_step().workers[0].busy_start[0]
        assert ((started > collecting) == (not own_cores)).all()
    backend.close()
    oracle.close()


def test_two_mini_batches_are_attended_at_once() -> None:
    """Whichever cores there are, the caller works on the second mini-batch meanwhile."""
    backend = alone(own_cores=False)
    run_alone = [PROMPT[0], ([(3, 0, 33, 1)], ())]
    backend.begin_step(alone_plan(run_alone))
    backend.submit(0, 0, *rows(run_alone[0], 0, 0))
    while not backend.ready(0):
        time.sleep(0)
    asked = time.perf_counter()
    backend.submit(1, 0, *rows(run_alone[1], 1, 0))
    backend.collect(0)
    backend.collect(1)
    for layer in (1, 2):
        for index, mini_batch in enumerate(run_alone):
            backend.submit(index, layer, *rows(mini_batch, index, layer))
            backend.collect(index)
    assert backend.end_step().workers[0].busy_end[0, 0] < asked
    backend.close()
