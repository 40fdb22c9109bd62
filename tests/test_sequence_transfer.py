"""Backends export sequences as bytes and import them: the real one, the fake one, and each the other's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from doubles.fake_backend import FakeBackend

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import BackendError
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import CONTROL, SPAN, StepPlan, Verb, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LAYERS = (Dense(4, 2, 8, 16, 0.3), Dense(4, 4, 16, 8, 0.3))
LAYOUT = KVLayout(LAYERS, "float32", "float32")
NO_CONTROLS = np.zeros(0, CONTROL)


def inproc(block_size: int, num_workers: int = 1) -> InprocBackend:
    return InprocBackend([RWorkerSize(1 << 19, 1)] * num_workers, block_size)


BACKENDS = {
    "inproc": lambda: inproc(16, num_workers=2),
    "fake": lambda: FakeBackend(num_workers=2),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Yield a backend of two workers, the first of which holds sequence 1 of 50 tokens."""
    backend = BACKENDS[request.param]()
    backend.open(LAYOUT)
    step(backend, (1, 0, 50, 0))
    yield backend
    backend.close()


def step(backend: AttentionBackend, span: tuple[int, int, int, int], num_workers: int = 2) -> list[np.ndarray]:
    """Run rows of one sequence on the first worker, which depend on their positions only; return o of both layers."""
    plans = [WorkerPlan(NO_CONTROLS, (np.array([span], SPAN),))]
    plans += [WorkerPlan(NO_CONTROLS, (np.zeros(0, SPAN),))] * (num_workers - 1)
    backend.begin_step(StepPlan(tuple(plans)))
    _, context_len, count, attends = span
    outputs = []
    for index, layer in enumerate(LAYERS):
        rows = np.random.default_rng(index).standard_normal((context_len + count, 4, 16), dtype=np.float32)
        q = rows[context_len : context_len + count * attends, :, : layer.key_head_dim]
        k, v = (
            rows[context_len:, : layer.num_kv_heads, :dim] * sign
            for dim, sign in ((layer.key_head_dim, 1), (layer.value_head_dim, -1))
        )
        backend.submit(0, index, *(np.ascontiguousarray(part) for part in (q, k, v)))
        outputs.append(backend.collect(0).copy())
    backend.end_step()
    return outputs


def test_a_sequence_moves_to_another_worker(backend: AttentionBackend) -> None:
    """The sequence is released on one worker and attended on the other as if it had always been there."""
    data = backend.export(0, 1)
    assert data.dtype == np.uint8 and data.shape == (50 * LAYOUT.kv_bytes_per_token,)
    release = WorkerPlan(np.array([(Verb.RELEASE, 1, 0, 0)], CONTROL), (np.zeros(0, SPAN),))
    backend.begin_step(StepPlan((release, WorkerPlan(NO_CONTROLS, (np.zeros(0, SPAN),)))))
    backend.end_step()
    backend.import_(1, 1, 50, data)
    assert backend.export(1, 1).tobytes() == data.tobytes()


def test_the_fake_and_the_real_one_speak_the_same_bytes() -> None:
    """Each backend imports the other's export, and then both attend alike."""
    real, other, fake = inproc(16), inproc(64), FakeBackend()
    for each in (real, other, fake):
        each.open(LAYOUT)
    step(real, (1, 0, 50, 0), 1)
    fake.import_(0, 1, 50, real.export(0, 1))
    other.import_(0, 1, 50, fake.export(0, 1))
    assert other.export(0, 1).tobytes() == real.export(0, 1).tobytes()
    wanted, moved, faked = (step(each, (1, 50, 2, 1), 1) for each in (real, other, fake))
    for want, got, slow in zip(wanted, moved, faked, strict=True):
        assert want.tobytes() == got.tobytes()
        np.testing.assert_allclose(got, slow, rtol=1e-5, atol=1e-5)
    for each in (real, other):
        each.close()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_the_fake_refuses_quantised_caches(kv_dtype: str) -> None:
    with pytest.raises(BackendError, match=f"keeps float32, float16 or bfloat16 caches, not {kv_dtype}"):
        FakeBackend().open(KVLayout(LAYERS, "float32", kv_dtype))


def test_refusals_name_worker_and_reason(backend: AttentionBackend) -> None:
    """After a refusal nothing has changed."""
    data = backend.export(0, 1)
    with pytest.raises(BackendError, match=r"export.*sequence 9 is unknown"):
        backend.export(0, 9)
    with pytest.raises(BackendError, match="export: there is no R-worker 2; there are 2"):
        backend.export(2, 1)
    with pytest.raises(BackendError, match="import: there is no R-worker -1"):
        backend.import_(-1, 2, 50, data)
    with pytest.raises(BackendError, match="sequence 1 exists already"):
        backend.import_(0, 1, 50, data)
    for num_tokens, wrong in ((49, data), (50, data[:-1]), (50, data.view(np.int8)), (-1, data)):
        with pytest.raises(BackendError, match=r"import.*(tokens|uint8)"):
            backend.import_(0, 2, num_tokens, wrong)
    plan = WorkerPlan(NO_CONTROLS, (np.zeros(0, SPAN),))
    backend.begin_step(StepPlan((plan, plan)))
    with pytest.raises(BackendError, match="a step is open"):
        backend.export(0, 1)
    with pytest.raises(BackendError, match="a step is open"):
        backend.import_(0, 2, 50, data)
    backend.abandon_step()
    assert backend.export(0, 1).tobytes() == data.tobytes()
    backend.import_(0, 2, 50, data)
    assert backend.export(0, 2).tobytes() == data.tobytes()
