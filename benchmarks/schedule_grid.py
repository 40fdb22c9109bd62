"""``sls`` against the simple schedules over a grid of workloads, in simulation: python benchmarks/schedule_grid.py

R time over S time of a step with all seats taken, from a quarter to four times; one to sixteen generations of requests
(as many as there are seats); equal, mixed and unknown lengths; Poisson arrivals from half to 1.2 times of what the
machine sustains. In each scenario ``sls`` is to have at least 0.98 times the whole-run throughput of the best of
``stall-free``, ``fcfs`` and ``request-level``, and a P99 time between tokens of at most 1.1 times stall-free's. Exits
with 1 and says which scenarios missed that.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from fastdecode.perfmodel.simulate import SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

SEATS, OUTPUT_LEN, PROMPT_LEN, NUM_WORKERS, NUM_LAYERS = 256, 256, 16, 4, 4
S_SECONDS = 1e-3
MOVED_OVER_ATTENDED = 60
"""Seconds to move a cached token over seconds to attend it, all layers: 30 GB/s against 0.5."""

OTHERS = ("stall-free", "fcfs", "request-level")
LEAST_THROUGHPUT, MOST_TBT = 0.98, 1.1


@dataclass(frozen=True)
class Scenario:
    """``ratio``: R time over S time, all seats taken at mean length. ``generations``: requests per seat. ``arrivals``:
    as a part of what the machine sustains; None: all at once."""

    ratio: float
    generations: int
    lengths: str
    arrivals: float | None = None

    def requests(self) -> list[SimulatedRequest]:
        """The same ones at every call."""
        rng = np.random.default_rng(0)
        count = SEATS * self.generations
        spread = 0.0 if self.lengths == "equal" else 0.8
        outputs = rng.integers(round(OUTPUT_LEN * (1 - spread)), round(OUTPUT_LEN * (1 + spread)) + 1, count).tolist()
        moments = np.zeros(count)
        if self.arrivals is not None:
            moments = np.cumsum(rng.exponential(self._seconds_per_request / self.arrivals, count))
        most = 2 * OUTPUT_LEN if self.lengths == "unknown" else None
        return [
            SimulatedRequest([0] * PROMPT_LEN, output, moment, max_tokens=most)
            for output, moment in zip(outputs, moments.tolist(), strict=True)
        ]

    @property
    def mean_context(self) -> float:
        """Tokens that a running sequence attends on average."""
        spread = 0.0 if self.lengths == "equal" else 0.8
        return PROMPT_LEN + OUTPUT_LEN * (1 + spread**2 / 3) / 2

    @property
    def _seconds_per_request(self) -> float:
        """At the machine's best."""
        step_seconds = 2 * NUM_LAYERS * S_SECONDS * max(1.0, self.ratio)
        return OUTPUT_LEN * step_seconds / SEATS

    def machine(self) -> SplitMachine:
        """S takes the same time for any number of decodes, and longer only with prompts."""
        r_seconds = self.ratio * 2 * S_SECONDS / (SEATS * self.mean_context / NUM_WORKERS)
        s_part = MeasuredSPart((SEATS // 2,), (S_SECONDS,), (0.0,))
        model = StepModel(NUM_LAYERS, s_part, RPart(r_seconds), NUM_WORKERS)
        return SplitMachine(model, seconds_per_moved_token=MOVED_OVER_ATTENDED * NUM_LAYERS * r_seconds)


def scenarios() -> list[Scenario]:
    """54 of them."""
    ratios, generations = (0.25, 0.5, 1.0, 2.0, 4.0), (1, 2, 3, 4, 8, 16)
    grid = [Scenario(*each, "equal") for each in product(ratios, generations)]
    grid += [Scenario(*each, "mixed") for each in product((0.5, 1.0, 2.0), (2, 8))]
    grid += [Scenario(*each, "unknown") for each in product((0.5, 1.0, 2.0), (2, 8))]
    for part, lengths in product((0.5, 0.8, 1.0, 1.2), ("equal", "mixed", "unknown")):
        grid.append(Scenario(1.0, 8, lengths, part))
    return grid


def measure(scenario: Scenario, schedule: str) -> tuple[float, float]:
    """Output tokens per second of the whole run, and P99 time between tokens."""
    requests, machine = scenario.requests(), scenario.machine()
    longest = max(len(request.prompt_token_ids) + (request.max_tokens or request.output_len) for request in requests)
    limits = Limits(
        max_num_seqs=SEATS,
        max_num_batched_tokens=2048,
        num_mini_batches=2,
        scratch_tokens=1 << 40,
        max_model_len=longest,
        block_size=32,
        num_blocks=(1 << 20,) * NUM_WORKERS,
        bandwidths=(1.0,) * NUM_WORKERS,
        prefix_caching=False,
        balanced_kv_tokens=machine.model.balanced_kv_tokens_each(SEATS),
        idle_s_share=machine.model.idle_s_share(SEATS),
        seconds_per_moved_token=machine.seconds_per_moved_token,
    )
    simulator = Simulator(Scheduler(SCHEDULES[schedule], limits), machine)
    simulator.run(requests)
    gaps = np.concatenate([request.seconds_between_tokens for request in requests])
    tokens = sum(request.output_len for request in requests)
    return tokens / simulator.now_seconds, float(np.percentile(gaps, 99))


def row(scenario: Scenario) -> tuple[str, bool]:
    """One scenario as text, and whether both marks were reached."""
    found = {schedule: measure(scenario, schedule) for schedule in (*OTHERS, "sls")}
    best = max(OTHERS, key=lambda schedule: found[schedule][0])
    throughput = found["sls"][0] / found[best][0]
    slow = found["sls"][1] / found["stall-free"][1]
    reached = throughput >= LEAST_THROUGHPUT and slow <= MOST_TBT
    arrivals = "at once" if scenario.arrivals is None else f"{scenario.arrivals:g} of capacity"
    text = (
        f"{scenario.ratio:4g} | {scenario.generations:2d} | {scenario.lengths:7s} | {arrivals:15s} | {best:13s} | "
        f"{throughput:.3f} | {slow:.3f}{'' if reached else ' | MISSED'}"
    )
    return text, reached


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    args = parser.parse_args()
    grid = scenarios()
    print("R/S | generations | lengths | arrivals | best other | sls throughput over it | P99 TBT over stall-free's")
    with ProcessPoolExecutor(args.processes) as pool:
        missed = 0
        for text, reached in pool.map(row, grid):
            print(text, flush=True)
            missed += not reached
    print(f"{len(grid) - missed} of {len(grid)} scenarios reach both marks")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
