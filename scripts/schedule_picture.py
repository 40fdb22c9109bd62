"""Draw docs/load_stabilizing.png, whole batches and spread starts, with the real scheduler in simulated time.

python scripts/schedule_picture.py docs/load_stabilizing.png
"""

from __future__ import annotations

import math
import sys

from fastdecode.cli.main import build_parser
from fastdecode.perfmodel.lab.cli.simulate import simulate
from fastdecode.perfmodel.lab.cli.simulate_inputs import read_simulation
from fastdecode.perfmodel.lab.measure.plots import picture

MACHINE = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--num-r-workers", "8"]
WORKLOAD = ["--random-input-len", "4", "--random-output-len", "256", "--num-prompts", "2560", "--max-num-seqs", "512"]
SCHEDULES = {
    "request-level": "Whole batches start together (--schedule request-level)",
    "sls": "Starts are spread (--schedule sls)",
}


def kv_loads(schedule: str) -> list[int]:
    """Return how many KV tokens each step of a simulated run attends to."""
    limit = ["--kv-load-limit", str(512 * (4 + (256 + 8) // 2))] if schedule == "sls" else []
    words = ["simulate", *MACHINE, *WORKLOAD, "--schedule", schedule, *limit]
    return [
        step.kv_load for step in simulate(read_simulation(build_parser(["simulate"]).parse_args(words)), math.inf).steps
    ]


def main(path: str) -> None:
    """Draw both schedules on the same axes, and print the ratio of their peaks."""
    loads = {schedule: kv_loads(schedule) for schedule in SCHEDULES}
    with picture(path, 2, 1, figsize=(10, 5.8), sharex=True, sharey=True) as panels:
        for axes, (schedule, title) in zip(panels, SCHEDULES.items(), strict=True):
            axes.plot([load / 1e3 for load in loads[schedule]], color="#3b6ea5")
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_ylabel("thousand KV tokens\nattended in a step")
            axes.set_ylim(bottom=0)
        panels[-1].set_xlabel("step")
    print(f"peak of sls over whole batches: {max(loads['sls']) / max(loads['request-level']):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
