"""Measure the speed of the simulator: python benchmarks/simulator.py

It is the number of simulated steps per second of real time, by number of R-workers. Thousands of sequences run under
``sls`` in its steady state: they have every age, and in most steps some end and as many start.
"""

from __future__ import annotations

import argparse
import time

from fastdecode.perfmodel.lab.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

PROMPT_LEN, OUTPUT_LEN = 64, 512
SLACK = 1.05
"""The load limit over the steady state's mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=4096, help="sequences that run at once (4096)")
    parser.add_argument("--r-workers", default="1,8,64,256", metavar="LIST", help="numbers of R-workers (1,8,64,256)")
    parser.add_argument("--steps", type=int, default=200, help="timed steps (200)")
    args = parser.parse_args()
    print("R-workers | running | simulated steps per second")
    for num_r_workers in map(int, args.r_workers.split(",")):
        running, rate = measure(args.running, num_r_workers, args.steps)
        print(f"{num_r_workers} | {running} | {rate:.0f}", flush=True)


def measure(seats: int, num_r_workers: int, num_steps: int) -> tuple[int, float]:
    """Return the sequences that run at the end, and steps per second after the first sequences have ended."""
    model = StepModel(32, MeasuredSPart((1, 4096), (1e-3, 9e-3), (1e-3, 2e-3)), RPart(1e-7), num_r_workers)
    limits = Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=2 * seats,
        num_mini_batches=2,
        scratch_tokens=1 << 40,
        max_model_len=4096,
        block_size=32,
        num_blocks=(1 << 20,) * num_r_workers,
        bandwidths=(1.0,) * num_r_workers,
        kv_load_limit=int(SLACK * seats * (PROMPT_LEN + OUTPUT_LEN / 2)),
        prefix_caching=False,
    )
    records: list[object] = []
    simulator = Simulator(Scheduler(SCHEDULES["sls"], limits), SplitMachine(model), records.append)
    moments: list[float] = []

    def until(simulator: Simulator) -> bool:
        if simulator.num_steps > OUTPUT_LEN + 20:
            moments.append(time.perf_counter())
        return len(moments) > num_steps

    simulator.run([SimulatedRequest([0] * PROMPT_LEN, OUTPUT_LEN) for _ in range(3 * seats)], until)
    return simulator.scheduler.snapshot().num_running, num_steps / (moments[-1] - moments[0])


if __name__ == "__main__":
    main()
