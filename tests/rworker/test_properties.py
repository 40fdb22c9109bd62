"""Random shapes over random block tables: attention agrees with the oracle whatever grew, shrank or was shared."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Harness, Layer, random_rows
from .quantised import KV_DTYPES

pytestmark = pytest.mark.slow

MODEL_DTYPES = ["float32", "float16", "bfloat16"]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Draw a layer of any heads, groups and head sizes, with or without each scoring rule."""
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    key_head_dim = draw(st.integers(1, 32)) * 8 if draw(st.booleans()) else draw(st.integers(1, 80))
    value_head_dim = key_head_dim if draw(st.booleans()) else draw(st.integers(1, 96))
    num_heads = num_kv_heads * group
    sinks = tuple(draw(st.lists(st.floats(-4, 4), min_size=num_heads, max_size=num_heads)))
    slopes = tuple(draw(st.lists(st.floats(0, 1, width=32), min_size=num_heads, max_size=num_heads)))
    window = draw(st.sampled_from([0, 0, 1, 30, 200]))
    return Layer(
        num_heads,
        num_kv_heads,
        key_head_dim,
        value_head_dim,
        scale=key_head_dim**-0.5,
        window=window,
        soft_cap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        sinks=sinks if draw(st.booleans()) else (),
        alibi_slopes=slopes if draw(st.booleans()) else (),
        chunked=window > 0 and draw(st.booleans()),
    )


@settings(max_examples=examples(100), deadline=None)
@given(layer=layers(), data=st.data())
def test_random_shapes_and_tables(layer: Layer, data: st.DataObject) -> None:
    options = {
        "model_dtype": data.draw(st.sampled_from(MODEL_DTYPES)),
        "kv_dtype": data.draw(st.sampled_from(KV_DTYPES)),
        "isa": data.draw(st.sampled_from(_rworker.supported_isas())),
        "block_size": data.draw(st.sampled_from([16, 32, 64])),
        "num_threads": data.draw(st.integers(1, 3)),
        "num_blocks": 400,
    }
    harness = Harness(layer, options)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    grow(harness, data, rng, {i: data.draw(st.integers(1, 700), label="prompt") for i in range(3)})
    length = harness.lengths[0]
    kept, shared = data.draw(st.integers(0, harness.lengths[1])), data.draw(st.integers(0, length))
    controls = [(RELEASE, 2, 0, 0), (TRUNCATE, 1, 0, kept), (FORK, 3, 0, shared)]
    harness.lengths = {0: length, 1: kept, 3: shared}
    grow(harness, data, rng, {i: data.draw(st.integers(1, 40), label="rows") for i in (4, 3, 1, 0)}, controls)


def grow(
    harness: Harness, data: st.DataObject, rng: np.random.Generator, num_rows: dict[int, int], controls: list = ()
) -> None:
    """Let some sequences grow, and check that each that attends agrees with the oracle."""
    rows = {i: random_rows(rng, harness.layer, count) for i, count in num_rows.items()}
    append_only = tuple(i for i in rows if data.draw(st.booleans(), label="append only"))
    for i, output in harness.step(rows, append_only, controls).items():
        last = slice(-min(len(output), 4), None)
        harness.check(i, rows[i].q[last], output[last])
