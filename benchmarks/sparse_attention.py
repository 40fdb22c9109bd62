"""Measure the cost of a token that attends to the tokens an index picks: python benchmarks/sparse_attention.py

One decode of one layer over random rows of a long sequence, on one R-worker in this process, at DeepSeek-V3.2's shape
(64 index heads of 128 dims, 2,048 tokens picked; 128 query heads over latent rows of 576) and at MiniMax-M3's (4 index
heads of 128 dims, 16 blocks of 128 tokens picked per KV head; 64 query heads, 4 KV heads of 128 dims), in bfloat16.
Printed for each length: milliseconds of the index's scan and of attention, as medians; GB/s that each reads, and GB/s
of the same pieces read in random order; each one's fraction of the multiply-add peak, and of the roofline.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from fastdecode import _rworker
from fastdecode.core.types import READ_AHEAD
from fastdecode.kinds import Dense, Index, Latent, Layer

DEEPSEEK = (
    Index(64, 128, 0.1, picks=2048),
    Latent(128, 1, 576, 512, 0.07, picked_by=0),
)
MINIMAX = (
    Index(4, 128, 1.0, picks=16, pick_block=128, pick_local=1),
    Dense(64, 4, 128, 128, 0.09, picked_by=0),
)
SHAPES = {"deepseek-v3.2": DEEPSEEK, "minimax-m3": MINIMAX}
BLOCK_SIZE, APPENDED, PEAK_BYTES = 128, 1 << 14, 1 << 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes to measure (all)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[65_536, 1_048_576], help="lengths (65536 1048576)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the R-worker (1)")
    parser.add_argument("--repeats", type=int, default=9, help="number of repeats (9)")
    parser.add_argument(
        "--read-ahead",
        choices=READ_AHEAD,
        default="run",
        help="way to prefetch, which an R-worker measures at its start (run)",
    )
    options = parser.parse_args()
    peaks = _rworker.Peaks(num_threads=options.threads, num_bytes=PEAK_BYTES * options.threads)
    for name in options.shapes:
        for num_tokens in options.tokens:
            figures = measured(SHAPES[name], num_tokens, options, peaks)
            print(json.dumps({"shape": name, "tokens": num_tokens} | figures), flush=True)


def measured(
    layers: tuple[Layer, ...], num_tokens: int, options: argparse.Namespace, peaks: _rworker.Peaks
) -> dict[str, float]:
    """Return the figures of one shape and one sequence length."""
    rng = np.random.default_rng(1)
    worker = _rworker.RWorker(
        layers=list(layers),
        model_dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=(num_tokens + options.repeats) // BLOCK_SIZE + 2,
        num_threads=options.threads,
        read_ahead=options.read_ahead,
    )
    for start in range(0, num_tokens, APPENDED):
        _step(worker, layers, rng, (1, start, min(APPENDED, num_tokens - start), 0))
    seconds = np.array(
        [_step(worker, layers, rng, (1, num_tokens + each, 1, 1)) for each in range(options.repeats + 1)]
    )
    index_seconds, seconds = np.median(seconds[1:], axis=0)
    index, layer = layers
    index_bytes = num_tokens * index.token_bytes("bfloat16")
    seen = index.picks * (index.pick_block or 1)
    row_bytes = layer.token_bytes("bfloat16")
    piece = row_bytes * index.pick_block // layer.num_kv_heads if index.pick_block else row_bytes
    scattered = max(peaks.read_scattered(piece_bytes=piece, read_ahead=each) for each in (*READ_AHEAD, None))
    macs = peaks.multiply_add(kv_dtype="bfloat16")
    index_macs = num_tokens * index.num_heads * index.key_head_dim
    layer_macs = seen * layer.num_heads * (layer.key_head_dim + layer.value_head_dim)
    index_limit, layer_limit = (
        min(scattered, macs * num_bytes / num_macs)
        for num_bytes, num_macs in ((index_bytes, index_macs), (seen * row_bytes, layer_macs))
    )
    return {
        "index_of_limit": round(index_bytes / index_seconds / 1e9 / index_limit, 3),
        "attention_of_limit": round(seen * row_bytes / seconds / 1e9 / layer_limit, 3),
        "index_ms": round(1e3 * index_seconds, 3),
        "index_gb_per_s": round(index_bytes / index_seconds / 1e9, 2),
        "index_of_multiply_adds": round(index_macs / index_seconds / 1e9 / macs, 3),
        "attention_ms": round(1e3 * seconds, 3),
        "attention_gb_per_s": round(seen * row_bytes / seconds / 1e9, 2),
        "attention_of_multiply_adds": round(layer_macs / seconds / 1e9 / macs, 3),
        "read_gb_per_s": round(peaks.read(), 2),
        "scattered_gb_per_s": round(scattered, 2),
        "gmac_per_s": round(macs, 1),
    }


def _step(
    worker: _rworker.RWorker, layers: Sequence[Layer], rng: np.random.Generator, span: tuple[int, int, int, int]
) -> list[float]:
    """Run one step with random rows for ``span``; return the seconds of each layer."""
    _, _, count, attends = span
    worker.begin_step(np.zeros((0, 4), np.int64), [np.array([span], np.int64)])
    seconds = []
    for number, layer in enumerate(layers):
        q = rows(rng, count * attends, layer.num_heads, layer.query_dim)
        fresh = (
            count if layer.ranks_tokens or attends else APPENDED // 64
        )  # Index keys must differ, or the first would be picked.
        k, v = (
            np.resize(rows(rng, fresh, layer.num_kv_heads, dim), (count, layer.num_kv_heads, dim))
            for dim in (layer.key_head_dim, layer.stored_value_dim)
        )
        if layer.query_dim > layer.key_head_dim:  # 0x3F80 is 1.0 in bfloat16.
            q[..., layer.key_head_dim :] = (0, 0x3F80)
        o = np.empty((len(q), layer.num_heads, layer.value_head_dim), np.uint16)
        start = time.perf_counter()
        worker.run(0, number, q, k, v, o)
        seconds.append(time.perf_counter() - start)
    worker.end_step()
    return seconds


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random numbers between 0.5 and 2, of both signs, as bfloat16 bits."""
    return rng.integers(0x3F00, 0x4000, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15


if __name__ == "__main__":
    main()
