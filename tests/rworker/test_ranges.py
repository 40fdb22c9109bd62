"""A sequence in ranges has the bits of a whole one, and splits are merged in one tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode import _rworker

from .harness import FORK, RELEASE, Layer, Rows, make_worker, random_rows, table
from .oracle import to_bits

APPEND, ATTEND, PARTIAL, READ = range(4)
SPLIT = 512
ISAS = _rworker.supported_isas()
LAYERS = {
    "gqa": Layer(4, 2, 32, 24, 0.3),
    "window": Layer(2, 1, 16, 16, 0.3, window=1300, soft_cap=4.0, sinks=(0.5, -3.0)),
    "short window": Layer(2, 2, 16, 16, 0.3, window=40),
    "chunks": Layer(2, 1, 16, 16, 0.3, window=512, chunked=True),
    "short chunks": Layer(2, 2, 16, 16, 0.3, window=64, chunked=True),
    "alibi": Layer(2, 2, 16, 40, 0.3, alibi_slopes=(0.01, 0.001), sinks=(0.0, 2.0)),
}
DTYPES = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")]
DTYPES += [("float32", "int4")]
WHOLE, TAIL = 1, 2


class Both:
    """One R-worker that holds a sequence as a whole, and also as closed ranges and a tail."""

    def __init__(self, layer: Layer, **options: Any) -> None:
        self.layer = layer
        self.worker = make_worker(layer, **{"num_blocks": 700, "block_size": 32} | options)
        self.model_dtype, self.isa = options.get("model_dtype", "float32"), options.get("isa", "auto")
        self.length = 0

    def step(self, spans: list[tuple[int, int, int, int]], rows: list[Rows], controls: Any = ()) -> tuple:
        """Run one step of the spans with ``rows``; return o and partial results."""
        spec, modes = self.layer, [span[3] for span in spans]
        q = np.concatenate([each.q for each, mode in zip(rows, modes, strict=True) if mode] or [rows[0].q[:0]])
        stored = [each for each, mode in zip(rows, modes, strict=True) if mode != READ] or [cut(rows[0], 0, 0)]
        k, v = np.concatenate([each.k for each in stored]), np.concatenate([each.v for each in stored])
        num_out = sum(span[2] for span in spans if span[3] == ATTEND)
        num_nodes = sum(nodes(*span[1:]) * span[2] for span in spans)
        o = np.full((num_out, spec.num_heads, spec.value_head_dim), 7, to_bits(q[:1], self.model_dtype).dtype)
        partials = np.full((num_nodes, spec.num_heads, 2 + spec.value_head_dim), np.nan, np.float32)
        self.worker.begin_step(table(list(controls)), [table(spans)])
        self.worker.run(0, 0, *(to_bits(each, self.model_dtype) for each in (q, k, v)), o, partials)
        self.worker.end_step()
        return o, partials

    def fill(self, ends: list[int], rows: Rows) -> None:
        """Store ``rows`` as a whole and in ranges that end at ``ends``; closed ranges have the ids 100, 101, …"""
        begin = 0
        for i, end in enumerate([*ends, len(rows.k)]):
            part, last = cut(rows, begin, end), i == len(ends)
            spans = [(WHOLE, begin, end - begin, APPEND)]
            if len(part.k):
                # As schedulers do: the tail grows, then becomes a range of another id.
                self.step([*spans, (TAIL, 0, end - begin, APPEND)], [part, part])
            if not last:
                self.worker.begin_step(table([(FORK, 100 + i, TAIL, end - begin), (RELEASE, TAIL, 0, 0)]), [])
                self.worker.end_step()
            begin = end
        self.ends, self.length = ends, len(rows.k)

    def attend(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Attend the next tokens of the whole sequence and of the ranges; return both o, in the model's dtype."""
        count, starts = len(rows.q), [0, *self.ends]
        spans = [(100 + i, self.length - start, count, READ) for i, start in enumerate(starts[:-1])]
        spans += [(WHOLE, self.length, count, ATTEND), (TAIL, self.length - starts[-1], count, PARTIAL)]
        o, partials = self.step(spans, [rows] * len(spans))
        merged = np.zeros_like(o)
        first, parts = 0, []
        for start, end in zip(starts, [*self.ends, self.length + count], strict=True):
            closed = end in self.ends
            widths = [end // SPLIT - start // SPLIT] if closed else widths_of(-(-(end - start) // SPLIT))
            for i, width in enumerate(widths):
                parts.append((0, first + i, len(widths), start // SPLIT + sum(widths[:i]), width))
            first += count * len(widths)
        assert first == len(partials)
        spans_table = np.array([(0, count, 0, len(parts))])
        _rworker.merge_partials(
            [partials], np.array(parts), spans_table, list(self.layer.sinks), merged, self.model_dtype, self.isa
        )
        self.length += count
        return o, merged


def cut(rows: Rows, begin: int, end: int) -> Rows:
    return Rows(rows.q[begin:end], rows.k[begin:end], rows.v[begin:end])


def widths_of(num_splits: int) -> list[int]:
    """Return the widths of subtrees that a binary counter leaves of so many splits."""
    return [1 << bit for bit in reversed(range(20)) if num_splits >> bit & 1]


def nodes(context_len: int, num_rows: int, mode: int) -> int:
    splits = (context_len + num_rows - 1) // SPLIT + 1
    return [0, 0, bin(splits).count("1"), 1][mode]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("model_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_ranges_give_the_bits_of_a_whole_sequence(name: str, model_dtype: str, kv_dtype: str, isa: str) -> None:
    """Three ranges of 1,024 tokens and a tail longer than a split give the same bits, for one and several rows."""
    layer, rng = LAYERS[name], np.random.default_rng(1)
    both = Both(layer, model_dtype=model_dtype, kv_dtype=kv_dtype, isa=isa, num_threads=2)
    both.fill([1024, 2048, 3072], random_rows(rng, layer, 3072 + 505))
    for count in (1, 5, 1, 30, 1):
        o, merged = both.attend(random_rows(rng, layer, count))
        np.testing.assert_array_equal(merged, o)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 2200),
    st.sampled_from([1, 2, 40]),
    st.sampled_from(list(LAYERS)),
    st.integers(1, 3),
)
def test_ranges_of_any_size(log2: int, closed: int, tail: int, count: int, name: str, threads: int) -> None:
    """The tail may just be full or just begin, and rows may lie beyond a window's end."""
    size = SPLIT << log2
    closed, tail = min(closed, 9000 // size), min(tail, size - count)
    layer, rng = LAYERS[name], np.random.default_rng(log2)
    both = Both(layer, num_threads=threads)
    rows = random_rows(rng, layer, closed * size + tail)
    both.fill([size * (i + 1) for i in range(closed)], rows)
    o, merged = both.attend(random_rows(rng, layer, count))
    np.testing.assert_array_equal(merged, o)


def joined(splits: list[np.ndarray]) -> np.ndarray:
    """Merge partial results with maxima of 0 by adding them; return [1 + value_head_dim] float32."""
    stack: list[tuple[int, np.ndarray]] = []
    for split in splits:
        stack.append((1, split))
        while len(stack) > 1 and stack[-2][0] == stack[-1][0]:
            (width, low), (_, high) = stack[-2:]
            stack[-2:] = [(2 * width, low + high)]
    total = stack[0][1]
    for _, node in stack[1:]:
        total = total + node
    return total


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 7, 8, 11, 14])
def test_splits_are_merged_in_a_fixed_tree(num_splits: int) -> None:
    """Queries of 0 weigh all tokens alike, and the sum of each split comes from reading that split as a range."""
    layer, rng = Layer(1, 1, 16, 16), np.random.default_rng(num_splits)
    both = Both(layer)
    rows = random_rows(rng, layer, num_splits * SPLIT)
    both.fill([SPLIT * (i + 1) for i in range(num_splits - 1)], cut(rows, 0, num_splits * SPLIT - 1))
    last = cut(rows, num_splits * SPLIT - 1, num_splits * SPLIT)
    last.q[:] = 0
    spans = [(100 + i, both.length - i * SPLIT, 1, READ) for i in range(num_splits - 1)]
    spans += [(WHOLE, both.length, 1, ATTEND), (TAIL, SPLIT - 1, 1, PARTIAL)]
    o, partials = both.step(spans, [last] * len(spans))
    assert (partials[:, 0, 0] == 0).all() and (partials[:, 0, 1] == SPLIT).all()
    total = joined([each[0, 1:] for each in partials])
    np.testing.assert_array_equal(o[0, 0], total[1:] * (np.float32(1) / total[0]))


def test_siblings_read_a_closed_range_once() -> None:
    """Three sequences' rows read a closed range's bytes once, and their results are those of each row alone."""
    layer, rng = LAYERS["gqa"], np.random.default_rng(3)
    both = Both(layer, num_threads=2)
    both.fill([1024], random_rows(rng, layer, 1024 + 1))
    queries = [random_rows(rng, layer, 1) for _ in range(3)]
    alone = [both.step([(100, 1030 + i, 1, READ)], [queries[i]])[1] for i in range(3)]
    before = both.worker.statistics()["bytes_read"]
    both.step([(100, 1030, 1, READ)], queries[:1])
    once = both.worker.statistics()["bytes_read"] - before
    _, together = both.step([(100, 1030 + i, 1, READ) for i in range(3)], queries)
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert both.worker.statistics()["bytes_read"] - before == 2 * once


def test_a_fork_beside_its_closed_range() -> None:
    """One sequence attends its own blocks while others read them as a range, and all get the bits they get alone."""
    layer, rng = LAYERS["window"], np.random.default_rng(4)
    both = Both(layer)
    both.fill([1024], random_rows(rng, layer, 1024 + 1))
    new, read = random_rows(rng, layer, 1), random_rows(rng, layer, 3)
    fork, drop = (FORK, 5, 100, 1024), (RELEASE, 5, 0, 0)
    o, _ = both.step([(5, 1024, 1, ATTEND)], [new], [fork])
    _, partials = both.step([(100, 2000, 3, READ)], [read], [drop])
    spans = [(100, 2000, 3, READ), (5, 1024, 1, ATTEND)]
    again = both.step(spans, [read, new], [fork])
    np.testing.assert_array_equal(again[0], o)
    np.testing.assert_array_equal(again[1], partials)


@pytest.mark.parametrize(
    ("span", "error"),
    [
        ((9, 1024, 1, READ), "sequence 9 is unknown"),
        ((TAIL, 2000, 1, READ), "it holds 1 tokens; a closed range has 512 times a power of two"),
        ((100, 1023, 1, READ), "context_len is 1023; rows that read a range of 1024 tokens come after it"),
        ((100, 1 << 62, 1, READ), "context_len is 4611686018427387904"),
        ((100, 1024, 0, READ), "num_rows is 0"),
        ((100, 1024, 1 << 40, READ), "num_rows is 1099511627776"),
        ((100, 1024, 1, 4), "mode 4 is unknown; it must be 0"),
        ((100, 1024, 1, -1), "mode -1 is unknown"),
    ],
)
def test_refused_spans(span: tuple[int, int, int, int], error: str) -> None:
    both = Both(LAYERS["gqa"])
    both.fill([1024], random_rows(np.random.default_rng(0), both.layer, 1025))
    before = both.worker.statistics()
    with pytest.raises((ValueError, KeyError), match=error):
        both.worker.begin_step(table([]), [table([span])])
    assert both.worker.statistics() == before


def test_refused_orders_and_arrays() -> None:
    both = Both(LAYERS["gqa"])
    both.fill([1024], random_rows(np.random.default_rng(0), both.layer, 1025))
    read, partial, attend = (100, 1025, 1, READ), (TAIL, 1, 1, PARTIAL), (WHOLE, 1025, 1, ATTEND)
    for wrong in ([attend, read], [partial, attend], [partial, read], [(3, 0, 1, APPEND), partial]):
        with pytest.raises(ValueError, match="the order read, attend, partial, append"):
            both.worker.begin_step(table([]), [table(wrong)])
    both.worker.begin_step(table([]), [table([read, attend, partial])])
    q, k, v = (np.zeros((rows, heads, dim), np.float32) for rows, heads, dim in ((3, 4, 32), (2, 2, 32), (2, 2, 24)))
    o, partials = np.zeros((1, 4, 24), np.float32), np.zeros((2, 4, 26), np.float32)
    locked = partials.copy()
    locked.setflags(write=False)
    for wrong_partials, message in [
        (None, "partials is None, and this mini-batch has 2 rows"),
        (partials[:1], "partials must be a C-contiguous"),
        (partials.astype(np.float64), "partials must be a C-contiguous"),
        (partials[:, :, ::2], "partials must be a C-contiguous"),
        (locked, "partials is read-only"),
    ]:
        with pytest.raises(ValueError, match=message):
            both.worker.run(0, 0, q, k, v, o, wrong_partials)
    with pytest.raises(ValueError, match=r"q must be .* shape \(3, 4, 32\)"):
        both.worker.run(0, 0, q[:2], k, v, o, partials)
    both.worker.run(0, 0, q, k, v, o, partials)


@pytest.mark.parametrize(
    ("parts", "spans", "error"),
    [
        ([(1, 0, 1, 0, 1)], [(0, 1, 0, 1)], "there is no array 1"),
        ([(0, 4, 1, 0, 1)], [(0, 1, 0, 1)], "are not among the 4"),
        ([(0, 0, 3, 0, 1)], [(0, 3, 0, 1)], "are not among the 4"),
        ([(0, 0, 0, 0, 1)], [(0, 1, 0, 1)], "are not among the 4"),
        ([(0, 0, 1, 0, 3)], [(0, 1, 0, 1)], "powers of two of splits"),
        ([(0, 0, 1, 1, 2)], [(0, 1, 0, 1)], "powers of two of splits"),
        ([(0, 0, 1, 0, 2), (0, 1, 1, 3, 1)], [(0, 1, 0, 2)], "parts follow one another"),
        ([(0, 0, 1, -1, 1)], [(0, 1, 0, 1)], "parts follow one another"),
        ([(0, 0, 1, 0, 1)], [(3, 1, 0, 1)], "out has 3"),
        ([(0, 0, 1, 0, 1)], [(-1, 1, 0, 1)], "out has 3"),
        ([(0, 0, 1, 0, 1)], [(0, 1, 0, 2)], "spans must name all parts in order"),
        ([(0, 0, 1, 0, 1)], [(0, 1, 1, 1)], "spans must name all parts in order"),
        ([(0, 0, 1, 0)], [(0, 1, 0, 1)], r"parts must be an int64 array of shape \(n, 5\)"),
    ],
)
def test_refused_merges(parts: list, spans: list, error: str) -> None:
    partials, out = np.zeros((4, 2, 10), np.float32), np.zeros((3, 2, 8), np.float32)
    with pytest.raises(ValueError, match=error):
        _rworker.merge_partials([partials], np.array(parts), np.array(spans), [], out, "float32")


def test_merges_refuse_other_arrays() -> None:
    partials, out = np.zeros((4, 2, 10), np.float32), np.zeros((3, 2, 8), np.float32)
    parts, spans = np.array([(0, 0, 1, 0, 1)]), np.array([(0, 1, 0, 1)])
    with pytest.raises(ValueError, match="out must be a writeable"):
        _rworker.merge_partials([partials], parts, spans, [], out, "bfloat16")
    with pytest.raises(ValueError, match=r"partials must be .* shape \(rows, 2, 10\)"):
        _rworker.merge_partials([partials[:, :, 1:]], parts, spans, [], out, "float32")
    with pytest.raises(ValueError, match="sinks must be empty or one per head"):
        _rworker.merge_partials([partials], parts, spans, [0.5], out, "float32")
    with pytest.raises(TypeError):
        _rworker.merge_partials([partials], parts.astype(float), spans, [], out, "float32")


@pytest.mark.parametrize("model_dtype", ["float32", "float16", "bfloat16"])
def test_all_instruction_sets_but_scalar_merge_alike(model_dtype: str) -> None:
    """The S-worker may therefore merge with another instruction set than the R-workers'."""
    rng = np.random.default_rng(7)
    partials = rng.standard_normal((9 * 40, 3, 2 + 36), dtype=np.float32) * 4
    partials[..., 1] = np.abs(partials[..., 1]) + 1
    partials[5, :, 0], partials[5, :, 1:] = -np.inf, 0
    parts = np.array([(0, i, 9, i if i < 8 else 8, 1) for i in range(9)])
    merged = set()
    for isa in ISAS:
        out = to_bits(np.zeros((40, 3, 36), np.float32), model_dtype)
        _rworker.merge_partials([partials], parts, np.array([(0, 40, 0, 9)]), [0.5, -3.0, 9.0], out, model_dtype, isa)
        if isa != "scalar":
            merged.add(out.tobytes())
    assert len(merged) <= 1
