"""A NaN stays in the sequence that brought it, also after its blocks have gone to another sequence."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import RELEASE, TRUNCATE, Harness, Layer, Rows, make_worker, random_rows, table
from .oracle import from_bits, to_bits

ISAS = _rworker.supported_isas()
LAYER = Layer(8, 2, 40, 40, 0.2)
DTYPES = [*((dtype, dtype) for dtype in ("float32", "float16", "bfloat16")), ("float32", "int8"), ("float32", "int4")]
"""Pairs of model and cache dtypes."""


def poison(num_rows: int) -> Rows:
    rows = random_rows(np.random.default_rng(0), LAYER, num_rows)
    rows.k[:] = np.nan
    rows.v[:] = np.nan
    return rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_neighbours_are_untouched(dtype: str, kv_dtype: str, isa: str) -> None:
    harness = Harness(LAYER, {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa})
    rng = np.random.default_rng(1)
    out = harness.step({0: random_rows(rng, LAYER, 21), 1: poison(9), 2: random_rows(rng, LAYER, 700)})
    assert np.isfinite(out[0]).all() and np.isfinite(out[2]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("length", "block_size"), [*((n, 16) for n in (1, 2, 5, 16, 31, 64, 65)), (21, 64), (53, 128)])
def test_recycled_blocks(length: int, block_size: int, dtype: str, kv_dtype: str, isa: str) -> None:
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    options |= {"block_size": block_size, "num_blocks": 128 // block_size}
    rows = random_rows(np.random.default_rng(2), LAYER, length)
    clean = Harness(LAYER, options).step({1: rows})[1]
    harness = Harness(LAYER, options)
    harness.step({0: poison(128)})
    np.testing.assert_array_equal(harness.step({1: rows}, controls=[(RELEASE, 0, 0, 0)])[1], clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("kept", [1, 6, 16, 33, 64])
def test_truncated_tokens(kept: int, dtype: str, kv_dtype: str, isa: str) -> None:
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    rng = np.random.default_rng(3)
    prompt, row = random_rows(rng, LAYER, kept), random_rows(rng, LAYER, 1)
    clean = Harness(LAYER, options)
    clean.step({0: prompt}, append_only=(0,))
    harness = Harness(LAYER, options)
    harness.step({0: prompt}, append_only=(0,))
    harness.step({0: poison(70)}, append_only=(0,))
    harness.lengths[0] = kept
    np.testing.assert_array_equal(harness.step({0: row}, controls=[(TRUNCATE, 0, 0, kept)])[0], clean.step({0: row})[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_a_later_token_does_not_reach_earlier_rows(dtype: str, kv_dtype: str, isa: str) -> None:
    harness = Harness(LAYER, {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa})
    rows = random_rows(np.random.default_rng(4), LAYER, 6)
    rows.k[4:] = np.nan
    out = harness.step({0: rows})[0]
    assert np.isfinite(out[:4]).all() and np.isnan(out[4:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("dim", [40, 72])
def test_a_layer_of_another_shape_leaves_nothing_behind(dim: int, dtype: str, kv_dtype: str, isa: str) -> None:
    """Threads keep buffers from one layer to the next, but no NaN reaches a layer of another shape."""
    bad, good = Layer(16, 1, 512, 512, 0.05), Layer(4, 2, dim, dim, 0.2)
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    rows = random_rows(np.random.default_rng(5), good, 37)
    poisoned = random_rows(np.random.default_rng(6), bad, 37)
    poisoned.q[:] = poisoned.k[:] = poisoned.v[:] = np.nan
    worker = make_worker(good, layers=[bad, good], **options)
    worker.begin_step(table([]), [table([(1, 0, 37, 1)])])
    outputs = []
    for i, part in enumerate((poisoned, rows)):
        q, k, v = (to_bits(array, dtype) for array in (part.q, part.k, part.v))
        outputs.append(np.zeros((37, q.shape[1], v.shape[2]), q.dtype))
        worker.submit(0, i, q, k, v, outputs[i])
        worker.wait(0)
    worker.end_step()
    assert np.isnan(from_bits(outputs[0], dtype)).all()
    np.testing.assert_array_equal(from_bits(outputs[1], dtype), Harness(good, options).step({1: rows})[1])
