"""A NaN stays in the sequence that brought it, also after its blocks have a new owner."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import RELEASE, TRUNCATE, Harness, Layer, Rows, random_rows

ISAS = _rworker.supported_isas()
LAYER = Layer(8, 2, 40, 40, 0.2)
DTYPES = [*((dtype, dtype) for dtype in ("float32", "float16", "bfloat16")), ("float32", "int8"), ("float32", "int4")]
"""Of model and cache."""


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
@pytest.mark.parametrize("length", [1, 2, 5, 16, 31, 64, 65])
def test_recycled_blocks(length: int, dtype: str, kv_dtype: str, isa: str) -> None:
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa, "num_blocks": 8}
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
