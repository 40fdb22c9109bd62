"""int8 and int4 caches: what they store, how far their attention is from exact, and the bytes they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fastdecode import _rworker
from fastdecode.kinds import Dense

from .harness import TRUNCATE, Harness, Layer, Rows, random_rows
from .oracle import attention, relative_error
from .quantised import QUANTISED, rotated, stored
from .rounding import BYTES

ISAS = _rworker.supported_isas()
SLOPES = (0.5, 0.1, 0.02, 0.3, 0.0)
ERROR = {"int8": (1.25e-2, 3e-2), "int4": (0.14, 0.25)}
"""The median and largest norm-wise error of a sequence and head against the unquantised cache, for Gaussian data.
Where weights are bytes they share a scale with up to 127 others.
"""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dims", [(64, 64), (7, 5), (24, 80), (96, 130), (512, 1)])
def test_what_is_stored_is_the_oracles(dims: tuple[int, int], kv_dtype: str, isa: str) -> None:
    layer = Layer(2, 2, *dims)
    rng = np.random.default_rng(1)
    rows = random_rows(rng, layer, 150)
    magnitude = np.exp(rng.uniform(-30, 30, (2, 150, 2, 1))).astype(np.float32)
    rows.k *= magnitude[0]
    rows.v = rows.v * magnitude[1] + magnitude[0]  # Groups lie far from zero.
    rows.k[3], rows.v[4], rows.k[5], rows.v[6] = 0, 0, 1.75, -0.3
    harness = Harness(layer, {"kv_dtype": kv_dtype, "isa": isa})
    harness.step({0: Rows(rows.q[:9], rows.k[:9], rows.v[:9])}, append_only=(0,))
    harness.step({0: Rows(rows.q[9:], rows.k[9:], rows.v[9:])}, append_only=(0,))
    k, v = harness.worker.read_tokens(0, 0)
    np.testing.assert_array_equal(k, stored(rows.k, kv_dtype, keys=True))
    np.testing.assert_array_equal(v, stored(rows.v, kv_dtype, keys=False))


@pytest.mark.parametrize("blocks", [(1,), (64,), (32, 8), (64, 16, 4, 2, 1)])
def test_the_rotation_is_hadamards_matrix(blocks: tuple[int, ...]) -> None:
    """The rotation is Hadamard's matrix of ``blocks`` along the diagonal, and is its own inverse."""
    want, first = np.zeros((sum(blocks), sum(blocks))), 0
    for n in blocks:
        matrix = np.ones((1, 1))
        while len(matrix) < n:
            matrix = np.kron([[1, 1], [1, -1]], matrix)
        want[first : first + n, first : first + n] = matrix / np.sqrt(n)
        first += n
    found = rotated(np.eye(sum(blocks), dtype=np.float32))
    np.testing.assert_allclose(found, want, atol=1e-7)
    np.testing.assert_allclose(rotated(found), np.eye(sum(blocks)), atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_one_large_channel_leaves_codes_to_the_others(isa: str) -> None:
    """int4 keys of models have one large channel; without a rotation the others would have two or three codes."""
    layer = Layer(2, 2, 64, 64)
    rows = random_rows(np.random.default_rng(4), layer, 100)
    rows.k[..., 9] += 30
    rows.v[..., 50] -= 30
    harness = Harness(layer, {"kv_dtype": "int4", "isa": isa})
    harness.step({0: rows}, append_only=(0,))
    for held, given in zip(harness.worker.read_tokens(0, 0), (rows.k, rows.v), strict=True):
        assert relative_error(np.delete(held, (9, 50), -1), np.delete(given, (9, 50), -1)) < 0.3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_what_a_token_writes_is_its_own(kv_dtype: str, isa: str) -> None:
    layer = Layer(2, 1, 40, 24)
    rng = np.random.default_rng(2)
    harness = Harness(layer, {"kv_dtype": kv_dtype, "isa": isa})
    rows = random_rows(rng, layer, 61)
    harness.step({0: rows}, append_only=(0,))
    for kept in (60, 53, 37, 34, 17, 3):
        harness.lengths[0] = kept
        new = random_rows(rng, layer, 1)
        harness.step({0: new}, append_only=(0,), controls=[(TRUNCATE, 0, 0, kept)])
        k, v = harness.worker.read_tokens(0, 0)
        np.testing.assert_array_equal(k, stored(np.concatenate([rows.k[:kept], new.k]), kv_dtype, keys=True))
        np.testing.assert_array_equal(v, stored(np.concatenate([rows.v[:kept], new.v]), kv_dtype, keys=False))


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("layer", [Layer(4, 4, 128, 128, 0.09), Layer(8, 2, 64, 64), Layer(4, 1, 80, 80, 0.11)])
def test_distance_to_the_unquantised_cache(layer: Layer, kv_dtype: str) -> None:
    rng = np.random.default_rng(3)
    harness = Harness(layer, {"kv_dtype": kv_dtype})
    rows = {i: random_rows(rng, layer, length) for i, length in enumerate([40, 150, 333, 700, 1024])}
    harness.step(rows, append_only=tuple(rows))
    new = {i: random_rows(rng, layer, 1) for i in rows}
    errors = []
    for i, output in harness.step(new).items():
        k, v = (np.concatenate(both) for both in ((rows[i].k, new[i].k), (rows[i].v, new[i].v)))
        want = attention(new[i].q, k, v, scale=layer.scale)
        errors += [relative_error(output[:, head], want[:, head]) for head in range(layer.num_heads)]
    median, largest = ERROR[kv_dtype]
    assert np.median(errors) <= median and max(errors) <= largest


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("sharpness", [0.3, 3.0, 20.0])
def test_flat_and_peaked_scores_with_outliers(sharpness: float, kv_dtype: str, isa: str) -> None:
    """Errors are bounded if a first token takes most weight, channels are large, or values lie far from zero."""
    layer = Layer(4, 2, 128, 128, sharpness / 128)
    rng = np.random.default_rng(4)
    rows, new = random_rows(rng, layer, 900), random_rows(rng, layer, 3)
    for part in (rows, new):
        part.q[..., 5] *= 20
        part.k[..., 5] += 4
        part.v += 0.5
    rows.k[0] = 2 * new.q[0, ::2]
    harness = Harness(layer, {"kv_dtype": kv_dtype, "isa": isa})
    harness.step({0: rows}, append_only=(0,))
    error = relative_error(harness.step({0: new})[0], harness.expected(0, new.q))
    by_bytes = kv_dtype == "int4" and isa in BYTES["int4"]  # Rotated queries have no large channel.
    assert error <= (0.4 * off_by_storing(harness, layer, rows, new, np.s_[:]) if by_bytes else 3e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv_dtype", "sharpness"), [("int8", 0.3), ("int8", 1.0), ("int8", 3.0), ("int4", 2.0)])
@pytest.mark.parametrize(
    "layer", [Layer(8, 2, 128, 128), Layer(8, 1, 64, 72), Layer(5, 1, 40, 24), Layer(5, 1, 40, 24, alibi_slopes=SLOPES)]
)
def test_groups_with_peaked_queries_among_others(layer: Layer, kv_dtype: str, sharpness: float, isa: str) -> None:
    """Some queries of a group multiply codes as bytes with little loss; queries with one large channel do not."""
    layer = replace(layer, scale=sharpness / np.sqrt(layer.key_head_dim))
    rng = np.random.default_rng(7)
    rows, new = random_rows(rng, layer, 600), random_rows(rng, layer, 9)
    peaked = np.zeros((9, layer.num_heads), bool)
    peaked[:, ::3] = peaked[4] = True
    new.q[peaked, 5] = 40
    if kv_dtype == "int4":
        new.q = rotated(new.q)
    rows.v += 0.5
    harness = Harness(layer, {"kv_dtype": kv_dtype, "isa": isa})
    harness.step({0: rows}, append_only=(0,))
    output = harness.step({0: new})[0]
    harness.check(0, new.q, output)
    want = harness.expected(0, new.q)
    of_more_bits = {"int8": 3e-3, "int4": 2e-2}[kv_dtype]
    assert relative_error(output[peaked], want[peaked]) <= of_more_bits
    by_bytes = {"int8": 2.0, "int4": 0.42}[kv_dtype] * off_by_storing(harness, layer, rows, new, ~peaked)
    assert relative_error(output[~peaked], want[~peaked]) <= (by_bytes if isa in BYTES[kv_dtype] else of_more_bits)


def off_by_storing(harness: Harness, layer: Layer, rows: Rows, new: Rows, which: Any) -> float:
    """Return the error that storing alone causes in ``which`` outputs of ``new`` rows, after ``rows``."""
    k, v = (np.concatenate(both) for both in ((rows.k, new.k), (rows.v, new.v)))
    unquantised = attention(new.q, k, v, scale=layer.scale, alibi_slopes=layer.alibi_slopes)
    return relative_error(harness.expected(0, new.q)[which], unquantised[which])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_is_never_a_number(bad: float, part: str, kv_dtype: str, isa: str) -> None:
    layer = Layer(4, 2, 40, 40, 0.2)
    rows = random_rows(np.random.default_rng(5), layer, 80)
    getattr(rows, part)[70, 1, 3] = bad
    output = Harness(layer, {"kv_dtype": kv_dtype, "isa": isa}).step({0: rows})[0]
    assert np.isfinite(output[:70]).all() and np.isfinite(output[:, :2]).all()
    assert np.isnan(output[70:, 2:]).all()


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_memory_is_what_is_stored(block_size: int, dims: tuple[int, int], kv_dtype: str) -> None:
    layer = Layer(2, 2, *dims)
    blocks = 1024 // block_size
    bytes_stored = Dense(2, 2, *dims, scale=1.0).token_bytes(kv_dtype) * 1024
    assert bytes_stored <= _rworker.block_bytes([layer], kv_dtype, block_size) * blocks <= 1.03 * bytes_stored


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_bytes_read_count_the_scales(kv_dtype: str) -> None:
    layer = Layer(4, 2, 80, 64)
    harness = Harness(layer, {"kv_dtype": kv_dtype})
    rows = random_rows(np.random.default_rng(6), layer, 100)
    harness.worker.begin_step(np.zeros((0, 4), np.int64), [np.array([[0, 0, 100, 1]])])
    harness.worker.submit(0, 0, rows.q, rows.k, rows.v, np.empty((100, 4, 64), np.float32))
    harness.worker.wait(0)
    assert harness.worker.end_step()[2] == 100 * Dense(4, 2, 80, 64, 1.0).token_bytes(kv_dtype)
