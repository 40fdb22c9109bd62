"""Decode attention of the C++ R-worker, printed beside the read bandwidth measured in the same run.

python benchmarks/attention.py --kv-dtypes bfloat16 --groups 1,4 --threads 1,2
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from fastdecode import _rworker
from fastdecode.types import LayerLayout

HEAD_DIM = 128
PEAK_BYTES = 1 << 30


def measure(
    kv_dtype: str, group: int, context: int, num_threads: int, cache_bytes: int, repeats: int, isa: str
) -> float:
    """Median GB/s of keys and values read by one layer call over a cache of about ``cache_bytes``."""
    num_kv_heads = 8
    token_bytes = LayerLayout(num_kv_heads, num_kv_heads, HEAD_DIM, HEAD_DIM, 1.0).kv_bytes_per_token(kv_dtype)
    num_sequences = max(1, cache_bytes // (token_bytes * context))
    worker = _rworker.RWorker(
        layers=[(num_kv_heads * group, num_kv_heads, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5, 0, 0.0, [])],
        model_dtype="float32",
        kv_dtype=kv_dtype,
        block_size=64,
        num_blocks=num_sequences * (context // 64 + 2),
        num_threads=num_threads,
        isa=isa,
    )
    rng = np.random.default_rng(0)
    prompt = rng.standard_normal((context - 1, num_kv_heads, HEAD_DIM), dtype=np.float32)
    no_controls = np.zeros((0, 4), np.int64)
    no_queries = np.zeros((0, num_kv_heads * group, HEAD_DIM), np.float32)
    for i in range(num_sequences):
        worker.begin_step(no_controls, [np.array([[i, 0, context - 1, 0]])])
        worker.submit(0, 0, no_queries, prompt, prompt, no_queries)
        worker.wait(0)
        worker.end_step()
    q = rng.standard_normal((num_sequences, num_kv_heads * group, HEAD_DIM), dtype=np.float32)
    k = rng.standard_normal((num_sequences, num_kv_heads, HEAD_DIM), dtype=np.float32)
    out = np.empty_like(q)
    spans = np.array([[i, context - 1, 1, 1] for i in range(num_sequences)])
    seconds = []
    for _ in range(repeats):
        worker.begin_step(no_controls, [spans])
        start = time.perf_counter()
        worker.submit(0, 0, q, k, k, out)
        worker.wait(0)
        seconds.append(time.perf_counter() - start)
        worker.abandon_step()
    worker.close()
    return num_sequences * context * token_bytes / statistics.median(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-dtypes", default="float32,float16,bfloat16,int8,int4")
    parser.add_argument("--groups", default="1,4,8", help="query heads per KV head")
    parser.add_argument("--contexts", default="1024", help="cached tokens per sequence")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--cache-mib", type=int, default=512, help="size of the cache read by each call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--isa", default="auto")
    args = parser.parse_args()
    for num_threads in map(int, args.threads.split(",")):
        for kv_dtype in args.kv_dtypes.split(","):
            for group in map(int, args.groups.split(",")):
                for context in map(int, args.contexts.split(",")):
                    before = _rworker.read_peak(num_threads, PEAK_BYTES, 5)
                    rate = measure(kv_dtype, group, context, num_threads, args.cache_mib << 20, args.repeats, args.isa)
                    peak = (before + _rworker.read_peak(num_threads, PEAK_BYTES, 5)) / 2
                    print(
                        f"{num_threads} threads  {kv_dtype:8}  group {group:2}  context {context:5}  "
                        f"{rate:6.1f} GB/s of {peak:5.1f} read peak  ({rate / peak:.2f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
