"""An R-worker with a filled cache and a single layer, whose attention can be called repeatedly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from fastdecode import _rworker
from fastdecode.core.dtypes import ITEM_BYTES, from_wire, to_wire
from fastdecode.core.errors import CapacityError
from fastdecode.core.machine import available_memory_bytes, usable_cores
from fastdecode.core.types import SPLIT_TOKENS, SpanMode, Verb
from fastdecode.engine.compose.backends import tuning
from fastdecode.perfmodel.lab.measure.attention_shape import BLOCK_SIZE, AttentionShape

PAYLOAD_BYTES = 16 << 20
"""Size of the random keys, and of the random values, that fill the cache repeatedly."""

CHECKED_BYTES = 256 << 20
"""Most float32 keys and values for comparison with the oracle; at least one sequence is compared."""

NO_CONTROLS = np.zeros((0, 4), np.int64)


class FilledCache:
    """Sequences of random keys and values in scattered blocks, as after some time of serving.

    ``lengths``: tokens per sequence, int64 [batch_size], including the ``q_len`` tokens that a call adds. After each
    call these tokens are dropped again.
    """

    def __init__(self, shape: AttentionShape, lengths: np.ndarray, seed: int) -> None:
        self.shape, self.lengths = shape, lengths
        self._rng = np.random.default_rng(seed)
        self.worker = _open_worker(shape, lengths)
        rows = min(max(PAYLOAD_BYTES // _row_bytes(shape), 2 * BLOCK_SIZE), 2 * int(lengths.sum()) + 2 * BLOCK_SIZE)
        layer = shape.layout.layers[0]
        (_, q_dim), (_, key_dim), (_, value_dim), (_, o_dim) = layer.row_shapes
        dims = key_dim, value_dim
        self._keys, self._values = (self._random(rows, shape.num_kv_heads, dim) for dim in dims)
        self._rows_per_step = rows // 2
        self._fill()
        new_rows = len(lengths) * shape.q_len
        self._q = self._random(new_rows, shape.num_heads, q_dim)
        self._k, self._v = (self._random(new_rows, shape.num_kv_heads, dim) for dim in dims)
        self._out = np.empty((new_rows, shape.num_heads, o_dim), self._q.dtype)
        self._spans = self._table((i, length - shape.q_len, shape.q_len, 1) for i, length in enumerate(lengths))

    def call(self, q_len: int | None = None) -> tuple[float, float]:
        """Return the seconds to begin a step, and the seconds of its only layer from ``submit`` to the end of ``wait``.
        ``q_len``: new tokens per sequence; None: as many as the shape says.
        """
        q_len = self.shape.q_len if q_len is None else q_len
        spans, rows = self._spans.copy(), len(self.lengths) * q_len
        spans[:, 2] = q_len
        start = time.perf_counter()
        self.worker.begin_step(NO_CONTROLS, [spans])
        planned = time.perf_counter()
        self.worker.submit(0, 0, self._q[:rows], self._k[:rows], self._v[:rows], self._out[:rows])
        self.worker.wait(0)
        done = time.perf_counter()
        self.worker.abandon_step()
        return planned - start, done - planned

    def commit_and_check(self) -> float:
        """Commit the last call's tokens; return the largest relative error of its output o over some sequences.

        The error is ‖o − exact‖ / ‖exact‖ per row and head, where exact is float64 attention over the stored cache. For
        an index it is the largest error of the best scores, divided by the best score.
        """
        if self.shape.index_picks:
            return self._commit_and_check_scores()
        self.worker.begin_step(NO_CONTROLS, [self._spans])
        self.worker.submit(0, 0, self._q, self._k, self._v, self._out)
        self.worker.wait(0)
        self.worker.end_step()
        return max(self._error(index) for index in checked_sequences(self.shape, self.lengths))

    def _commit_and_check_scores(self) -> float:
        """Commit the last call's tokens; return the largest relative error of the index's highest scores.

        The spans are marked as last ranges of longer sequences, since only for these does an R-worker return scores.
        """
        picks, q_len, spans = self.shape.index_picks, self.shape.q_len, self._spans.copy()
        spans[:, 3] = SpanMode.PARTIAL
        nodes = np.array([(-(-int(length) // SPLIT_TOKENS)).bit_count() for length in self.lengths])
        ends = np.cumsum(nodes * q_len)
        partials = np.zeros((ends[-1], 1, picks), np.float32)
        self.worker.begin_step(NO_CONTROLS, [spans])
        self.worker.submit(0, 0, self._q, self._k, self._v, self._out[:0], partials)
        self.worker.wait(0)
        self.worker.end_step()
        errors = []
        for index in checked_sequences(self.shape, self.lengths):
            ranks = partials[ends[index] - nodes[index], 0].view(np.uint32)
            errors.append(self._score_error(index, ranks[: self.lengths[index]]))
        return max(errors)

    def _score_error(self, index: int, ranks: np.ndarray) -> float:
        """Return the largest error of the best scores. ``ranks``: scores encoded as in `rworker_cpp/src/picks.cpp`."""
        shape, row = self.shape, (index + 1) * self.shape.q_len - 1
        keys = self.worker.read_tokens(index, 0)[0][:, 0].astype(np.float64)
        q = from_wire(self._q[row, :, : shape.head_dim], shape.model_dtype).astype(np.float64)
        weights = np.ascontiguousarray(self._q[row, :, shape.head_dim :]).view(np.float32)[:, :1]
        products = np.maximum(q @ keys.T * shape.layout.layers[0].scale, 0)
        best = np.sort((products * weights).sum(0))[::-1][: len(ranks)]
        bits = np.where(ranks >> 31, ranks ^ np.uint32(1 << 31), ~ranks)
        return float(np.abs(bits.view(np.float32) - best).max() / np.abs(best).max())

    def close(self) -> None:
        """Free the cache's memory."""
        self.worker.close()

    def _error(self, index: int) -> float:
        shape, rows = self.shape, slice(index * self.shape.q_len, (index + 1) * self.shape.q_len)
        keys, values = self.worker.read_tokens(index, 0)
        values = keys[..., : shape.latent_dim] if shape.latent_dim else values
        q, out = (from_wire(rows_of[rows], shape.model_dtype) for rows_of in (self._q, self._out))
        return relative_error(out, exact_attention(q, keys, values, shape.layout.layers[0].scale))

    def _fill(self) -> None:
        prefix, count = self.shape.shared_prefix_len, len(self.lengths)
        if prefix:
            for begin in range(0, prefix, BLOCK_SIZE):
                self._append([(0, begin, min(BLOCK_SIZE, prefix - begin))])
            self.worker.begin_step(self._table((Verb.FORK, i, 0, prefix) for i in range(1, count)), [])
            self.worker.end_step()
        for begin in range(prefix // BLOCK_SIZE * BLOCK_SIZE, int(self.lengths.max()), BLOCK_SIZE):
            self._append_block(max(begin, prefix), begin + BLOCK_SIZE)

    def _append_block(self, begin: int, end: int) -> None:
        """Append tokens ``begin`` to ``end`` of every sequence that is long enough, in a random order of sequences."""
        pieces = []
        for index in self._rng.permutation(np.flatnonzero(self.lengths - self.shape.q_len > begin)):
            pieces.append((int(index), begin, min(end, int(self.lengths[index]) - self.shape.q_len) - begin))
            if (len(pieces) + 1) * BLOCK_SIZE > self._rows_per_step:
                self._append(pieces)
                pieces = []
        if pieces:
            self._append(pieces)

    def _append(self, pieces: list[tuple[int, int, int]]) -> None:
        """Store random rows for each piece ``(sequence, first token, number of tokens)``."""
        num_rows = sum(tokens for _, _, tokens in pieces)
        first = int(self._rng.integers(0, len(self._keys) - num_rows + 1))
        layer, dtype = self.shape.layout.layers[0], self._keys.dtype
        no_q, no_out = (np.empty((0, *layer.row_shapes[part]), dtype) for part in (0, 3))
        self.worker.begin_step(NO_CONTROLS, [self._table((*piece, 0) for piece in pieces)])
        rows = slice(first, first + num_rows)
        self.worker.submit(0, 0, no_q, self._keys[rows], self._values[rows], no_out)
        self.worker.wait(0)
        self.worker.end_step()

    def _random(self, num_rows: int, num_heads: int, dim: int) -> np.ndarray:
        values = self._rng.standard_normal((num_rows, num_heads, dim), dtype=np.float32)
        return to_wire(values, self.shape.model_dtype)

    @staticmethod
    def _table(rows: Iterator[tuple[int, int, int, int]]) -> np.ndarray:
        return np.array(list(rows), np.int64).reshape(-1, 4)


def checked_sequences(shape: AttentionShape, lengths: np.ndarray) -> list[int]:
    """Return the indices of the sequences whose output is checked: first, middle and last, up to CHECKED_BYTES."""
    chosen = list(dict.fromkeys([0, len(lengths) // 2, len(lengths) - 1]))
    token_bytes = shape.layout.layers[0].kv_elements * 4
    spent = np.cumsum(lengths[chosen]) * token_bytes
    return [index for index, total in zip(chosen, spent, strict=True) if total <= CHECKED_BYTES or index == chosen[0]]


def check_memory(caches: Sequence[tuple[AttentionShape, np.ndarray]], read_bytes: int) -> None:
    """Raise CapacityError unless ``caches``, pairs of shape and sequence lengths, fit the memory with ``read_bytes``.

    ``read_bytes``: the buffer for the peak read rate. Memory for :func:`exact_attention` on the first cache is
    included.
    """
    shape, lengths = caches[0]
    longest = int(lengths[checked_sequences(shape, lengths)].max())
    check = longest * shape.layout.layers[0].kv_elements * 6
    needed, free = sum(map(_cache_bytes, *zip(*caches, strict=True))) + read_bytes + check, available_memory_bytes()
    if needed > free:
        raise CapacityError(
            f"{len(lengths)} sequences of context_len {shape.context_len.label} take {needed / 2**30:.3g} GiB with the "
            f"buffer of the read peak, and {free / 2**30:.3g} GiB are free; give a smaller batch_size or cache_bytes"
        )


def _cache_bytes(shape: AttentionShape, lengths: np.ndarray) -> int:
    """Return the bytes of a FilledCache, including the random rows that fill it and the arguments of its calls."""
    blocks = _num_blocks(lengths) * _rworker.block_bytes(list(shape.layout.layers), shape.kv_cache_dtype, BLOCK_SIZE)
    rows = len(lengths) * shape.q_len * 2 * (_row_bytes(shape) + shape.num_heads * shape.head_dim * 4)
    return blocks + rows + 4 * PAYLOAD_BYTES


def _open_worker(shape: AttentionShape, lengths: np.ndarray) -> _rworker.RWorker:
    return _rworker.RWorker(
        layers=list(shape.layout.layers),
        model_dtype=shape.model_dtype,
        kv_dtype=shape.kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_blocks=_num_blocks(lengths),
        num_threads=shape.threads,
        cores=usable_cores()[: shape.threads],
        isa=shape.isa,
        read_ahead=tuning().read_ahead,
    )


def _num_blocks(lengths: np.ndarray) -> int:
    return int((-(-lengths // BLOCK_SIZE)).sum())


def _row_bytes(shape: AttentionShape) -> int:
    return shape.num_kv_heads * shape.head_dim * ITEM_BYTES[shape.model_dtype]


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Return float64 o [q_len, num_heads, dim] of a sequence's last tokens; each attends to itself and all before.

    ``q``: [q_len, num_heads, dim]; ``k`` and ``v``: [length, num_kv_heads, dim].
    """
    q_len, num_heads, _ = q.shape
    length, num_kv_heads, value_dim = v.shape
    group = num_heads // num_kv_heads
    hidden = np.arange(length) > np.arange(length - q_len, length)[:, None, None]
    out = np.empty((q_len, num_heads, value_dim))
    for head in range(num_kv_heads):
        own = slice(head * group, (head + 1) * group)
        scores = np.where(hidden, -np.inf, q[:, own].astype(np.float64) @ k[:, head].astype(np.float64).T * scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, own] = (weights / weights.sum(axis=-1, keepdims=True)) @ v[:, head].astype(np.float64)
    return out


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest ‖got − want‖ / ‖want‖ over the last axis."""
    error = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return float((error / np.maximum(np.linalg.norm(want, axis=-1), 1e-30)).max())
