"""One sequence over several R-workers: the bits of one R-worker that holds all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.ranges import RangeDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.cluster.links.spawn import SpawnBackend
from fastdecode.cluster.pool import InprocBackend, PoolBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.types import KVLayout, LayerLayout

LAYERS = (
    LayerLayout(4, 2, 16, 24, 0.3),
    LayerLayout(2, 1, 16, 16, 0.3, window=700, soft_cap=3.0, sinks=(0.5, -2.0)),
    LayerLayout(4, 2, 16, 24, 0.3, sinks=(0.0, 1.0, 2.0, 3.0), alibi_slopes=(0.01, 0.001, 0.1, 0.0)),
)
SIZE = RWorkerSize(1 << 26, 1)


def inproc(num_workers: int) -> InprocBackend:
    """R-workers of one thread each."""
    return InprocBackend([SIZE] * num_workers, 32)


def layout(model_dtype: str = "float32", kv_dtype: str = "") -> KVLayout:
    """Of all scoring rules."""
    return KVLayout(LAYERS, model_dtype, kv_dtype or model_dtype)


def story(driver: RangeDriver) -> list[dict[int, list[np.ndarray]]]:
    """Two long sequences and two short ones: drafts, tails that are filled and begun, several mini-batches."""
    for sequence_id, tokens in ((0, 2040), (1, 1100), (2, 30), (3, 511)):
        driver.fill(sequence_id, tokens)
    steps = [[{0: 1, 1: 1, 2: 1, 3: 1}], [{1: 40, 2: 1}, {0: 7, 3: 1}, {}], [{3: 1}, {0: 1}, {2: 1, 1: 1}], [{0: 2}]]
    return [driver.step(counts) for counts in steps]


def assert_same(got: list[dict[int, list[np.ndarray]]], want: list[dict[int, list[np.ndarray]]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for sequence_id, layers in mine.items():
            for layer, o in enumerate(layers):
                assert o.tobytes() == theirs[sequence_id][layer].tobytes(), (sequence_id, layer)


DTYPES = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]


@pytest.mark.parametrize(("model_dtype", "kv_dtype"), [*DTYPES, ("float32", "int4")])
def test_one_two_and_four_workers_give_the_same_bits(model_dtype: str, kv_dtype: str) -> None:
    whole = RangeDriver(inproc(1), layout(model_dtype, kv_dtype))
    want = story(whole)
    for num_workers, range_tokens in ((1, 512), (2, 1024), (4, 512)):
        driver = RangeDriver(
            inproc(num_workers),
            layout(model_dtype, kv_dtype),
            range_tokens,
            lambda sequence_id, index, n=num_workers: (sequence_id + index) % n,
        )
        assert_same(story(driver), want)
        driver.backend.close()
    whole.backend.close()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(0, 5000),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.lists(st.sampled_from([1, 1, 2, 17, 200]), min_size=1, max_size=4),
)
def test_any_ranges_on_any_workers(log2: int, tokens: int, places: list[int], counts: list[int]) -> None:
    """Several ranges of a sequence on one R-worker too, also that of its tail."""
    size = 512 << log2
    whole = RangeDriver(inproc(1), layout())
    ranged = RangeDriver(inproc(3), layout(), size, lambda sequence_id, index: places[index])
    for driver in (whole, ranged):
        driver.fill(0, tokens)
        driver.fill(1, 20)
    for count in counts:
        within = min(count, size - (ranged.sequences[0].length - ranged.sequences[0].base))
        got, want = (driver.step([{1: 1, 0: within}]) for driver in (ranged, whole))
        assert_same([got], [want])
    for driver in (whole, ranged):
        driver.backend.close()


def spawned() -> PoolBackend:
    return SpawnBackend([SIZE] * 3, 32)


@pytest.mark.parametrize("make", [lambda: inproc(3), spawned], ids=["inproc", "spawn"])
def test_a_row_whose_range_is_lost_reads_zeros(make: Callable[[], PoolBackend]) -> None:
    """All others go on with the bits that they would have had; the report names the R-worker."""
    place = {0: (0, 1, 2), 1: (0, 0, 0), 2: (2, 0, 2)}
    driver = RangeDriver(make(), layout(), 512, lambda sequence_id, index: place[sequence_id][index])
    other = RangeDriver(inproc(3), layout(), 512, driver.place)
    for each in (driver, other):
        for sequence_id in (0, 1, 2):
            each.fill(sequence_id, 1100)
    want = other.step([{0: 1, 1: 1, 2: 2}])
    got: dict[int, list[np.ndarray]] = {}
    parts = driver.begin([{0: 1, 1: 1, 2: 2}])
    driver.attend(parts, 0, got)
    assert_same([{i: got[i] for i in got}], [{i: want[i][:1] for i in want}])
    _kill(driver.backend, 1)
    for layer in (1, 2):
        driver.attend(parts, layer, got)
    assert driver.backend.end_step().lost == (1,)
    assert_same([{i: got[i] for i in (1, 2)}], [{i: want[i] for i in (1, 2)}])
    assert all((o == 0).all() for o in got[0][1:])
    for each in (driver, other):
        each.backend.close()


def _kill(backend: PoolBackend, index: int) -> None:
    worker = backend.workers[index]
    if isinstance(worker, RemoteWorker):
        worker._link._process.kill()  # type: ignore[union-attr]
        worker._link._process.wait()  # type: ignore[union-attr]
    else:
        worker.submit = _lost  # type: ignore[method-assign]


def _lost(*arrays: object) -> None:
    from fastdecode.errors import WorkerLostError

    raise WorkerLostError("R-worker inproc-1 is lost: a test says so")
