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
import r_workers
from doubles.fake_backend import FakeBackend

from fastdecode.cluster.links.mpi_link import MpiBackend
from fastdecode.cluster.links.spawn import SpawnBackend
from fastdecode.cluster.links.tcp import TcpBackend
from fastdecode.cluster.pool import InprocBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.errors import BackendError, CapacityError
from fastdecode.protocols import AttentionBackend
from fastdecode.types import CONTROL, SPAN, KVLayout, LayerLayout, StepPlan, StepReport, Verb, WorkerPlan

LAYERS = (
    LayerLayout(4, 2, 8, 16, 0.3),
    LayerLayout(4, 4, 16, 8, 0.3, window=9),
    LayerLayout(4, 2, 8, 16, 0.3, soft_cap=2.0, sinks=(0.5, -0.5, 0.0, 1.0)),
)
LAYOUT = KVLayout(LAYERS, "float32", "float32")
BLOCK_SIZE = 16
BACKENDS = os.environ.get("FASTDECODE_TEST_BACKENDS", "fake,inproc,spawn,tcp").split(",")
Spans = Sequence[tuple[int, int, int, int]]
Makers = dict[str, Callable[[], AttentionBackend]]


def inproc() -> InprocBackend:
    return InprocBackend([RWorkerSize(1 << 24, 1)] * 2, BLOCK_SIZE)


def spawn() -> SpawnBackend:
    return SpawnBackend([RWorkerSize(1 << 24, 1)] * 2, BLOCK_SIZE)


@pytest.fixture(scope="module")
def makers() -> Iterator[Makers]:
    """Each makes a backend of two workers; those over TCP are served by the same two processes, one after another."""
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
    """One that is open."""
    made = makers[request.param]()
    made.open(LAYOUT)
    yield made
    made.close()


def plan(mini_batches: Sequence[tuple[Spans, Spans]], controls: tuple[Spans, Spans] = ((), ())) -> StepPlan:
    """The spans of both workers in each mini-batch, and the controls of both."""
    return StepPlan(
        tuple(
            WorkerPlan(
                np.array(list(controls[worker]), CONTROL),
                tuple(np.array(list(spans[worker]), SPAN) for spans in mini_batches),
            )
            for worker in range(2)
        )
    )


def rows(mini_batch: tuple[Spans, Spans], index: int, layer: int) -> tuple[np.ndarray, ...]:
    """q, k, v that depend on the sequence, the position and the layer only."""
    parts: list[list[np.ndarray]] = [[], [], []]
    spec = LAYERS[layer]
    shapes = (4, spec.key_head_dim), (spec.num_kv_heads, spec.key_head_dim), (spec.num_kv_heads, spec.value_head_dim)
    for sequence_id, start, count, attends in (*mini_batch[0], *mini_batch[1]):
        for part, shape in enumerate(shapes):
            draw = np.random.default_rng((sequence_id, layer, part)).standard_normal((200, *shape), dtype=np.float32)
            parts[part].append(draw[start : start + count * (attends if part == 0 else 1)])
    return tuple(np.concatenate(part) for part in parts)


def run(
    backend: AttentionBackend, mini_batches: Sequence[tuple[Spans, Spans]], controls: tuple[Spans, Spans] = ((), ())
) -> tuple[list[np.ndarray], StepReport]:
    """A whole step, mini-batches interleaved layer by layer and collected last first; every o in order."""
    backend.begin_step(plan(mini_batches, controls))
    outputs = []
    used = [index for index, spans in enumerate(mini_batches) if spans[0] or spans[1]]
    for layer in range(len(LAYERS)):
        for index in used:
            backend.submit(index, layer, *rows(mini_batches[index], index, layer))
        outputs += [backend.collect(index).copy() for index in reversed(used)]
    return outputs, backend.end_step()


FIRST = [([(2, 0, 20, 1), (1, 0, 40, 0)], [(3, 0, 33, 1)]), ([], []), ([], [(5, 0, 1, 1)])]
SECOND = [([(1, 40, 1, 1), (2, 20, 1, 1)], [(3, 33, 1, 1)]), ([(4, 32, 1, 1)], []), ([], [(5, 1, 30, 1)])]
SECOND_CONTROLS = ([(Verb.FORK, 4, 1, 32)], [])
THIRD = [([(1, 41, 1, 1), (2, 10, 7, 1)], []), ([(4, 33, 1, 1)], [(5, 31, 1, 1)])]
THIRD_CONTROLS = ([(Verb.TRUNCATE, 2, 0, 10)], [(Verb.RELEASE, 3, 0, 0)])


def story(backend: AttentionBackend) -> list[np.ndarray]:
    """Prompts that attend and that do not, decodes, a fork, a truncation, a release, empty mini-batches."""
    steps = (FIRST, ((), ())), (SECOND, SECOND_CONTROLS), (THIRD, THIRD_CONTROLS)
    return [o for mini_batches, controls in steps for o in run(backend, mini_batches, controls)[0]]


def test_every_backend_computes_the_same(backend: AttentionBackend) -> None:
    """As the slow oracle does, nearly; and the bits of R-workers are the same wherever they are."""
    oracle, local = FakeBackend(num_workers=2), inproc()
    for each in (oracle, local):
        each.open(LAYOUT)
    mine, slow, threads = story(backend), story(oracle), story(local)
    for got, want, bits in zip(mine, slow, threads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert isinstance(backend, FakeBackend) or got.tobytes() == bits.tobytes()
    local.close()


def test_reports_are_on_this_clock(backend: AttentionBackend) -> None:
    """Busy within the step, where there were rows, and nowhere else; the blocks that are free."""
    before = time.perf_counter()
    _, report = run(backend, FIRST)
    after = time.perf_counter()
    for worker, used in zip(report.workers, ([True, False, False], [True, False, True]), strict=True):
        assert worker.busy_start.shape == worker.busy_end.shape == (3, len(LAYERS))
        assert worker.transfer_seconds >= 0 and worker.bytes_read >= 0
        if not isinstance(backend, FakeBackend):
            assert (worker.busy_end > 0).tolist() == [[ran] * len(LAYERS) for ran in used]
            ran = worker.busy_end > 0
            assert before - 0.05 <= worker.busy_start[ran].min() and worker.busy_end.max() <= after + 0.05
            assert (worker.busy_start[ran] <= worker.busy_end[ran]).all()
    if isinstance(backend, FakeBackend):
        return
    free = run(backend, [([], [])], ([(Verb.RELEASE, 1, 0, 0), (Verb.RELEASE, 2, 0, 0)], []))[1]
    assert free.workers[0].blocks_free - report.workers[0].blocks_free == 3 + 2


@pytest.mark.parametrize("num_submitted", [0, 1, 2, 3])
def test_an_abandoned_step_leaves_nothing(backend: AttentionBackend, num_submitted: int) -> None:
    """Whatever was under way; the controls stay. Abandoning again has no effect."""
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
    """On the second worker: the first had begun already."""
    run(backend, FIRST)
    with pytest.raises(BackendError, match="sequence 5"):
        backend.begin_step(plan([([(1, 40, 1, 1)], [(5, 7, 1, 1)])]))
    run(backend, [([(1, 40, 1, 1)], [(5, 1, 1, 1)])])


def test_what_the_oracle_does_not_check(backend: AttentionBackend) -> None:
    """Unknown sequences, rows of another shape, a step that ends too soon: refused with the worker's name."""
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
    """From worker to worker, and to threads of this process and back; several frames' worth of bytes."""
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
    with pytest.raises(BackendError, match=r"import.*tokens"):
        backend.import_(0, 12, 39, data)
    with pytest.raises(BackendError, match="sequence 99 is unknown"):
        backend.export(0, 99)
    with pytest.raises(BackendError, match="there is no R-worker 2; there are 2"):
        backend.export(2, 1)


def test_a_long_sequence_travels_in_pieces(backend: AttentionBackend) -> None:
    """More than one frame holds, and more than a socket's buffer."""
    data = np.random.default_rng(0).integers(0, 256, 8000 * LAYOUT.kv_bytes_per_token, np.uint8)
    data.view(np.float32)[~np.isfinite(data.view(np.float32))] = 0
    backend.import_(1, 7, 8000, data)
    assert backend.export(1, 7).tobytes() == data.tobytes()
    run(backend, FIRST)


def test_close_twice_and_serve_the_next(makers: Makers, request: pytest.FixtureRequest) -> None:
    """What a closed backend held is free for the one after it."""
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
    """One block of this layout takes more than the R-workers of these tests have."""
    large = KVLayout((LayerLayout(64, 64, 512, 512, 1.0),) * 80, "float32", "float32")
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
    """One R-worker in this process; on the S-worker's cores, the S-worker's thread attends in ``collect``."""
    backend = InprocBackend([RWorkerSize(1 << 24, 2)], BLOCK_SIZE, own_cores)
    backend.open(LAYOUT)
    return backend


def alone_plan(mini_batches: Sequence[tuple[Spans, Spans]]) -> StepPlan:
    return StepPlan(plan(mini_batches).workers[:1])


@pytest.mark.parametrize("own_cores", [False, True])
def test_on_shared_cores_the_caller_attends(own_cores: bool) -> None:
    """Not before it collects, where the step has one mini-batch; an abandoned layer is not computed."""
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
    """The caller works on the second one meanwhile, on whichever cores."""
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
