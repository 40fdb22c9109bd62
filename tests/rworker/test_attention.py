"""Attention against the float64 oracle, over instruction sets, dtypes, shapes, lengths and scoring rules."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.examples import SEES_ALL

from fastdecode import _rworker

from .harness import Harness, Layer, random_rows
from .oracle import relative_error

ISAS = _rworker.supported_isas()
DTYPES = ["float32", "float16", "bfloat16"]
QUANTISED = ["int8", "int4"]
PAIRS = [*((dtype, dtype) for dtype in DTYPES), *(("float32", dtype) for dtype in QUANTISED)]
"""Pairs of model and KV dtypes that every shape and rule is tested with."""
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 1500]
SHAPES = {
    "mha64": Layer(2, 2, 64, 64),
    "mha80": Layer(2, 2, 80, 80),
    "gqa4-96": Layer(4, 1, 96, 96),
    "gqa4-128": Layer(8, 2, 128, 128),
    "gqa8-128": Layer(8, 1, 128, 128),
    "gqa7-64": Layer(7, 1, 64, 64),
    "mqa32-128": Layer(32, 1, 128, 128, 0.09),
    "mha256": Layer(2, 2, 256, 256, 0.0625),
    "gqa3-24": Layer(6, 2, 24, 24, 0.2),
    "odd-7-5": Layer(2, 1, 7, 5, 0.4),
    "latent192-128": Layer(4, 4, 192, 128, 0.07),
}


def check(layer: Layer, lengths: list[int], q_lens: list[int], **options: Any) -> None:
    """Fill sequences of these lengths, attend ``q_lens`` more tokens each, and compare with the oracle."""
    rng = np.random.default_rng(1)
    harness = Harness(layer, options)
    prompts = {i: random_rows(rng, layer, length) for i, length in enumerate(lengths) if length}
    harness.step(prompts, append_only=tuple(prompts))
    rows = {i: random_rows(rng, layer, q_len) for i, q_len in enumerate(q_lens)}
    outputs = harness.step(rows)
    for i, output in outputs.items():
        harness.check(i, rows[i].q, output)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_length(shape: str, dtype: str, kv_dtype: str, isa: str) -> None:
    """Wide shapes have one length in three, since the oracle takes long for them; other shapes have all lengths."""
    layer, number = SHAPES[shape], list(SHAPES).index(shape)
    is_wide = layer.num_heads * layer.key_head_dim > 500 and not SEES_ALL
    lengths = LENGTHS[number % 3 :: 3] if is_wide else LENGTHS
    check(layer, [n - 1 for n in lengths], [1] * len(lengths), model_dtype=dtype, kv_dtype=kv_dtype, isa=isa)


WINDOWS = [0, 1, 16, 100, 600]
RULES = list(itertools.product([0.0, 2.0], [(), (0.5, -1.0, 3.0, -20.0)]))
"""Pairs of soft caps and sinks."""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("window", "rules", "pair"),
    [
        pytest.param(window, rules, pair, marks=[pytest.mark.thorough] * ((i + j + k) % len(RULES) > 0))
        for i, window in enumerate(WINDOWS)
        for j, rules in enumerate(RULES)
        for k, pair in enumerate(PAIRS)
    ],
)
def test_scoring_rules(window: int, rules: tuple[float, tuple[float, ...]], pair: tuple[str, str], isa: str) -> None:
    """Each pair of window, rules and dtypes occurs together; in ``make test-all`` each triple does."""
    layer, (dtype, kv_dtype) = Layer(4, 2, 64, 64, 0.25, window, *rules), pair
    lengths = [0, 5, 99, 530, 1100]
    check(layer, lengths, [3, 1, 20, 2, 1], model_dtype=dtype, kv_dtype=kv_dtype, isa=isa)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize(("window", "soft_cap", "sinks"), [(0, 0.0, ()), (100, 2.0, (0.5, -1.0, 3.0, -20.0, 0.0, 1.0))])
def test_alibi(window: int, soft_cap: float, sinks: tuple[float, ...], dtype: str, kv_dtype: str, isa: str) -> None:
    """The slopes are steep, shallow, zero, and one that favours the oldest tokens."""
    layer = Layer(6, 2, 64, 64, 0.25, window, soft_cap, sinks, (1.0, 0.1, 0.01, 0.001, 0.0, -0.003))
    check(layer, [0, 5, 99, 530, 1100], [3, 1, 40, 2, 1], model_dtype=dtype, kv_dtype=kv_dtype, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_long_chunks_cross_splits(block_size: int, isa: str) -> None:
    layer = Layer(4, 2, 32, 32, 0.2)
    check(layer, [0, 500, 1000], [40, 30, 130], block_size=block_size, isa=isa, num_threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("model_dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, *QUANTISED])
def test_model_and_cache_may_differ(model_dtype: str, kv_dtype: str, isa: str) -> None:
    check(Layer(4, 2, 80, 72), [0, 30, 600], [2, 1, 1], model_dtype=model_dtype, kv_dtype=kv_dtype, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_scores(isa: str) -> None:
    layer = Layer(4, 2, 64, 64, 1.0)
    rng = np.random.default_rng(2)
    harness = Harness(layer, {"isa": isa})
    rows = random_rows(rng, layer, 700)
    rows.q *= 1e4
    rows.k *= 1e4
    harness.step({0: rows}, append_only=(0,))
    new = random_rows(rng, layer, 2)
    new.q *= 1e4
    output = harness.step({0: new})[0]
    assert np.isfinite(output).all()
    assert relative_error(output, harness.expected(0, new.q)) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
def test_equal_values_come_back(isa: str) -> None:
    layer = Layer(4, 2, 64, 64)
    rng = np.random.default_rng(3)
    harness = Harness(layer, {"isa": isa})
    rows = random_rows(rng, layer, 1300)
    rows.v[:] = 0.75
    output = harness.step({0: rows})[0]
    np.testing.assert_allclose(output, 0.75, rtol=4e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_layers_may_differ(isa: str) -> None:
    layers = [Layer(8, 2, 64, 64), Layer(4, 4, 96, 32, 0.1, window=20), Layer(8, 2, 64, 64, soft_cap=3.0)]
    rng = np.random.default_rng(4)
    together = Harness(layers[0], {"layers": layers, "isa": isa, "num_threads": 2}).worker
    rows = [random_rows(rng, layer, 90) for layer in layers]
    outputs = [np.zeros((90, layer.num_heads, layer.value_head_dim), np.float32) for layer in layers]
    together.begin_step(np.zeros((0, 4), np.int64), [np.array([[5, 0, 90, 1]])])
    for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        together.submit(0, i, row.q, row.k, row.v, output)
        together.wait(0)
    together.end_step()
    for layer, row, output in zip(layers, rows, outputs, strict=True):
        alone = Harness(layer, {"isa": isa}).step({5: row})[5]
        np.testing.assert_array_equal(output, alone)
