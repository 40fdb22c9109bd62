"""A sequence's bits depend on no other sequence, on no number of threads, block size or chunking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import FORK, Harness, Layer, Rows, random_rows
from .quantised import rotated

ISAS = _rworker.supported_isas()
LAYERS = {
    "gqa": Layer(6, 2, 64, 64),
    "mha": Layer(2, 2, 40, 24, 0.2),
    "window": Layer(8, 2, 64, 64, 0.2, window=70, soft_cap=4.0, sinks=tuple(0.1 * i for i in range(8))),
    "alibi": Layer(6, 2, 32, 32, 0.2, alibi_slopes=(0.5, 0.1, 0.02, 0.004, 0.3, 0.0)),
}
DTYPES = [(dtype, dtype) for dtype in ("float32", "float16", "bfloat16")] + [("bfloat16", "int8"), ("float32", "int4")]
"""Pairs of model and cache dtypes."""
VERIFIED = range(2, 10)
"""Numbers of rows of a verification: a sequence's last token and its draft tokens."""
PROMPTS = [1, 17, 64, 130, 511, 512, 700, 1100]


def outputs_of(layer: Layer, chosen: list[int], **options: Any) -> dict[int, np.ndarray]:
    """Return outputs of three decode steps after prompts of PROMPTS[i] tokens, for all chosen sequences together."""
    harness = Harness(layer, options)
    rng = {i: np.random.default_rng(i) for i in chosen}
    prompts = {i: random_rows(rng[i], layer, PROMPTS[i]) for i in chosen}
    harness.step(prompts, append_only=tuple(prompts))
    steps = [harness.step({i: random_rows(rng[i], layer, 1) for i in chosen}) for _ in range(3)]
    return {i: np.concatenate([step[i] for step in steps]) for i in chosen}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_alone_crowd_threads_and_block_sizes(name: str, dtype: str, kv_dtype: str, isa: str) -> None:
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    all_prompts = list(range(len(PROMPTS)))
    crowd = outputs_of(LAYERS[name], all_prompts, **options)
    for i in (0, 3, 7):
        np.testing.assert_array_equal(outputs_of(LAYERS[name], [i], **options)[i], crowd[i])
    for changed in ({"num_threads": 3, "block_size": 64}, {"num_threads": 2, "block_size": 256}):
        again = outputs_of(LAYERS[name], all_prompts[::-1], **options, **changed)
        for i in all_prompts:
            np.testing.assert_array_equal(again[i], crowd[i])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [pair for pair in DTYPES if pair[1] != "float16"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("context", [0, 63, 490])
def test_chunked_equals_row_by_row(context: int, name: str, dtype: str, kv_dtype: str, isa: str) -> None:
    layer, rng = LAYERS[name], np.random.default_rng(5)
    prompt, rows = random_rows(rng, layer, max(context, 1)), random_rows(rng, layer, 45)
    results = []
    for sizes in ([45], [1] * 45, [7, 1, 30, 5, 2]):
        harness = Harness(layer, {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa})
        if context:
            harness.step({0: prompt}, append_only=(0,))
        parts, row = [], 0
        for size in sizes:
            part = slice(row, row + size)
            parts.append(harness.step({0: Rows(rows.q[part], rows.k[part], rows.v[part])})[0])
            row += size
        results.append(np.concatenate(parts))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_verified_rows_equal_rows_alone(name: str, dtype: str, kv_dtype: str, isa: str) -> None:
    """Spans of 2 to 9 rows over borders of chunks and splits, beside each other or forked, equal rows alone."""
    layer, options = LAYERS[name], {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    for context in (60, 506, 1022):
        rng = np.random.default_rng(context)
        prompt, rows = random_rows(rng, layer, context), random_rows(rng, layer, max(VERIFIED))
        alone = Harness(layer, options)
        alone.step({0: prompt}, append_only=(0,))
        want = np.concatenate([alone.step({0: first_rows(rows, 1, begin=i)})[0] for i in range(max(VERIFIED))])
        together = Harness(layer, {**options, "num_threads": 2})
        forks = [(FORK, q_len, 0, context) for q_len in VERIFIED] if context > 1000 else []
        filled = (0,) if forks else tuple(VERIFIED)
        together.step(dict.fromkeys(filled, prompt), append_only=filled)
        together.lengths |= dict.fromkeys(VERIFIED, context)
        got = together.step({q_len: first_rows(rows, q_len) for q_len in VERIFIED}, controls=forks)
        for q_len in VERIFIED:
            np.testing.assert_array_equal(got[q_len], want[:q_len])


def first_rows(rows: Rows, count: int, begin: int = 0) -> Rows:
    """Return ``count`` of the rows, from row ``begin`` on."""
    part = slice(begin, begin + count)
    return Rows(rows.q[part], rows.k[part], rows.v[part])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv_dtype", "group"), [("int8", 4), ("int8", 8), ("int8", 20), ("int4", 1), ("int4", 20)])
def test_rows_have_the_same_bits_whichever_neighbours_have_peaked_queries(kv_dtype: str, group: int, isa: str) -> None:
    """Each query over codes decides by itself whether bytes are enough.

    Neighbours with peaked queries and other windows change no bit of its row.
    """
    layer, options = Layer(group, 1, 64, 64, window=500), {"kv_dtype": kv_dtype, "isa": isa}
    rng = np.random.default_rng(8)
    prompt, rows = random_rows(rng, layer, 530), random_rows(rng, layer, 9)
    rows.q[..., 5] *= rng.choice([1, 60], (9, group))
    if kv_dtype == "int4":
        rows.q = rotated(rows.q)
    alone = Harness(layer, options)
    alone.step({0: prompt}, append_only=(0,))
    want = np.concatenate([alone.step({0: first_rows(rows, 1, begin=i)})[0] for i in range(9)])
    for threads in (1, 3):
        together = Harness(layer, {**options, "num_threads": threads})
        together.step({0: prompt}, append_only=(0,))
        np.testing.assert_array_equal(together.step({0: rows})[0], want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_fork_and_truncate_leave_the_bits(dtype: str, kv_dtype: str, isa: str) -> None:
    options = {"model_dtype": dtype, "kv_dtype": kv_dtype, "isa": isa}
    layer, rng = LAYERS["gqa"], np.random.default_rng(6)
    prompt, rows = random_rows(rng, layer, 75), random_rows(rng, layer, 1)
    first = Harness(layer, options)
    first.step({0: Rows(prompt.q[:70], prompt.k[:70], prompt.v[:70])}, append_only=(0,))
    want = first.step({0: rows})[0]
    second = Harness(layer, options)
    second.step({0: prompt}, append_only=(0,))
    second.lengths |= {1: 70, 2: 70}
    got = second.step({1: rows, 2: rows}, controls=[(0, 1, 0, 70), (0, 2, 0, 75), (1, 2, 0, 70)])
    np.testing.assert_array_equal(got[1], want)
    np.testing.assert_array_equal(got[2], want)
