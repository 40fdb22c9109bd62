"""R time of a verification: one to nine new tokens of each sequence in turns (A B A B), beside the roofline's ratio.

python benchmarks/verification.py --kv-cache-dtypes bfloat16 --num-kv-heads 32,8
"""

from __future__ import annotations

import argparse

import numpy as np

from fastdecode import _rworker
from fastdecode.machine import usable_cores
from fastdecode.measure.attention_cache import FilledCache
from fastdecode.measure.attention_shape import AttentionShape, ContextLen
from fastdecode.types import READ_AHEAD


def shape_of(args: argparse.Namespace, dtype: str, num_kv_heads: int) -> AttentionShape:
    return AttentionShape(
        isa=args.isa,
        kv_cache_dtype=dtype,
        num_heads=args.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=args.head_dim,
        context_len=ContextLen.parse(args.context_len),
        batch_size=None,
        q_len=max(args.q_lens),
        threads=args.threads,
    )


def least_seconds(shape: AttentionShape, lengths: np.ndarray, q_len: int, read: float, mac: float) -> float:
    """By the roofline: ``read`` and ``mac`` in 1e9 bytes and multiply-adds a second."""
    tokens = int(lengths.sum())
    multiply_adds = tokens * shape.layout.layers[0].kv_elements_per_token * shape.group * q_len
    return max(tokens * shape.layout.kv_bytes_per_token / read, multiply_adds / mac) / 1e9


def measure(args: argparse.Namespace, shape: AttentionShape) -> list[str]:
    """A line per q_len."""
    lengths = shape.lengths(args.cache_mib << 20, 0)
    cores = usable_cores()[: shape.threads]
    peaks = _rworker.Peaks(num_threads=shape.threads, num_bytes=args.cache_mib << 20, cores=cores, isa=shape.isa)
    cache = FilledCache(shape, lengths, 0)
    for q_len in args.q_lens:
        cache.call(q_len)
    seconds, limits = [], []
    for _ in range(args.rounds):
        read = max(peaks.read_scattered(piece_bytes=shape.piece_bytes, read_ahead=each) for each in (None, *READ_AHEAD))
        mac = peaks.multiply_add(kv_dtype=shape.kv_cache_dtype)
        limits.append([least_seconds(shape, lengths, q_len, read, mac) for q_len in args.q_lens])
        seconds.append([cache.call(q_len)[1] for q_len in args.q_lens])
    cache.close()
    times, least = np.array(seconds), np.median(limits, axis=0)
    ratios = times / times[:, :1]
    return [
        f"{shape.kv_cache_dtype:8} group {shape.group:2}  {q_len:2} rows  {np.median(times[:, i]) * 1e3:7.2f} ms  "
        f"ratio {np.median(ratios[:, i]):5.2f} ({ratios[:, i].min():.2f}-{ratios[:, i].max():.2f})  roofline's "
        f"{least[i] / least[0]:5.2f}  of roofline {least[i] / np.median(times[:, i]):.2f}"
        for i, q_len in enumerate(args.q_lens)
    ]


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-cache-dtypes", default="bfloat16,float16,float32,int8,int4")
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=numbers, default=[32, 8, 4])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context-len", default="2048")
    parser.add_argument("--q-lens", type=numbers, default=[1, 2, 3, 5, 9], help="rows; the first is what others are to")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--cache-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for dtype in args.kv_cache_dtypes.split(","):
        for num_kv_heads in args.num_kv_heads:
            print("\n".join(measure(args, shape_of(args, dtype, num_kv_heads))), flush=True)


if __name__ == "__main__":
    main()
