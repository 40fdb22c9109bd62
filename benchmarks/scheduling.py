"""Measure the scheduler's time per step by the number of running sequences: ``schedule``, ``commit``, and the plan.

The load-stabilizing schedule is in its steady state: sequences have every age, and in most steps some end and as many
start. There is one R-worker per 512 sequences. The engine's own work with tokens is not included.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fastdecode.scheduler import SCHEDULES, Limits, Scheduler, TokenSequence

PROMPT_LEN, OUTPUT_LEN = 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--running",
        default="1024,4096,16384,65536",
        metavar="LIST",
        help="numbers of running sequences (1024,4096,16384,65536)",
    )
    parser.add_argument("--steps", type=int, default=50, help="measured steps (50)")
    parser.add_argument("--schedule", default="sls", choices=SCHEDULES, help="schedule (sls)")
    parser.add_argument("--prefix-caching", action="store_true", help="with prefix caching (off)")
    args = parser.parse_args()
    print("running | schedule ms p50 (p99) | commit ms p50 | plan ms p50 | µs per sequence | starts per step")
    for running in map(int, args.running.split(",")):
        print(_row(running, args), flush=True)


def _row(running: int, args: argparse.Namespace) -> str:
    seconds, starts = _measure(Driver(args.schedule, running, args.prefix_caching), args.steps)
    schedule, commit, plan = (seconds[:, i] * 1e3 for i in range(3))
    total = np.median(seconds[:, :2].sum(axis=1))
    return (
        f"{running:7d} | {np.median(schedule):.2f} ({np.percentile(schedule, 99):.2f}) | {np.median(commit):.2f} | "
        f"{np.median(plan):.2f} | {total / running * 1e6:.3f} | {starts:.1f}"
    )


class Driver:
    """Calls a scheduler as an engine does. All requests wait from the start."""

    def __init__(self, schedule: str, running: int, prefix_caching: bool) -> None:
        workers = max(1, running // 512)
        limits = Limits(
            max_num_seqs=running,
            max_num_batched_tokens=2 * running,
            num_mini_batches=2,
            scratch_tokens=1 << 40,
            max_model_len=4096,
            block_size=32,
            num_blocks=(1 << 20,) * workers,
            bandwidths=(1.0,) * workers,
            kv_load_limit=int(running * (PROMPT_LEN + OUTPUT_LEN / 2) * 1.05),
            prefix_caching=prefix_caching,
        )
        self.scheduler = Scheduler(SCHEDULES[schedule], limits)
        self.sequences: dict[int, TokenSequence] = {}
        for number in range(3 * running):
            self.sequences[number] = TokenSequence(number, [number % 1000] * PROMPT_LEN, OUTPUT_LEN)
            self.scheduler.add(self.sequences[number])

    def step(self) -> tuple[list[float], int]:
        """Run one step; return the seconds of schedule, commit and plan, and how many sequences started."""
        moments = [time.perf_counter()]
        step = self.scheduler.schedule()
        moments.append(time.perf_counter())
        plan = step.to_step_plan()
        moments.append(time.perf_counter())
        self.scheduler.commit(step)
        moments.append(time.perf_counter())
        del plan
        for mini_batch in step.mini_batches:
            for sequence_id in mini_batch.sampled_ids:
                sequence = self.sequences[sequence_id]
                sequence.append(1)
                if len(sequence.output_token_ids) == OUTPUT_LEN:
                    self.scheduler.finish(sequence, "length")
        starts = sum(len(mini_batch.prompts) for mini_batch in step.mini_batches)
        schedule, plan_seconds, commit = np.diff(moments).tolist()
        return [schedule, commit, plan_seconds], starts


def _measure(driver: Driver, num_steps: int) -> tuple[np.ndarray, float]:
    """Return the seconds of ``num_steps`` steady steps, [num_steps, 3], and the mean number of starts per step."""
    for _ in range(OUTPUT_LEN + 20):
        driver.step()
    results = [driver.step() for _ in range(num_steps)]
    return np.array([seconds for seconds, _ in results]), float(np.mean([starts for _, starts in results]))


if __name__ == "__main__":
    main()
