"""Compare live and simulated R-workers that are lost, join, drain or slow down: python benchmarks/events.py

A live engine decodes on one core over eight stand-in R-workers, which use no core and take a set time per cached token.
The simulator then runs the same requests and events. Its S time, host time and delays are measured in the live run,
since other processes of this machine change them from minute to minute. The simulated output tokens per second must be
within 5 % of the live ones, with one and with two copies of each sequence. Recomputed tokens are printed too. Live runs
with and without events take turns. With one mini-batch, S time, host time and R time add up to the step.

The events are ``--events FILE``, as ``simulate`` reads it, or three sets: one loss and restart every ``--hour`` seconds
(this stands for one loss an hour, if an hour had as many steps); losses in quick succession; events of all kinds.
Moving a cached token takes 20 µs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from models import llama_folder
from stand_in import MortalStandIns

from fastdecode.api.config import EngineConfig
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.dataset import WorkItem, WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.throughput import run_throughput, warm_up
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun
from fastdecode.perfmodel.lab.simulate import (
    SimulatedRequest,
    Simulator,
    SplitMachine,
    Timeline,
    WorkerEvent,
    read_events,
)
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import Scheduler

NUM_WORKERS, NUM_LAYERS, VOCABULARY = 8, 2, 512
MOVED = 2e-5
MARK = 0.05


@dataclass(frozen=True)
class Outcome:
    """Output tokens per second, recomputed tokens, and the pauses in seconds of sequences whose cache was lost."""

    tokens_per_second: float
    num_recomputed: int
    pauses: tuple[float, ...] = ()

    def __str__(self) -> str:
        longest = f", {len(self.pauses)} pauses of {statistics.median(self.pauses):.2f} s" if self.pauses else ""
        return f"{self.tokens_per_second:.1f} tokens/s, {self.num_recomputed} computed again{longest}"


class Rig:
    """One live engine over stand-in R-workers, and a simulation of the same engine."""

    def __init__(self, args: argparse.Namespace, kv_replicas: int) -> None:
        self.args = args
        lengths = {"random_input_len": args.input_len, "random_output_len": args.output_len}
        spec = WorkloadSpec(**lengths, random_range_ratio=0.3, num_prompts=args.num_prompts, seed=args.seed)
        self.items = make_workload(spec, VOCABULARY, 4096, None)
        self.kv_replicas = kv_replicas

    def open(self, folder: str) -> None:
        """Load the model, and run some steps to warm up."""
        config = EngineConfig(
            folder, load_format="dummy", dtype="float32", skip_tokenizer_init=True, max_num_seqs=self.args.in_flight,
            max_num_batched_tokens=1024, schedule="stall-free", enable_prefix_caching=False, kv_cache_memory="1GiB",
            kv_replicas=self.kv_replicas, num_mini_batches=1, s_threads=1, device="cpu",
        )  # fmt: skip
        self.stand_ins = MortalStandIns(NUM_WORKERS, self.args.seconds_per_token, MOVED)
        self.engine = LLMEngine(config, self.stand_ins)
        self.limits = replace(self.engine.scheduler.limits, seconds_per_moved_token=MOVED)
        warm_up(self.engine, self.items)

    def live(self, events: list[WorkerEvent]) -> tuple[Outcome, ThroughputRun]:
        """Run all requests live, with ``events``; the engine is new, with all R-workers."""
        self.engine.close()
        self.open(self.args.folder)
        self.engine.replace_scheduler(self.new_scheduler())
        self.stand_ins.begin(events)
        run = run_throughput(self.engine, self.items)
        return Outcome(_rate(run.steps, run.elapsed_seconds), _recomputed(run.steps, self.items)), run

    def new_scheduler(self) -> Scheduler:
        """Return a scheduler like the engine's, which knows how long the stand-ins take to move a token."""
        return self.engine.scheduler.with_limits(self.limits)

    def simulated(self, machine: SplitMachine, events: list[WorkerEvent]) -> Outcome:
        """Run the same requests and events in simulated time."""
        steps: list[StepRecord] = []
        simulator = Simulator(self.new_scheduler(), machine, steps.append, events=Timeline(events))
        requests = [SimulatedRequest(item.prompt_token_ids, item.output_len) for item in self.items]
        simulator.run(requests)
        costs = simulator.interruptions
        pauses = tuple(costs.pauses().tolist()) if costs else ()
        return Outcome(_rate(steps, simulator.now_seconds), _recomputed(steps, self.items), pauses)

    def measured_machine(self, steps: Sequence[StepRecord]) -> SplitMachine:
        """Return a machine for the simulator, measured in ``steps``: S time by rows, host time, delays and copy times.
        The speed of its R-workers is the one set for the stand-ins.
        """
        rows = np.array([step.num_tokens for step in steps])
        s_seconds, host = (np.array([getattr(step, name) for step in steps]) for name in ("s_seconds", "host_seconds"))
        few = rows <= np.median(rows)
        sizes = [float(np.mean(rows[part])) for part in (few, ~few)]
        times = [float(np.mean(s_seconds[part])) for part in (few, ~few)]
        slope = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
        ends = 1, 1024
        layer = tuple(max(times[0] + slope * (each - sizes[0]), 1e-6) / NUM_LAYERS for each in ends)
        s_part = MeasuredSPart(ends, layer, (0.0, 0.0))
        late = np.mean([step.wait_seconds - max(step.r_seconds) for step in steps])
        r_part = RPart(self.args.seconds_per_token, max(float(late), 0.0) / NUM_LAYERS)
        model = StepModel(
            NUM_LAYERS, s_part, r_part, NUM_WORKERS, 1,
            step_overhead_seconds=float(np.sum(host) - self.stand_ins.moving_seconds) / len(steps),
        )  # fmt: skip
        moved = self.stand_ins.moving_seconds / self.stand_ins.moved_tokens if self.stand_ins.moved_tokens else MOVED
        return SplitMachine(model, seconds_per_moved_token=moved)


def _rate(steps: Sequence[StepRecord], seconds: float) -> float:
    return sum(step.num_output_tokens for step in steps) / seconds


def _recomputed(steps: Sequence[StepRecord], items: Sequence[WorkItem]) -> int:
    """Return how many rows were computed more than once."""
    needed = sum(len(item.prompt_token_ids) + item.output_len - 1 for item in items)
    return sum(step.num_tokens for step in steps) - needed


@dataclass(frozen=True)
class Sets:
    """Named sets of events within ``length`` seconds."""

    length: float
    hour: float

    @cached_property
    def all(self) -> dict[str, list[WorkerEvent]]:
        """Return the events of each set by its name."""
        return {"hourly": [*self._hourly()], "burst": [*self._burst()], "mixed": self._mixed()}

    def _hourly(self) -> Iterator[WorkerEvent]:
        for number in range(int(self.length / self.hour)):
            start = (number + 0.5) * self.hour
            yield WorkerEvent(start, "lose", number % NUM_WORKERS)
            yield WorkerEvent(start + 0.2 * self.hour, "join", number % NUM_WORKERS)

    def _burst(self) -> Iterator[WorkerEvent]:
        for worker in range(3):
            yield WorkerEvent((0.3 + 0.05 * worker) * self.length, "lose", worker)

    def _mixed(self) -> list[WorkerEvent]:
        at = [share * self.length for share in (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)]
        return [
            WorkerEvent(at[0], "slow", 5, factor=2.0), WorkerEvent(at[1], "lose", 1), WorkerEvent(at[2], "drain", 2),
            WorkerEvent(at[3], "join", 1), WorkerEvent(at[4], "slow", 5), WorkerEvent(at[5], "join", 8),
            WorkerEvent(at[6], "lose", 0),
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", metavar="FILE", help="file of events, in place of --sets")
    parser.add_argument("--sets", default="hourly,burst,mixed", help="sets of events (hourly,burst,mixed)")
    parser.add_argument("--copies", default="1,2", help="numbers of copies of each sequence (1,2)")
    parser.add_argument("--hour", type=float, default=10.0, help="seconds that stand for an hour (10)")
    parser.add_argument("--in-flight", type=int, default=128, help="sequences in flight (128)")
    parser.add_argument("--num-prompts", type=int, default=224, help="number of requests (224)")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens (64)")
    parser.add_argument("--output-len", type=int, default=96, help="output tokens (96)")
    parser.add_argument(
        "--seconds-per-token", type=float, default=5e-5, help="seconds per cached token and layer on a stand-in (5e-5)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="number of live runs (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the events (0)")
    args = parser.parse_args()
    args.folder = llama_folder(128, NUM_LAYERS, vocab=VOCABULARY, group=1)
    missed = False
    for copies in map(int, args.copies.split(",")):
        rig = Rig(args, copies)
        rig.open(args.folder)
        missed |= _compare(rig)
        rig.engine.close()
    sys.exit(1 if missed else 0)


def _compare(rig: Rig) -> bool:
    args, missed = rig.args, False
    sets = Sets(rig.live([])[1].elapsed_seconds, args.hour).all
    names = args.sets.split(",")
    if args.events:
        path = Path(args.events)
        names, sets = [path.name], {path.name: read_events(path.read_text(), path.name, NUM_WORKERS)}
    for name in names * args.rounds:
        plain, run = rig.live([])
        before = rig.measured_machine(run.steps)
        missed |= _report(rig, "no events", [], plain, before)
        found, disturbed = rig.live(sets[name])
        machine = rig.measured_machine(disturbed.steps)
        missed |= _report(rig, name, sets[name], found, machine)
        twins = [rig.simulated(*given).tokens_per_second for given in ((machine, []), (before, sets[name]))]
        print(
            f"  {sum(step.lost_workers for step in disturbed.steps)} lost; simulated, of a run without events: "
            f"{rig.simulated(machine, sets[name]).tokens_per_second / twins[0]:.3f} (live, with what the machine did "
            f"meanwhile: {found.tokens_per_second / plain.tokens_per_second:.3f}); simulated / live by the figures of "
            f"the run without events: {twins[1] / found.tokens_per_second:.3f}",
            flush=True,
        )
    return missed


def _report(rig: Rig, name: str, events: list[WorkerEvent], live: Outcome, machine: SplitMachine) -> bool:
    """Print live and simulated figures; return True if they differ by more than the limit."""
    twin = rig.simulated(machine, events)
    ratio = twin.tokens_per_second / live.tokens_per_second
    missed = abs(ratio - 1) > MARK
    print(
        f"{rig.kv_replicas} cop(ies), {name}, {len(events)} events: live {live} | simulated {twin} | simulated / live "
        f"{ratio:.3f}{' MISSED' if missed else ''}",
        flush=True,
    )
    return missed


if __name__ == "__main__":
    main()
