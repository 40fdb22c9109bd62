"""One long sequence over several R-workers: bits, R time against one R-worker, and what both cores read against one.

    python benchmarks/kv_ranges.py --tokens 32768 --workers 1,2,4 --kv-dtypes bfloat16,float32

R-workers are processes of one thread, pinned to the cores in turn. The first number of workers holds the sequence as a
whole, the others in ranges of ``--kv-shard-tokens`` dealt in turn. All are open at once and take turns, round by round,
with a measurement of what one core and all cores read, so that what the machine does meanwhile hits all alike. R time
of a step is the sum over its layers of the time from the first R-worker's start to the last one's end. The gain is that
of the first number of workers over the others'; the last columns divide it by the gain in read rate.

    python benchmarks/kv_ranges.py --num-short 64 --workers 2,4 --kv-shard-tokens 4096,16384

With ``--num-short``: the engine's scheduler places that sequence and so many of ``--short-tokens``, all decode
``--steps`` tokens, and the R-workers attend with random rows. Imbalance is the busiest R-worker's time over their mean,
over all steps in which all decode together and the 90th percentile of them; and the same of KV tokens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.spawn import SpawnBackend
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.metrics import StepRecord
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import KVLayout, LayerLayout, Verb, to_wire
from fastdecode.cycle import Cycle, Membership
from fastdecode.perfmodel.simulate import SimulatedRequest, StepCost
from fastdecode.perfmodel.simulate.clock import Clock
from fastdecode.perfmodel.simulate.simulated_requests import SimulatedRequests
from fastdecode.perfmodel.simulate.simulated_world import SimulatedWorld
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

BLOCK_SIZE = 32
MOST_ROWS = 2048
READ_BYTES = 512 << 20
BUSY = "busy_start", "busy_end"
STEPS = 5
"""Steps of each number of R-workers in a round; a round's R time is their median."""


class RealSteps(SimulatedWorld):
    """Takes the scheduler's steps on real R-workers, with random rows."""

    def __init__(self, scheduler: Scheduler, backend: PoolBackend, layout: KVLayout) -> None:
        self.clock = Clock()
        super().__init__(scheduler.limits, self, self.clock)  # type: ignore[arg-type]
        self.scheduler, self.backend, self.layout, self.kv_bytes_per_token = scheduler, backend, layout, 0
        self.seconds_per_moved_token = 0.0
        self.steady: list[StepRecord] = []
        spec, rng = layout.layers[0], np.random.default_rng(0)
        shapes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        draws = (rng.standard_normal((MOST_ROWS, heads, spec.key_head_dim), dtype=np.float32) for heads in shapes)
        self.rows = [to_wire(draw, layout.model_dtype) for draw in draws]

    def run(self, requests: list[SimulatedRequest]) -> None:
        """All of them at once, to their ends."""
        answered = SimulatedRequests(self.clock)
        answered.expect(requests)
        for request in requests:
            answered.arrive(self.scheduler, request)
        self._num_requests = len(requests)
        cycle = Cycle(self.scheduler, self, answered, [Membership()], self._note)
        while self.scheduler.has_unfinished:
            cycle.turn()

    def cost(self, step: ScheduledStep, num_scored_rows: int) -> StepCost:
        """Run the step, and measure it."""
        start = time.perf_counter()
        self.backend.begin_step(step.to_step_plan())
        used = [(i, part) for i, part in enumerate(step.mini_batches) if len(part)]
        for layer in range(len(self.layout.layers)):
            for index, part in used:
                rows = part.chunks["num_rows"]
                queries = int((rows * part.chunks["attends"]).sum())
                arrays = [
                    each[:count] for each, count in zip(self.rows, (queries, *(int(rows.sum()),) * 2), strict=True)
                ]
                self.backend.submit(index, layer, *arrays)
            for index, _ in used:
                self.backend.collect(index)
        report = self.backend.end_step()
        busy = np.array([(each.busy_end - each.busy_start).sum() for each in report.workers])
        wall = time.perf_counter() - start
        return StepCost(wall, wall / 2, 0.0, 0.0, busy)

    def _note(self, step: StepRecord) -> None:
        if step.is_decode and step.num_output_tokens == self._num_requests:
            self.steady.append(step)


class LongSequence:
    """One sequence over R-workers: as a whole on one, in ranges dealt in turn on several."""

    def __init__(self, num_workers: int, range_tokens: int, layout: KVLayout, tokens: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        room = layout.kv_bytes_per_token * (tokens // num_workers + 2 * range_tokens)
        sizes = [RWorkerSize(room, 1, (cores[i % len(cores)],)) for i in range(num_workers)]
        self.backend, self.layout = SpawnBackend(sizes, BLOCK_SIZE), layout
        self.range_tokens = range_tokens if num_workers > 1 else 2 * tokens
        self.num_workers = num_workers
        self.reads: list[tuple[int, int, int]] = []
        self.worker = self.length = self.base = 0
        self.controls: list[list[tuple[int, int, int, int]]] = [[] for _ in sizes]
        self.r_seconds: list[float] = []
        self.backend.open(layout)

    def step(self, rows: Sequence[np.ndarray], attends: bool) -> np.ndarray:
        """Store and attend the next rows of q, k, v, the same in every layer; o of the last layer."""
        count = len(rows[1])
        reads = tuple(self.reads) if attends else ()
        chunk = Chunk(0, self.worker, self.length, [0] * count, attends, base=self.base, reads=reads)
        step = ScheduledStep((MiniBatch.of([chunk]),), tuple(map(tuple, self.controls)))
        self.controls = [[] for _ in self.controls]
        self.backend.begin_step(step.to_step_plan())
        for layer in range(len(self.layout.layers)):
            self.backend.submit(0, layer, *rows)
            o = self.backend.collect(0)
        report = self.backend.end_step()
        if attends:
            starts, ends = (np.array([getattr(each, name)[0] for each in report.workers]) for name in BUSY)
            self.r_seconds.append(float((ends.max(axis=0) - np.where(ends > 0, starts, np.inf).min(axis=0)).sum()))
        self._grow(count)
        return o

    def _grow(self, count: int) -> None:
        self.length += count
        tail = self.length - self.base
        if tail == self.range_tokens:
            index = len(self.reads)
            self.controls[self.worker] = [(Verb.FORK, index + 1, 0, tail), (Verb.RELEASE, 0, 0, 0)]
            self.reads.append((self.worker, index + 1, self.base))
            self.base, self.worker = self.length, (index + 1) % self.num_workers


def main() -> None:
    """Print a row per KV dtype and number of R-workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--workers", default="1,2,4", metavar="LIST")
    parser.add_argument("--kv-shard-tokens", default="4096", metavar="LIST", help="a list with --num-short")
    parser.add_argument("--kv-dtypes", default="bfloat16,float32", metavar="LIST")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head size (Llama 3 8B)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-short", type=int, help="measure imbalance beside so many short sequences")
    parser.add_argument("--short-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    if args.num_short:
        _measure_mixed(args)
        return
    args.kv_shard_tokens = int(args.kv_shard_tokens)
    print(
        "| KV dtype | R-workers | R ms p10 | p50 | p90 | GB/s | gain | read gain | gain / read gain p10 | p50 | p90 |"
    )
    print("|" + "---|" * 11)
    for kv_dtype in args.kv_dtypes.split(","):
        _measure(args, kv_dtype)


def _layout(args: argparse.Namespace, kv_dtype: str) -> KVLayout:
    num_heads, num_kv_heads, dim = map(int, args.heads.split(","))
    layer = LayerLayout(num_heads, num_kv_heads, dim, dim, dim**-0.5)
    return KVLayout((layer,) * args.layers, kv_dtype if kv_dtype in ("float32", "float16") else "bfloat16", kv_dtype)


def _measure_mixed(args: argparse.Namespace) -> None:
    layout = _layout(args, args.kv_dtypes.split(",")[0])
    cores = sorted(os.sched_getaffinity(0))
    print("| R-workers | tokens of a range | imbalance of busy time | p90 of steps | of KV tokens |")
    print("|" + "---|" * 5)
    for workers in map(int, args.workers.split(",")):
        for range_tokens in map(int, args.kv_shard_tokens.split(",")):
            total = args.tokens + args.num_short * (args.short_tokens + args.steps)
            room = layout.kv_bytes_per_token * (2 * total // workers + range_tokens)
            backend = SpawnBackend([RWorkerSize(room, 1, (cores[i % len(cores)],)) for i in range(workers)], BLOCK_SIZE)
            infos = backend.open(layout)
            limits = Limits(
                max_num_seqs=args.num_short + 1,
                max_num_batched_tokens=MOST_ROWS,
                num_mini_batches=1,
                scratch_tokens=1 << 40,
                max_model_len=args.tokens + args.steps,
                block_size=BLOCK_SIZE,
                num_blocks=tuple(info.num_blocks for info in infos),
                bandwidths=(1.0,) * workers,
                prefix_caching=False,
                range_tokens=range_tokens,
            )
            run = RealSteps(Scheduler(SCHEDULES["stall-free"], limits), backend, layout)
            lengths = [args.tokens, *[args.short_tokens] * args.num_short]
            run.run([SimulatedRequest([0] * length, args.steps) for length in lengths])
            backend.close()
            busy, loads = (np.array([getattr(step, name) for step in run.steady]) for name in ("r_seconds", "kv_loads"))
            by_clock = busy.sum(axis=0).max() / busy.sum(axis=0).mean()
            in_tokens = loads.max(axis=1).sum() / loads.mean(axis=1).sum()
            worst = np.percentile(busy.max(axis=1) / busy.mean(axis=1), 90)
            print(f"| {workers} | {range_tokens} | {by_clock:.3f} | {worst:.3f} | {in_tokens:.3f} |", flush=True)


def _measure(args: argparse.Namespace, kv_dtype: str) -> None:
    num_heads, num_kv_heads, dim = map(int, args.heads.split(","))
    layout = _layout(args, kv_dtype)
    model_dtype = layout.model_dtype
    shapes = (num_heads, dim), (num_kv_heads, dim), (num_kv_heads, dim)
    counts = [int(count) for count in args.workers.split(",")]
    sequences = [LongSequence(count, args.kv_shard_tokens, layout, args.tokens) for count in counts]
    rng = np.random.default_rng(0)

    def rows(num_rows: int) -> list[np.ndarray]:
        draws = (rng.standard_normal((num_rows, *shape), dtype=np.float32) for shape in shapes)
        return [to_wire(draw, model_dtype) for draw in draws]

    for _ in range(0, args.tokens, args.kv_shard_tokens):
        q, k, v = rows(args.kv_shard_tokens)
        for sequence in sequences:
            sequence.step((q[:0], k, v), attends=False)
    cores = sorted(os.sched_getaffinity(0))
    readers = [_rworker.Peaks(num_threads=n, num_bytes=READ_BYTES, cores=cores[:n]) for n in (1, len(cores))]
    os.sched_setaffinity(0, cores[-1:])  # off the core of a lone R-worker
    rates = np.zeros((args.rounds + 2, 2))  # GB/s
    for each in range(args.rounds + 2):  # of which the first two warm up
        rates[each] = [np.median([reader.read() for _ in range(3)]) for reader in readers]
        q, k, v = rows(1)
        bits = [[sequence.step((q, k, v), attends=True).tobytes() for _ in range(STEPS)] for sequence in sequences]
        if any(mine != bits[0] for mine in bits):
            raise SystemExit(f"{kv_dtype}, round {each}: the bits differ")
    _print(kv_dtype, sequences, rates[2:])
    os.sched_setaffinity(0, cores)
    for sequence in sequences:
        sequence.backend.close()


def _print(kv_dtype: str, sequences: Sequence[LongSequence], rates: np.ndarray) -> None:
    times_of = [np.median(np.reshape(each.r_seconds, (-1, STEPS)), axis=1)[2:] for each in sequences]
    whole, read_gains = times_of[0], rates[:, 1] / rates[:, 0]
    for sequence, seconds in zip(sequences, times_of, strict=True):
        gains = whole / seconds
        rate = sequence.layout.kv_bytes_per_token * sequence.length / np.median(seconds) / 1e9
        times = " | ".join(f"{1e3 * each:.2f}" for each in np.percentile(seconds, (10, 50, 90)))
        parts = " | ".join(f"{each:.2f}" for each in np.percentile(gains / read_gains, (10, 50, 90)))
        print(
            f"| {kv_dtype} | {sequence.num_workers} | {times} | {rate:.1f} | {np.median(gains):.2f} "
            f"| {np.median(read_gains):.2f} | {parts} |",
            flush=True,
        )
    one, every = np.median(rates, axis=0)
    print(f"(bits equal in all {len(rates) + 2} rounds; one core reads {one:.1f} GB/s, all {every:.1f})", flush=True)


if __name__ == "__main__":
    main()
