"""FastDecode's strong scaling in simulation, beside the paper's figure 7: python benchmarks/strong_scaling.py

One A10 and 1 to 8 sockets of Epyc 7452 by preset, 100 Gb/s; sequences of S tokens after a prompt of one, twice as many
as are in flight, under ``sls``. Efficiency is throughput over that of one socket times the sockets, between the first
end of a sequence and the last start of one. ``--slack`` widens the schedule's load limit, which is kept on each socket
by itself. Memory is left out, as in the paper, which ran fewer layers and scaled its figures up.

The second efficiency takes R-workers that spend on every sequence, besides reading its cache, as long as on
``--sequence-tokens`` cached tokens. The default is read off one point of the paper's figure, 13B with S = 128 on 8
sockets; its other points are then predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.metrics import StepRecord
from fastdecode.perfmodel.equations import default_interval_steps, peak_load_stabilized
from fastdecode.perfmodel.hardware import CPU_HOSTS, GPUS
from fastdecode.perfmodel.model_shape import BUILT_IN
from fastdecode.perfmodel.plan import Workload
from fastdecode.perfmodel.planner import Planner
from fastdecode.perfmodel.ranges import NO_RANGES, RangeParts
from fastdecode.perfmodel.simulate import Machine, SimulatedRequest, Simulator, SplitMachine, StepCost
from fastdecode.perfmodel.stages import GpuSPart, Transport, host_r_part
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler

PAPER = {("llama-7b", 1024, 8): 0.728, ("llama-13b", 1024, 8): 0.841}
PAPER |= {("llama-13b", 128, 4): 0.759, ("llama-13b", 128, 8): 0.376}
LINK_BYTES_PER_SECOND = 12.5e9
BLOCK_SIZE = 32
SEQUENCE_TOKENS = 180


@dataclass(frozen=True)
class Figures:
    """Output tokens per second, sequences per step, and the busy parts of S-worker and R-workers."""

    rate: float
    in_flight: float
    s_busy: float
    r_busy: float


@dataclass(frozen=True)
class SlowStart:
    """``machine`` with R-workers that spend on each sequence as long as on ``tokens`` cached tokens more."""

    machine: Machine
    tokens: float

    @property
    def kv_bytes_per_token(self) -> int:
        """The machine's."""
        return self.machine.kv_bytes_per_token

    def cost(
        self,
        num_tokens: int,
        num_output_tokens: int,
        kv_loads: Sequence[float],
        ranges: RangeParts = NO_RANGES,
        copied_rows: int = 0,
    ) -> StepCost:
        """Sequences are spread evenly."""
        each = int(self.tokens * num_tokens / len(kv_loads))
        return self.machine.cost(num_tokens, num_output_tokens, [load + each for load in kv_loads], ranges, copied_rows)


def main() -> None:
    """Print a row per model, length and number of sockets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=1024, help="sequences, both mini-batches (1024)")
    parser.add_argument("--slack", type=float, default=1.5, help="load limit over the schedule's peak (1.5)")
    parser.add_argument("--models", default="llama-7b,llama-13b", metavar="LIST", help="(llama-7b,llama-13b)")
    parser.add_argument("--lengths", default="1024,128", metavar="LIST", help="tokens of a sequence (1024,128)")
    parser.add_argument("--sockets", default="1,2,4,8", metavar="LIST", help="(1,2,4,8)")
    parser.add_argument("--sequence-tokens", type=float, default=SEQUENCE_TOKENS, help=f"({SEQUENCE_TOKENS})")
    args = parser.parse_args()
    print("model, S | sockets | in flight | tokens/s, S busy, R busy, efficiency | the same, slow start | paper")
    for model in args.models.split(","):
        for length in map(int, args.lengths.split(",")):
            bases: dict[float, float] = {}
            for sockets in map(int, args.sockets.split(",")):
                cells = []
                for tokens in (0.0, args.sequence_tokens):
                    machine = SlowStart(SplitMachine(planner(model, length).step_model(sockets)), tokens)
                    found = measure(machine, length, sockets, args.in_flight, args.slack)
                    base = bases.setdefault(tokens, found.rate / sockets)
                    efficiency = found.rate / sockets / base
                    cells.append(f"{found.rate:.0f}, {found.s_busy:.2f}, {found.r_busy:.2f}, {efficiency:.3f}")
                cells.append(str(PAPER.get((model, length, sockets), "")))
                print(f"{model}, {length} | {sockets} | {found.in_flight:.0f} | {' | '.join(cells)}", flush=True)


def planner(model: str, length: int) -> Planner:
    """The paper's machine."""
    shape, gpu = BUILT_IN[model], GPUS["a10"]
    return Planner(
        Workload(length + 1, 1),
        shape.num_layers,
        GpuSPart(shape, gpu),
        host_r_part(shape, shape.dtype, CPU_HOSTS["epyc-7452"]),
        Transport(shape.attending_row_bytes, (gpu.host_bytes_per_second, LINK_BYTES_PER_SECOND)),
    )


def measure(machine: Machine, length: int, sockets: int, in_flight: int, slack: float) -> Figures:
    """From the first end of a sequence to the last start of one."""
    interval = default_interval_steps(in_flight, length)
    limits = Limits(
        max_num_seqs=in_flight,
        max_num_batched_tokens=2 * in_flight,
        num_mini_batches=2,
        scratch_tokens=1 << 40,
        max_model_len=length + 1,
        block_size=BLOCK_SIZE,
        num_blocks=(1 << 40,) * sockets,
        bandwidths=(1.0,) * sockets,
        kv_load_limit=int(slack * peak_load_stabilized(in_flight, length, interval, 1)),
        prefix_caching=False,
    )
    steps: list[StepRecord] = []
    simulator = Simulator(Scheduler(SCHEDULES["sls"], limits), machine, steps.append)
    simulator.run([SimulatedRequest([0], length) for _ in range(2 * in_flight)])
    last_start = max(number for number, step in enumerate(steps) if not step.is_decode)
    steady = steps[length:last_start]
    if not steady:
        raise SystemExit(f"--slack {slack:g} lets every sequence start before the first has ended: take less")
    seconds, tokens = sum(step.wall_seconds for step in steady), sum(step.num_output_tokens for step in steady)
    r_seconds = sum(sum(step.r_seconds) for step in steady) / sockets
    s_seconds = sum(step.s_seconds for step in steady)
    return Figures(tokens / seconds, tokens / len(steady), s_seconds / seconds, r_seconds / seconds)


if __name__ == "__main__":
    main()
