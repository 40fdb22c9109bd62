"""Decode attention of sequences that share a prefix, against separate copies of the same, in one sitting (A B A B).

python benchmarks/shared_prefix.py --kv-dtypes bfloat16,float16 --threads 1,2
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from fastdecode import _rworker
from fastdecode.types import ITEM_BYTES

HEAD_DIM = 128
BLOCK_SIZE = 64
FORK = 0


class Decoder:
    """One R-worker with many sequences of the same prefix, stored once or once each, and own tokens behind it."""

    def __init__(self, args: argparse.Namespace, kv_dtype: str, num_threads: int, share: bool) -> None:
        self.num_heads, self.num_kv_heads, count = args.kv_heads * args.group, args.kv_heads, args.sequences
        prefix_blocks = -(-args.shared // BLOCK_SIZE) * (1 if share else count)
        self.worker = _rworker.RWorker(
            layers=[(self.num_heads, self.num_kv_heads, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5, 0, 0.0, [], [])],
            model_dtype="float32",
            kv_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=prefix_blocks + count * (args.own // BLOCK_SIZE + 2),
            num_threads=num_threads,
        )
        prefix = self.random_rows(0, args.shared)
        self.append([(i, 0, args.shared, 0) for i in range(1 if share else count)], prefix)
        if share:
            self.append([], prefix, [(FORK, i, 0, args.shared) for i in range(1, count)])
        self.append([(i, args.shared, args.own - 1, 0) for i in range(count)], self.random_rows(1, args.own - 1))
        self.spans = table([(i, args.shared + args.own - 1, 1, 1) for i in range(count)])
        self.q = np.random.default_rng(2).standard_normal((count, self.num_heads, HEAD_DIM), dtype=np.float32)
        self.k = self.random_rows(3, count)
        self.out = np.empty_like(self.q)

    def random_rows(self, seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((count, self.num_kv_heads, HEAD_DIM), dtype=np.float32)

    def append(self, spans: list[tuple], rows: np.ndarray, controls: list[tuple] | None = None) -> None:
        """The controls, then the same rows to every span."""
        no_queries = np.zeros((0, self.num_heads, HEAD_DIM), np.float32)
        for i, span in enumerate(spans or [None]):
            self.worker.begin_step(table(controls or [] if i == 0 else []), [table([span] if span else [])])
            payload = rows if span else rows[:0]
            self.worker.submit(0, 0, no_queries, payload, payload, no_queries)
            self.worker.wait(0)
            self.worker.end_step()

    def seconds(self) -> float:
        """Wall time of one layer's attention."""
        self.worker.begin_step(table([]), [self.spans])
        start = time.perf_counter()
        self.worker.submit(0, 0, self.q, self.k, self.k, self.out)
        self.worker.wait(0)
        seconds = time.perf_counter() - start
        self.worker.abandon_step()
        return seconds


def table(rows: list[tuple]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def compare(args: argparse.Namespace, kv_dtype: str, num_threads: int) -> str:
    """Times separate copies (A) and a shared prefix (B) in turn, and says how they compare."""
    separate, shared = (Decoder(args, kv_dtype, num_threads, share) for share in (False, True))
    pairs = [(separate.seconds(), shared.seconds()) for _ in range(args.repeats + 1)][1:]
    np.testing.assert_array_equal(separate.out, shared.out)
    ratios = [a / b for a, b in pairs]
    separate_ms, shared_ms = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    tokens = args.sequences * (args.shared + args.own)
    gigabytes = tokens * args.kv_heads * 2 * HEAD_DIM * ITEM_BYTES[kv_dtype] / 1e9
    multiply_adds = tokens * args.kv_heads * args.group * 2 * HEAD_DIM / 1e9
    separate.worker.close()
    shared.worker.close()
    return (
        f"{num_threads} threads  {kv_dtype:8}"
        f"  separate {separate_ms:7.2f} ms ({gigabytes / separate_ms * 1e3:5.1f} GB/s)"
        f"  shared {shared_ms:7.2f} ms ({multiply_adds / shared_ms * 1e3:5.1f} G multiply-adds/s)"
        f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-dtypes", default="bfloat16,float16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--shared", type=int, default=4096, help="tokens of the prefix")
    parser.add_argument("--own", type=int, default=128, help="tokens of each sequence after it")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=1, help="query heads per KV head")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for num_threads in map(int, args.threads.split(",")):
        for kv_dtype in args.kv_dtypes.split(","):
            print(compare(args, kv_dtype, num_threads), flush=True)


if __name__ == "__main__":
    main()
