"""Prompts through one recurrent layer: microseconds of a row and head, and the share of the multiply-add peak.

Gated delta rule (32 heads of 128 x 128) and Mamba-2's scan (80 of 128 x 64), float32, at several rows per sequence.
Counted are the products of the recurrence with each element of a state, four and three (its decay, what is added, its
output, and delta's sum before that); the convolution of queries, keys and values is on top. The peak is measured
between the steps.
"""

from __future__ import annotations

import argparse
from statistics import median

from states import SHAPES, decode_steps, timed

from fastdecode import _rworker

PRODUCTS = {"delta": 4, "scan": 3}
"""Of each element of a state, for a row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 16, 64, 256, 1024], help="of each sequence")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for kind in SHAPES:
        for threads in args.threads:
            peaks = _rworker.Peaks(num_threads=threads, num_bytes=1 << 26)
            for rows in args.rows:
                print(
                    f"{kind:6} {threads} threads, {rows:5d} rows: {figures(kind, threads, rows, peaks, args.repeats)}"
                )


def figures(kind: str, threads: int, rows: int, peaks: _rworker.Peaks, repeats: int) -> str:
    """What a step of some 64 rows, or more, takes."""
    heads, _, key_dim, value_dim = SHAPES[kind]
    num_sequences = max(1, 64 // rows)
    step = decode_steps(kind, threads, num_sequences, "float32", False, rows)
    step()
    samples = [(peaks.multiply_add(kv_dtype="float32") * 1e9, timed(step)) for _ in range(repeats)]
    heads_taken = num_sequences * rows * heads
    products = heads_taken * key_dim * value_dim * PRODUCTS[kind]
    share = median(products / seconds / peak for peak, seconds in samples)
    seconds = median(seconds for _, seconds in samples)
    return f"{seconds / heads_taken * 1e6:.2f} us of a row and head, {share:.2f} of the multiply-add peak"


if __name__ == "__main__":
    main()
