"""Compare a decode step of a recurrent layer over many sequences' states with a loop that reads and writes as much.

The layers are the gated delta rule (32 heads of 128 x 128, as in Qwen3-Next) and Mamba-2's scan (80 heads of 128 x 64).
In turn with them, as many threads multiply numpy arrays by a constant in place: an array of the states' size, and a
larger one that includes the bytes of the convolution and of the rows. Printed: the R-worker's GB/s, counting each state
once read and once written; the median of its ratios to both loops; and how many times longer a step takes if each
step's rows are kept until the next one, as by R-workers with ``--keep-session``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from fastdecode import _rworker
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.kinds import Recurrent

SHAPES = {"delta": (32, 16, 128, 128), "scan": (80, 1, 128, 64)}
"""The heads, groups, key_dim and value_dim of each layer."""

TAPS = 4
CONTROLS, SPANS = np.zeros((0, 4), np.int64), np.int64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--num-sequences", type=int, default=48, help="number of sequences (48)")
    parser.add_argument("--repeats", type=int, default=9, help="number of repeats (9)")
    parser.add_argument("--dtype", default="float32", choices=tuple(WIRE_DTYPE), help="dtype of the states (float32)")
    args = parser.parse_args()
    for kind in SHAPES:
        for threads in args.threads:
            seconds, loop, whole, outliving, state_bytes = times(kind, threads, args)
            ratios = [bare / own for own, bare in zip(seconds, loop, strict=True)]
            of_all = median(bare / own for own, bare in zip(seconds, whole, strict=True))
            kept = median(each / own for own, each in zip(seconds, outliving, strict=True))
            rate = 2 * state_bytes / median(seconds) / 1e9
            print(
                f"{kind:6} {args.dtype} {threads} threads: {rate:5.1f} GB/s, {median(seconds) * 1e3:.1f} ms, "
                f"{median(ratios):.2f} of the loop "
                f"({min(ratios):.2f} to {max(ratios):.2f}), {of_all:.2f} of all bytes', "
                f"{kept:.2f} times as long with --keep-session"
            )


def times(
    kind: str, threads: int, args: argparse.Namespace
) -> tuple[list[float], list[float], list[float], list[float], int]:
    """Return four lists of seconds, measured in turns, and the bytes of all states.
    The lists are: steps of the R-worker, the loop over the states, the loop over all bytes, and steps whose rows are
    kept.
    """
    heads, groups, key_dim, value_dim = SHAPES[kind]
    num_bytes = args.num_sequences * heads * key_dim * value_dim * WIRE_DTYPE[args.dtype].itemsize
    channels, outputs = heads * value_dim + 2 * groups * key_dim, heads * value_dim
    # Elements per channel: the window is read, one row of it written, and the filter and the input are read.
    beside = (TAPS - 1) + 1 + TAPS + 1
    more = args.num_sequences * 4 * (beside * channels + outputs) // 2  # // 2: the loop reads and writes each byte.
    arrays = [np.ones((threads, size // 4 // threads), np.float32) for size in (num_bytes, num_bytes + more)]
    step, kept = (decode_steps(kind, threads, args.num_sequences, args.dtype, keeps) for keeps in (False, True))
    with ThreadPoolExecutor(threads) as pool:

        def bare(parts: np.ndarray) -> Callable[[], None]:
            return lambda: list(pool.map(lambda part: np.multiply(part, np.float32(0.9999), out=part), parts)).clear()

        turns = [step, *map(bare, arrays), kept]
        for turn in turns:
            turn()
        rounds = [[timed(turn) for turn in turns] for _ in range(args.repeats)]
    seconds, loop, whole, outliving = ([one[i] for one in rounds] for i in range(4))
    return seconds, loop, whole, outliving, num_bytes


def decode_steps(
    kind: str, threads: int, num_sequences: int, dtype: str, keeps: bool, num_tokens: int = 1
) -> Callable[[], None]:
    """Return a function that appends ``num_tokens`` tokens to each sequence of an R-worker with one such layer."""
    heads, groups, key_dim, value_dim = SHAPES[kind]
    channels = heads * value_dim + 2 * groups * key_dim
    random = np.random.default_rng(1)
    filters = random.standard_normal(TAPS * channels).astype(np.float32).tobytes()
    scale = key_dim**-0.5 if kind == "delta" else 1.0
    layer = Recurrent(
        heads, value_dim, scale, kind, groups, key_dim, TAPS, 1, True, kind == "delta", channels + 2 * heads, filters,
        dtype=dtype,
        kept_rows=int(keeps), keeps_single=keeps,
    )  # fmt: skip
    worker = _rworker.RWorker(
        layers=[layer], model_dtype="float32", kv_dtype="float32", block_size=16, num_threads=threads,
        num_blocks=num_sequences * (heads * (key_dim + 3 * (1 + 2 * groups)) // 16 + 64 + 60 * num_tokens // 16),
    )  # fmt: skip
    num_rows = num_sequences * num_tokens
    numbers = np.concatenate([np.full((num_rows, heads), -0.1), np.full((num_rows, heads), 0.5)], 1)
    rows = np.concatenate([random.standard_normal((num_rows, channels)), numbers], 1).astype(np.float32)[:, None]
    none = np.zeros((num_rows, 1, 0), np.float32)
    out = np.empty((num_rows, heads, value_dim), np.float32)
    taken = 0

    def step() -> None:
        nonlocal taken
        spans = np.array([(sequence, taken, num_tokens, 1) for sequence in range(num_sequences)], SPANS)
        worker.begin_step(CONTROLS, [spans])
        worker.run(0, 0, none, rows, none, out)
        worker.end_step()
        taken += num_tokens

    return step


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
