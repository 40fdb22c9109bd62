"""The attention shared among blocks agrees with float64 weights over the cached keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.cluster.r_worker.host import weigh
from fastdecode.core.weighing import WeighedPart, Weighing
from fastdecode.kinds import Dense

from .harness import Layer, make_worker, random_rows, table
from .oracle import from_bits, to_bits

ISAS = _rworker.supported_isas()
PAIRS = [("float32", "float32", 2e-6), ("bfloat16", "bfloat16", 2e-3), ("float16", "float16", 2e-3)]
PAIRS += [("float32", "int8", 2e-3), ("float32", "int4", 2e-3)]
LAYERS = {
    "plain": Layer(4, 2, 64, 64),
    "mqa": Layer(20, 1, 80, 16, 0.09),
    "window": Layer(4, 2, 64, 64, 0.25, 100, 2.0),
    "sinks": Layer(4, 2, 32, 32, 0.25, 0, 0.0, (0.5, -1.0, 3.0, -20.0)),
    "alibi": Layer(4, 4, 24, 24, 0.25, 0, 0.0, (), (0.5, 0.25, 0.1, 0.01)),
    "chunks": Layer(4, 2, 64, 64, 0.25, 64, chunked=True),
}


def weights_of(layer: Dense, q: np.ndarray, keys: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 weights [heads, tokens] of one query over all keys, and max and sum without sinks."""
    group, tokens = layer.num_heads // layer.num_kv_heads, np.arange(len(keys))
    scores = np.einsum("hd,thd->ht", q.astype(np.float64), np.repeat(keys, group, 1)) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
    if layer.alibi_slopes:
        scores = scores + np.array(layer.alibi_slopes)[:, None] * (tokens - position)
    first = 0
    if layer.window:
        first = position - position % layer.window if layer.chunked else position - layer.window + 1
    scores[:, (tokens < first) | (tokens > position)] = -np.inf
    most = scores.max(1, keepdims=True)
    sums = np.exp(scores - most).sum(1)
    sinks = np.array(layer.sinks or (-np.inf,) * layer.num_heads)
    weights = np.exp(scores - most) / (sums + np.exp(sinks - most[:, 0]))[:, None]
    return weights, np.stack([most[:, 0], sums], -1)


def in_step(layer: Dense, length: int, dtype: str, **options: Any) -> tuple[_rworker.RWorker, np.ndarray]:
    """Return a worker in a step whose one layer is done, and q of sequence 0's first new row.

    The step has two rows of sequence 0 after ``length`` tokens.
    """
    rng = np.random.default_rng(length)
    worker = make_worker(layer, model_dtype=dtype, **options)
    for start, count in ((0, length), (length, 2)):
        rows = random_rows(rng, layer, count)
        q, k, v = (to_bits(each, dtype) for each in (rows.q, rows.k, rows.v))
        worker.begin_step(table([]), [table([(0, start, count, 1)])])
        worker.run(0, 0, q, k, v, np.zeros((count, layer.num_heads, layer.value_head_dim), q.dtype))
        if start == 0:
            worker.end_step()
    return worker, q[:1]


def ask(worker: _rworker.RWorker, q: np.ndarray, position: int, **more: Any) -> np.ndarray:
    settings = {"sequence_id": 0, "offset": 0, "block": 16, "layers": [0], "queries": [q], **more}
    return worker.weigh(position=position, **settings)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "kv_dtype", "close"), PAIRS)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_those_of_the_cached_keys(name: str, dtype: str, kv_dtype: str, close: float, isa: str) -> None:
    """The weights are those of the first of two rows; the second might be a draft that is refused."""
    layer = LAYERS[name]
    for length, block in ((1, 16), (90, 7), (1100, 24)):
        worker, q = in_step(layer, length, dtype, kv_dtype=kv_dtype, isa=isa, num_threads=2)
        found, norms = ask(worker, q, length, block=block), ask(worker, q, length, finds_norms=True)
        again = ask(worker, q, length, block=block, norms=norms) if not layer.sinks else found
        worker.end_step()
        keys, _ = worker.read_tokens(0, 0)
        weights, sums = weights_of(layer, from_bits(q, dtype)[0], keys, length)
        wanted = np.add.reduceat(weights[:, : length + 1].mean(0), np.arange(0, length + 1, block))
        assert np.abs(found - wanted).max() < close
        assert np.abs(again - found).max() < 1e-6
        assert np.abs(norms[0] / sums - 1).max() < max(close, 1e-4) * 20
        if not layer.sinks:
            assert abs(found.sum() - 1) < 1e-6


def test_ranges_and_norms_make_the_whole() -> None:
    """A sequence of 1,024 tokens and its two ranges of 512, with blocks across the border, give the same weights."""
    layer, rng = LAYERS["plain"], np.random.default_rng(0)
    rows = random_rows(rng, layer, 1025)
    worker = make_worker(layer)
    for spans, taken in (([(0, 0, 1024, 1)], slice(0, 1024)), ([(1, 0, 512, 1)], slice(0, 512))):
        out = np.zeros(rows.q[taken].shape, np.float32)
        worker.begin_step(table([]), [table(spans)])
        worker.run(0, 0, rows.q[taken], rows.k[taken], rows.v[taken], out)
        worker.end_step()
    last, tail = slice(1024, 1025), slice(512, 1024)
    worker.begin_step(table([]), [table([(2, 0, 512, 1)])])
    worker.run(0, 0, rows.q[tail], rows.k[tail], rows.v[tail], np.zeros(rows.q[tail].shape, np.float32))
    worker.end_step()
    both = np.concatenate([rows.k[last]] * 2), np.concatenate([rows.v[last]] * 2)
    worker.begin_step(table([]), [table([(0, 1024, 1, 1), (2, 512, 1, 1)])])
    q = np.concatenate([rows.q[last]] * 2)
    worker.run(0, 0, q, *both, np.zeros(q.shape, np.float32))
    whole = ask(worker, q[:1], 1024, block=48)
    parts = [(1, 1024, 0), (2, 512, 512)]
    norms = [
        ask(worker, q[:1], at, sequence_id=number, offset=offset, finds_norms=True) for number, at, offset in parts
    ]
    most = np.maximum(norms[0][..., 0], norms[1][..., 0])
    sums = sum(each[..., 1] * np.exp(each[..., 0] - most) for each in norms)
    joined, joint = np.zeros_like(whole), np.stack([most, sums], -1).astype(np.float32)
    for number, at, offset in parts:
        found = ask(worker, q[:1], at, sequence_id=number, offset=offset, block=48, norms=joint)
        joined[offset // 48 : offset // 48 + len(found)] += found
    assert np.abs(joined - whole).max() < 1e-6
    worker.end_step()


def test_what_is_not_possible_is_refused() -> None:
    layer = LAYERS["plain"]
    worker, q = in_step(layer, 40, "float32")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sequence_id": 5}, "unknown sequence|sequence 5"),
        ({"position": -1}, "position and offset"),
        ({"offset": 1 << 41}, "position and offset"),
        ({"block": 0}, "at least 1 token"),
        ({"layers": [1]}, "no layer that has queries"),
        ({"layers": [], "queries": []}, "one layer is the least"),
        ({"queries": [q[:, :1]]}, "queries must be"),
        ({"norms": np.zeros((1, 3, 2), np.float32)}, "norms of 3 heads"),
    ]
    for change, message in cases:
        with pytest.raises((ValueError, KeyError), match=message):
            ask(worker, q, **{"position": 40, **change})
    worker.end_step()
    with pytest.raises(ValueError, match="no step is open"):
        ask(worker, q, 40)
    worker.begin_step(table([]), [table([(0, 42, 1, 1)])])
    with pytest.raises(ValueError, match="never submitted"):
        ask(worker, q, 40)


def test_a_question_past_the_end_is_refused() -> None:
    """The S-worker counts more tokens than are cached: the blocks that it asks about are not all here."""
    layer = LAYERS["plain"]
    worker, q = in_step(layer, 40, "float32")
    held, beyond = WeighedPart(0, 0, 41, 0, 42), WeighedPart(0, 0, 99, 0, 100)
    assert len(weigh(worker, Weighing(held, 16, (0,), (q,)))) == 3
    with pytest.raises(ValueError, match="100 tokens make 7 blocks, not 3"):
        weigh(worker, Weighing(beyond, 16, (0,), (q,)))
