"""The machine and the scheduler's limits given by the flags of ``fastdecode simulate``."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.cli.flags import PLACING, SCHEDULE
from fastdecode.core.errors import ConfigError
from fastdecode.core.metrics import StepRecord
from fastdecode.core.placing import AskedPlacing
from fastdecode.perfmodel.lab.cli.bounds import check_context, check_r_workers
from fastdecode.perfmodel.lab.cli.machine_flags import BARE_FLAGS
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
from fastdecode.perfmodel.lab.cli.named_machine import check_on_cpu, one_gpu
from fastdecode.perfmodel.lab.cli.planner_inputs import rank_group
from fastdecode.perfmodel.lab.cli.shape_inputs import asked_shape, check_state_flags, gpu_kv_bytes, named_shape
from fastdecode.perfmodel.lab.cli.simulate_events import read_timeline
from fastdecode.perfmodel.lab.cli.simulate_limits import (
    asked_limits,
    asked_speeds,
    plan_words,
    scratch_tokens_of,
    state_blocks_of,
    with_states_here,
)
from fastdecode.perfmodel.lab.cli.variants.prefill_workers import prefill_forecast
from fastdecode.perfmodel.lab.cli.variants.ranges import check_uncut
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import read_drafting
from fastdecode.perfmodel.lab.cli.workload_inputs import UNBOUNDED_TOKENS, read_workload
from fastdecode.perfmodel.lab.draft_times import Drafting
from fastdecode.perfmodel.lab.gpu_only import GpuStepTime, check_weights
from fastdecode.perfmodel.lab.simulate import (
    GpuMachine,
    Machine,
    PrefillFleet,
    SimulatedDrafter,
    SimulatedWorkload,
    Simulator,
    SplitMachine,
    Timeline,
)
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.partition import Forecast
from fastdecode.perfmodel.service import Service
from fastdecode.perfmodel.sizing import Workload
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler
from fastdecode.scheduler.policy.draft_policy import BalancedDrafts
from fastdecode.scheduler.policy.prefill_policy import LeastWaiting
from fastdecode.scheduler.schedules import MOVED_BYTES_PER_SECOND

CHECKED = (*SCHEDULE, *PLACING, "num_mini_batches", "max_model_len")
"""Flags with the same meaning in the simulator as in the engine."""

OF_R_WORKERS = (
    "cpu",
    "link",
    "kv_cache_memory",
    "r_workers_per_host",
    "r_worker_speeds",
    "seconds_per_moved_token",
    "profile",
    *BARE_FLAGS,
    "exposed_transport",
    "overlapped_transport",
    "kv_shard_tokens",
    "num_prefill_workers",
    "prefill_gpu",
    "prefill_link",
    "events",
    "mtbf",
    "restart_seconds",
)
"""Flags that describe R-workers, or a machine measured with them; unset they are None or False."""


@dataclass(frozen=True)
class SimulationInputs:
    """The inputs of a simulation.

    ``prefill``: predicted times of ``num_prefill_workers`` prefill workers; None without them. ``drafting``: None
    without drafts. ``events``: makes a run's events, the same each time; None without events. ``alone``: the GPU
    without R-workers, as ``plan`` computes it; None if no GPU is named.
    """

    machine: Machine
    limits: Limits
    schedule: str
    workload: SimulatedWorkload
    rate: float
    title: str
    assumptions: tuple[str, ...]
    prefill: Forecast | None = None
    num_prefill_workers: int = 0
    drafting: Drafting | None = None
    events: Callable[[], Timeline] | None = None
    alone: Service | None = None

    def simulator(self, on_step: Callable[[StepRecord], None] | None = None) -> Simulator:
        """Return a new simulator with its own scheduler."""
        policy, fleet = None, None
        if self.prefill:
            policy = LeastWaiting(self.prefill, self._s_seconds, range(self.num_prefill_workers))
            fleet = PrefillFleet(self.prefill, self.num_prefill_workers)
        drafts, drafter = None, None
        if self.drafting:
            drafts = BalancedDrafts(self.drafting.num_speculative_tokens, self.limits.num_mini_batches)
            drafter = SimulatedDrafter(self.drafting, len(self.limits.num_blocks))
        scheduler = Scheduler(SCHEDULES[self.schedule], self.limits, policy, drafts)
        events = self.events() if self.events else None
        return Simulator(scheduler, self.machine, on_step, fleet, drafter, events)

    def _s_seconds(self, num_tokens: int, context_len: int) -> float:
        """Return the seconds in which the S-worker computes a prompt, while R-workers attend to its cached prefix."""
        most, rest = self.limits.max_num_batched_tokens, [0] * (len(self.limits.num_blocks) - 1)
        seconds = 0.0
        for start, end in itertools.pairwise((0, *range(most, num_tokens, most), num_tokens)):
            attended = context_len + end if context_len else 0
            seconds += self.machine.cost(Load(end - start, 1, attended), [attended, *rest]).wall_seconds
        return seconds


def read_simulation(args: argparse.Namespace) -> SimulationInputs:
    """Return the inputs of a simulation. A ConfigError names a missing or bad flag."""
    EngineConfig(**{name: getattr(args, name) for name in CHECKED})  # raises for values that the engine refuses
    if args.enable_prefix_caching and args.dataset_name != "random":
        raise ConfigError(f"enable_prefix_caching: dataset {args.dataset_name!r} has lengths, and no tokens to compare")
    if args.num_r_workers is not None and args.num_r_workers < 0:
        raise ConfigError(f"num_r_workers must be at least 0, not {args.num_r_workers}")
    check_r_workers(args.num_r_workers)
    check_state_flags(args)
    workload, rate = read_workload(args)
    if args.max_model_len is not None and workload.longest > args.max_model_len:
        raise ConfigError(f"prompt + output reach {workload.longest} tokens, and max_model_len is {args.max_model_len}")
    check_context(named_shape(args.model) if args.model else None, workload.longest, "prompt + output")
    chosen = argparse.Namespace(**vars(args) | {"num_mini_batches": _num_mini_batches(args, workload)})
    return (_gpu_alone if args.num_r_workers == 0 else _split)(chosen, workload, rate)


def _num_mini_batches(args: argparse.Namespace, workload: SimulatedWorkload) -> int:
    """Return the given number of mini-batches, or the one with the shortest mean step.

    A third mini-batch hides the link to R-workers, but the S-worker loads the weights a third time per step. Return 2
    with ``--s-part-seconds``, which is the time of a single batch size.
    """
    if args.num_mini_batches is not None:
        return int(args.num_mini_batches)
    if args.num_r_workers == 0 or args.s_part_seconds is not None:
        return 2
    # Numbers of mini-batches that ``auto`` compares
    choices = (2, 1, 3)  # of equally fast numbers ``min`` takes the first
    return min(choices, key=lambda number: _mean_step_seconds(args, workload, number))


def _mean_step_seconds(args: argparse.Namespace, workload: SimulatedWorkload, num_mini_batches: int) -> float:
    """Return the seconds per step of a full batch, at the mean context or averaged over contexts.
    The latter is for schedules that start all sequences together, whose contexts grow together.
    """
    given = vars(args) | {"num_mini_batches": num_mini_batches}
    plan_args = argparse.Namespace(**given | plan_words(argparse.Namespace(**given), workload))
    planner = read_inputs(plan_args).planner
    model = planner.step_model(args.num_r_workers or planner.plan(plan_args.mini_batch_size).num_r_workers)
    described, seats = planner.workload, min(args.max_num_seqs, len(workload))
    contexts = np.array([described.mean_context])
    # Number of context lengths, from the prompt's to the whole sequence's, whose step times are averaged
    ages = 16
    if SCHEDULES[args.schedule].waves:
        contexts = described.prompt_len + described.output_len * (np.arange(ages) + 0.5) / ages
    rows = seats * described.rows_per_output_token
    return float(np.mean([model.seconds(Load(rows, seats, seats * context)) for context in contexts.tolist()]))


def _gpu_alone(args: argparse.Namespace, workload: SimulatedWorkload, rate: float) -> SimulationInputs:
    for name in OF_R_WORKERS:
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise ConfigError(f"num_r_workers is 0, the GPU alone: {name} has no place there; leave it out")
    if args.state_on == "s" or args.state_memory:
        raise ConfigError("num_r_workers is 0, the GPU alone: state_on and state_memory have no place there")
    AskedPlacing.of(args).check_r_workers(0)
    read_drafting(args, None)
    if args.model is None or args.gpu is None:
        raise ConfigError("num_r_workers is 0, the GPU alone: name it and its model, --model mistral-7b --gpu a100")
    check_on_cpu(args, is_gpu=True)
    shape, group = asked_shape(args), rank_group(args, one_gpu(args.gpu))
    gpu = one_gpu(args.gpu).times(group.size)
    kv_dtype = shape.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    words = plan_words(args, workload)
    rows = Workload(words["seq_len"], words["prompt_len"], words["output_len_cv"]).read_share(
        shape.windows, shape.chunked
    )
    held, share = gpu_kv_bytes(shape, kv_dtype, shape.read_share(kv_dtype, rows))
    step_time = GpuStepTime(shape, gpu, held, group, share)
    check_weights(shape, gpu, group)
    blocks = step_time.capacity_tokens // args.block_size
    if blocks == 0:
        raise ConfigError(
            f"gpu: {gpu.name} holds the weights of {shape.name} and {step_time.capacity_tokens} cached tokens, fewer "
            f"than the {args.block_size} tokens of one KV block (--tensor-parallel-size takes more GPUs)"
        )
    limits = asked_limits(args, workload, (blocks,), 0, state_blocks_of(args, shape.state_bytes_per_sequence / held))
    title = f"{shape.name} on {gpu.name} alone"
    return SimulationInputs(GpuMachine(step_time), limits, args.schedule, workload, rate, title, ())


def _split(args: argparse.Namespace, workload: SimulatedWorkload, rate: float) -> SimulationInputs:
    plan_args = argparse.Namespace(**vars(args) | plan_words(args, workload))
    inputs = read_inputs(plan_args)
    planner = inputs.planner
    workers = args.num_r_workers or planner.plan(plan_args.mini_batch_size).num_r_workers
    placing = AskedPlacing.of(args)
    placing.check_r_workers(workers)
    if planner.state_bytes_per_sequence:
        check_uncut(args.kv_shard_tokens)
    model = planner.step_model(workers)
    capacity = planner.capacity_tokens
    blocks = UNBOUNDED_TOKENS if math.isinf(capacity) else int(capacity) // args.block_size
    balanced = model.balanced_kv_tokens_each(args.max_num_seqs)
    speeds = asked_speeds(args.r_worker_speeds, workers)
    kv_bytes = planner.kv_bytes_per_token or 0
    per_moved = args.seconds_per_moved_token or (kv_bytes / MOVED_BYTES_PER_SECOND or math.inf)
    drafting = read_drafting(args, inputs)
    limits = replace(
        asked_limits(
            args, workload, (blocks,) * workers, scratch_tokens_of(inputs), state_blocks_of(args, planner.state_tokens)
        ),
        num_speculative_tokens=drafting.num_speculative_tokens if drafting else 0,
        balanced_kv_tokens=balanced,
        idle_s_share=model.idle_s_share(args.max_num_seqs),
        bandwidths=speeds or (1.0,) * workers,
        seconds_per_moved_token=per_moved,
        placing=placing.uncut
        if planner.state_bytes_per_sequence
        else placing.chosen(args.max_model_len or workload.longest, (blocks,) * workers, args.block_size, balanced),
        hosts=tuple(str(index // planner.r_workers_per_host) for index in range(workers)),
    )
    limits = with_states_here(args, planner, limits)
    machine = SplitMachine(model, planner.read_share * planner.num_ranks * kv_bytes, speeds, per_moved)
    of_each = f" of each of {planner.num_ranks} ranks" if planner.num_ranks > 1 else ""
    title = f"{inputs.title}, {workers} R-worker(s){of_each}"
    prefill, num_prefill = prefill_forecast(args), args.num_prefill_workers or 0
    if prefill:
        title += f", {num_prefill} prefill worker(s)"
    return SimulationInputs(
        machine, limits, args.schedule, workload, rate, title, inputs.assumptions, prefill, num_prefill, drafting,
        read_timeline(args, workers), inputs.server.best().service() if inputs.server else None,
    )  # fmt: skip
