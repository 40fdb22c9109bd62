"""Serving capacity by schedule, as Sarathi-Serve's figure 9 has it: python benchmarks/sarathi.py

Mistral-7B on one A100 80GB, in simulation: the engine's scheduler against the roofline of the GPU alone (its cache in
its own memory, attention added to the step). Poisson arrivals of the paper's two workloads; a rate is sustained when
the 99th percentile of the time between tokens keeps to the SLO and the median scheduling delay to 2 s. Budgets are the
paper's: 512 tokens a step for ``stall-free`` under the strict SLO and 2048 under the relaxed one; ``prefill-first``
computes prompts whole, up to the longest sequence a step.
"""

from __future__ import annotations

import argparse

from fastdecode.perfmodel.gpu_only import GpuStepTime
from fastdecode.perfmodel.model_config import BUILT_IN
from fastdecode.perfmodel.presets import GPUS
from fastdecode.perfmodel.simulate import GpuMachine, Simulator, Slo, find_capacity
from fastdecode.perfmodel.simulate.lengths import SARATHI
from fastdecode.perfmodel.simulate.workload import SimulatedWorkload, drawn_workload
from fastdecode.scheduler import POLICIES, Limits, Scheduler

_SHAPE = BUILT_IN["mistral-7b"]
MISTRAL_ON_A100 = GpuStepTime(_SHAPE, GPUS["a100"], _SHAPE.kv_layout(_SHAPE.dtype).kv_bytes_per_token)
SLOS = {"strict": Slo(0.1), "relaxed": Slo(0.5)}
STALL_FREE_BUDGETS = {"strict": 512, "relaxed": 2048}
SCHEDULES = ("hybrid", "prefill-first", "stall-free")
BLOCK_SIZE = 32


def main() -> None:
    """Print a table of capacities and the factors between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=512, help="requests per simulation (512)")
    parser.add_argument("--workloads", default=",".join(SARATHI), metavar="LIST", help="(both)")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="(128)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of a capacity (0.03)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    print("requests/s | " + " | ".join(SCHEDULES) + " | stall-free over prefill-first, over hybrid")
    for name in args.workloads.split(","):
        workload = drawn_workload(SARATHI[name], args.num_prompts, args.seed)
        for strictness in SLOS:
            found = {}
            for schedule in SCHEDULES:
                limits = make_limits(SARATHI[name].max_total, schedule, strictness, args.max_num_seqs)
                found[schedule] = capacity(workload, SLOS[strictness], args.tolerance, limits, schedule)
            print(_row(f"{name}, {strictness}", found), flush=True)
    print("The paper: up to 2.6 x over vLLM (prefill-first), and 3.2 x over Orca (hybrid; strict, chat).")


def make_limits(longest: int, schedule: str, strictness: str, max_num_seqs: int) -> Limits:
    """No scratch: chunks attend in the GPU's cache, and read again what came before them."""
    return Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=STALL_FREE_BUDGETS[strictness] if schedule == "stall-free" else longest,
        num_mini_batches=1,
        scratch_tokens=0,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        num_blocks=(MISTRAL_ON_A100.capacity_tokens // BLOCK_SIZE,),
        bandwidths=(1.0,),
        prefix_caching=False,
    )


def capacity(workload: SimulatedWorkload, slo: Slo, tolerance: float, limits: Limits, schedule: str) -> float:
    """Requests per second that ``schedule`` sustains."""

    def meets(rate: float) -> bool:
        requests = workload.at(rate)
        simulator = Simulator(Scheduler(POLICIES[schedule], limits), GpuMachine(MISTRAL_ON_A100))
        simulator.run(requests, lambda each: each.num_steps % 64 == 0 and slo.is_lost(requests, each.now_seconds))
        return slo.is_met(requests)

    return find_capacity(meets, 1.0, tolerance)


def _row(name: str, found: dict[str, float]) -> str:
    best = found["stall-free"]
    factors = [f"{best / found[other]:.2f}" if found[other] else "–" for other in ("prefill-first", "hybrid")]
    return f"{name} | " + " | ".join(f"{rate:.2f}" for rate in found.values()) + f" | {factors[0]}, {factors[1]}"


if __name__ == "__main__":
    main()
