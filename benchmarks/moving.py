"""What moving sequences while they run wins, in simulation: python benchmarks/moving.py

Eight R-workers, R time over S time 1 with all of 256 seats taken, ``sls``; a cached token moves in a millisecond.
Outputs of mixed lengths (by up to 80 % more or less) that the scheduler knows or not; in some scenarios the first
R-worker takes two or three times as long from step 600 on. Each scenario with moves and without. Deterministic.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from fastdecode.perfmodel.ranges import NO_RANGES, RangeParts
from fastdecode.perfmodel.simulate import SimulatedRequest, Simulator, SplitMachine, StepCost
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

NUM_WORKERS, SEATS, NUM_LAYERS, S_SECONDS = 8, 256, 32, 4e-3
SECONDS_PER_MOVED_TOKEN = 1e-3
SLOW_FROM = 600


@dataclass(frozen=True)
class Scenario:
    """``slow``: how many times as long the first R-worker takes from step ``SLOW_FROM`` on. ``knows``: the scheduler
    knows how long outputs are, not only that they are at most twice the mean."""

    slow: float
    knows: bool
    prompt_len: int = 128
    output_len: int = 512
    num_prompts: int = 1536

    def requests(self) -> list[SimulatedRequest]:
        """The same ones at every call."""
        least, most = round(0.2 * self.output_len), round(1.8 * self.output_len)
        outputs = np.random.default_rng(0).integers(least, most + 1, self.num_prompts).tolist()
        bound = None if self.knows else 2 * self.output_len
        return [SimulatedRequest([0] * self.prompt_len, output, max_tokens=bound) for output in outputs]

    def model(self, times: np.ndarray) -> StepModel:
        """R-workers that take ``times`` as long as all do at first."""
        context = self.prompt_len + self.output_len * (1 + 0.8**2 / 3) / 2
        r_seconds = 2 * S_SECONDS / (SEATS * context / NUM_WORKERS) / float(np.mean(1 / times))
        s_part = MeasuredSPart((SEATS // 2,), (S_SECONDS,), (0.0,))
        return StepModel(NUM_LAYERS, s_part, RPart(r_seconds), NUM_WORKERS)


class SlowingMachine:
    """A machine whose first R-worker becomes slow."""

    kv_bytes_per_token = 0
    seconds_per_moved_token = SECONDS_PER_MOVED_TOKEN

    def __init__(self, scenario: Scenario) -> None:
        times = np.ones(NUM_WORKERS)
        self._before = SplitMachine(scenario.model(times))
        times[0] = scenario.slow
        self._after = SplitMachine(scenario.model(times), speeds=tuple((1 / times).tolist()))
        self._num_steps = 0

    def cost(
        self,
        num_tokens: int,
        num_output_tokens: int,
        kv_loads: Sequence[float],
        ranges: RangeParts = NO_RANGES,
        copied_rows: int = 0,
    ) -> StepCost:
        self._num_steps += 1
        machine = self._after if self._num_steps > SLOW_FROM else self._before
        return machine.cost(num_tokens, num_output_tokens, kv_loads, ranges, copied_rows)


def measure(scenario: Scenario, moves: bool) -> tuple[float, float, int]:
    """Output tokens per second of the whole run, P99 time between tokens, and moves."""
    requests, model = scenario.requests(), scenario.model(np.ones(NUM_WORKERS))
    limits = Limits(
        max_num_seqs=SEATS,
        max_num_batched_tokens=2048,
        num_mini_batches=2,
        scratch_tokens=1 << 40,
        max_model_len=scenario.prompt_len + 2 * scenario.output_len,
        block_size=32,
        num_blocks=(1 << 20,) * NUM_WORKERS,
        bandwidths=(1.0,) * NUM_WORKERS,
        prefix_caching=False,
        balanced_kv_tokens=model.balanced_kv_tokens_each(SEATS),
        idle_s_share=model.idle_s_share(SEATS),
        seconds_per_moved_token=SECONDS_PER_MOVED_TOKEN if moves else math.inf,
    )
    simulator = Simulator(Scheduler(SCHEDULES["sls"], limits), SlowingMachine(scenario))
    simulator.run(requests)
    gaps = np.concatenate([request.seconds_between_tokens for request in requests])
    tokens = sum(request.output_len for request in requests)
    return tokens / simulator.now_seconds, float(np.percentile(gaps, 99)), simulator.num_moves


def row(scenario: Scenario) -> str:
    """One scenario as text."""
    (without, tbt_without, _), (with_moves, tbt_with, moves) = measure(scenario, False), measure(scenario, True)
    return (
        f"{scenario.slow:g} | {'known' if scenario.knows else 'unknown'} | {scenario.prompt_len} + "
        f"{scenario.output_len} | {without:.0f} | {with_moves:.0f} ({with_moves / without:.3f}) | "
        f"{tbt_without:.3f} | {tbt_with:.3f} | {moves}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    args = parser.parse_args()
    scenarios = [Scenario(slow, knows) for slow in (1.0, 2.0, 3.0) for knows in (True, False)]
    scenarios.append(Scenario(2.0, True, 512, 2048, 768))
    print("slow | lengths | tokens | tokens/s without moves | with | P99 seconds between tokens without | with | moves")
    with ProcessPoolExecutor(args.processes) as pool:
        for text in pool.map(row, scenarios):
            print(text, flush=True)


if __name__ == "__main__":
    main()
