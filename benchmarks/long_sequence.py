"""One long sequence beside short ones, in simulation: how evenly R-workers share the load, with ranges and without.

    python benchmarks/long_sequence.py --workers 2,4,8,32

The engine's own scheduler on an A10 and sockets of Epyc 7452 by preset: a sequence of ``--tokens`` and ``--num-short``
of ``--short-tokens`` begin at once and decode ``--steps`` tokens each. Imbalance is the busiest R-worker's time over
their mean, summed over the steps in which all decode, and the 90th percentile of those steps. ``--kv-shard-tokens``:
of each range; auto is the largest with which each R-worker's share of the load is at least two ranges.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from fastdecode.core.metrics import StepRecord
from fastdecode.core.types import SPLIT_TOKENS
from fastdecode.perfmodel.hardware import CPU_HOSTS, GPUS
from fastdecode.perfmodel.model_shape import BUILT_IN
from fastdecode.perfmodel.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.stages import GpuSPart, Transport, host_r_part
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.perfmodel.storage_costs import StorageCosts
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler
from fastdecode.scheduler.store.place import UNLIMITED

LINK_BYTES_PER_SECOND = 12.5e9
BLOCK_SIZE = 32


def main() -> None:
    """Print a row per number of R-workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--workers", default="2,4,8,32", metavar="LIST")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--num-short", type=int, default=64)
    parser.add_argument("--short-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--kv-shard-tokens", type=int, help="(auto)")
    args = parser.parse_args()
    print("| R-workers | tokens of a range | imbalance, sum | p90 of steps | step p50 ms | without ranges: sum | ms |")
    print("|" + "---|" * 7)
    for workers in map(int, args.workers.split(",")):
        range_tokens = args.kv_shard_tokens or chosen(args.tokens + args.num_short * args.short_tokens, workers)
        total, worst, milliseconds = measure(args, workers, range_tokens)
        whole, _, whole_milliseconds = measure(args, workers, UNLIMITED)
        print(
            f"| {workers} | {range_tokens} | {total:.3f} | {worst:.3f} | {milliseconds:.2f} | {whole:.2f} "
            f"| {whole_milliseconds:.2f} |",
            flush=True,
        )


def chosen(kv_load: int, workers: int) -> int:
    """Of a range."""
    return SPLIT_TOKENS << max(0, int(math.log2(max(kv_load / workers / 2, 1) / SPLIT_TOKENS)))


def measure(args: argparse.Namespace, workers: int, range_tokens: int) -> tuple[float, float, float]:
    """Imbalance in all and in the worst tenth of the steps, and median milliseconds of a step."""
    shape, gpu = BUILT_IN[args.model], GPUS["a10"]
    model = StepModel(
        shape.num_layers, GpuSPart(shape, gpu), host_r_part(shape, shape.dtype, CPU_HOSTS["epyc-7452"]), workers,
        transport=Transport(shape.attending_row_bytes, (gpu.host_bytes_per_second, LINK_BYTES_PER_SECOND)),
        storage=StorageCosts.of(shape),
    )  # fmt: skip
    limits = Limits(
        max_num_seqs=args.num_short + 1,
        max_num_batched_tokens=8192,
        num_mini_batches=2,
        scratch_tokens=1 << 40,
        max_model_len=args.tokens + args.steps,
        block_size=BLOCK_SIZE,
        num_blocks=(1 << 20,) * workers,
        bandwidths=(1.0,) * workers,
        prefix_caching=False,
        range_tokens=range_tokens,
    )
    steps: list[StepRecord] = []
    simulator = Simulator(Scheduler(SCHEDULES["stall-free"], limits), SplitMachine(model), steps.append)
    lengths = [args.tokens, *[args.short_tokens] * args.num_short]
    simulator.run([SimulatedRequest([0] * length, args.steps) for length in lengths])
    steady = [step for step in steps if step.is_decode and step.num_output_tokens == len(lengths)]
    seconds = np.array([step.r_seconds for step in steady])
    each = seconds.max(axis=1) / seconds.mean(axis=1)
    total = float(seconds.max(axis=1).sum() / seconds.mean(axis=1).sum())
    return total, float(np.percentile(each, 90)), 1e3 * float(np.median([step.wall_seconds for step in steady]))


if __name__ == "__main__":
    main()
