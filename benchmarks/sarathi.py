"""Serving capacity by schedule, as Sarathi-Serve's figure 9 has it: python benchmarks/sarathi.py

Mistral-7B on one A100 80GB, in simulation: the engine's scheduler against the roofline of the GPU alone (its cache in
its own memory, attention added to the step). Poisson arrivals of the paper's two workloads; a rate is sustained when
the 99th percentile of the time between tokens keeps to the SLO and the median scheduling delay to 2 s (section 5.1).

Settings are the paper's. ``stall-free``: 512 tokens a step under the strict SLO, 2048 under the relaxed one.
``prefill-first`` (vLLM): whole prompts, up to the longest sequence a step. ``hybrid`` (Orca): the prompts of as many
requests as there are seats in one step, each with the longest sequence's cache from its start. Seats are 128, and 16
for ``hybrid``: that is what its authors ran it with ("with higher batch size activation and kv cache memory blows up",
osdi-experiments/figure-5-6 of microsoft/sarathi-serve), and why the paper calls its batch much smaller than vLLM's.
"""

from __future__ import annotations

import argparse

from fastdecode.perfmodel.gpu_only import GpuStepTime
from fastdecode.perfmodel.hardware import GPUS
from fastdecode.perfmodel.model_shape import BUILT_IN
from fastdecode.perfmodel.simulate import GpuMachine, Simulator, Slo, find_capacity
from fastdecode.perfmodel.simulate.workload import SARATHI, SimulatedWorkload, drawn_workload
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

_SHAPE = BUILT_IN["mistral-7b"]
MISTRAL_ON_A100 = GpuStepTime(_SHAPE, GPUS["a100"], _SHAPE.kv_layout(_SHAPE.dtype).kv_bytes_per_token)
SLOS = {"strict": Slo(0.1), "relaxed": Slo(0.5)}
STALL_FREE_BUDGETS = {"strict": 512, "relaxed": 2048}
MAX_NUM_SEQS = {"hybrid": 16, "prefill-first": 128, "stall-free": 128}
PAPER = {("sarathi-chat", "strict"): "over hybrid 3.2"}
BLOCK_SIZE = 32


def main() -> None:
    """Print a table of capacities and the factors between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=512, help="requests per simulation (512)")
    parser.add_argument("--workloads", default=",".join(SARATHI), metavar="LIST", help="(both)")
    parser.add_argument("--hybrid-max-num-seqs", type=int, default=MAX_NUM_SEQS["hybrid"], help="(16)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of a capacity (0.03)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    seats = MAX_NUM_SEQS | {"hybrid": args.hybrid_max_num_seqs}
    print("requests/s | " + " | ".join(seats) + " | stall-free over prefill-first, over hybrid | the paper")
    for name in args.workloads.split(","):
        workload = drawn_workload(SARATHI[name], args.num_prompts, args.seed)
        for strictness in SLOS:
            found = {}
            for schedule, max_num_seqs in seats.items():
                limits = make_limits(SARATHI[name].max_total, schedule, strictness, max_num_seqs)
                found[schedule] = capacity(workload, SLOS[strictness], args.tolerance, limits, schedule)
            print(f"{_row(f'{name}, {strictness}', found)} | {PAPER.get((name, strictness), '')}", flush=True)
    print("The paper, over prefill-first: up to 2.6 for Mistral-7B on one A100. Stall-free is above both everywhere.")


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
        simulator = Simulator(Scheduler(SCHEDULES[schedule], limits), GpuMachine(MISTRAL_ON_A100))
        simulator.run(requests, lambda each: each.num_steps % 64 == 0 and slo.is_lost(requests, each.now_seconds))
        return slo.is_met(requests)

    return find_capacity(meets, 1.0, tolerance)


def _row(name: str, found: dict[str, float]) -> str:
    best = found["stall-free"]
    factors = [f"{best / found[other]:.2f}" if found[other] else "–" for other in ("prefill-first", "hybrid")]
    return f"{name} | " + " | ".join(f"{rate:.2f}" for rate in found.values()) + f" | {factors[0]}, {factors[1]}"


if __name__ == "__main__":
    main()
