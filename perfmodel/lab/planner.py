"""The planner: plans from measured or assumed times, by equations 7 to 11 with prompts, transport and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.placing import WHOLE, Placing
from fastdecode.core.types import SPLIT_TOKENS
from fastdecode.perfmodel import equations
from fastdecode.perfmodel.lab.cache_room import CacheRoom, round_up
from fastdecode.perfmodel.lab.step_mix import StepMix
from fastdecode.perfmodel.load import Load, barrier, mean_parts
from fastdecode.perfmodel.service import prompt_chunks, prompt_pairs
from fastdecode.perfmodel.sizing import NO_PRICES, Candidate, Plan, Prices, Workload
from fastdecode.perfmodel.stages import NO_CONTENTION, Contention, RPart, SPart, Transport
from fastdecode.perfmodel.states_here import StatesHere
from fastdecode.perfmodel.step_model import NO_TRANSPORT, StepModel
from fastdecode.perfmodel.storage_costs import NO_STORAGE_COSTS, StorageCosts


@dataclass(frozen=True)
class Planner:
    """A machine and a workload. Each method answers one question about them.
    Under tensor parallelism each of ``num_ranks`` equal ranks has its own R-workers, which hold the rank's heads of all
    sequences. All figures except numbers of hosts are then one rank's: ``s_part`` with its collectives, ``r_part``,
    ``transport``, and numbers of R-workers.

    ``capacity_tokens``: C, the cached tokens over all layers that fit on one R-worker. ``interval_steps``: F, the steps
    between two micro-batches; None: the default. ``…_overhead_seconds``: the host's own time in a step, as a fixed
    part, per sequence (``row``), and per R-worker. ``kv_bytes_per_token``: bytes of a cached token over all layers;
    only reported. ``read_share``: fraction of these bytes that a step reads, with windows and indexes; ``r_part``
    already has the seconds of a cached token of the mean layer. ``num_r_workers``: size of an existing pool; None for
    as many as keep up with the S-worker. ``state_bytes_per_sequence``: over all recurrent layers; a state takes memory
    from the cached tokens, unless the S-worker keeps it (``states``). ``pair_seconds``: the S-worker's seconds per
    query and key of a prompt, over all layers; 0 if unknown. ``contention``: slowdown of S-worker and R-workers on the
    same cores. ``waits_for_slowest``: add each layer's wait for the slowest R-worker, which the paper omits.
    """

    workload: Workload
    num_layers: int
    s_part: SPart
    r_part: RPart
    transport: Transport = NO_TRANSPORT
    num_mini_batches: int = 2
    capacity_tokens: float = math.inf
    r_workers_per_host: int = 1
    prices: Prices = NO_PRICES
    step_overhead_seconds: float = 0.0
    row_overhead_seconds: float = 0.0
    r_worker_overhead_seconds: float = 0.0
    interval_steps: int | None = None
    kv_bytes_per_token: int | None = None
    num_ranks: int = 1
    placing: Placing = WHOLE
    read_share: float = 1.0
    num_r_workers: int | None = None
    storage: StorageCosts = NO_STORAGE_COSTS
    state_bytes_per_sequence: int = 0
    states: StatesHere | None = None
    pair_seconds: float = 0.0
    contention: Contention = NO_CONTENTION
    waits_for_slowest: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_mini_batches", "r_workers_per_host", "num_ranks", "num_r_workers"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"{name} must be at least 1, not {number}")
        if self.interval_steps is not None and not 1 <= self.interval_steps <= self.workload.output_len:
            raise ConfigError(
                f"interval_steps must be from 1 to the {self.workload.output_len:g} steps of a sequence, "
                f"not {self.interval_steps}"
            )
        room = self.capacity_tokens - self.state_tokens
        if room < min(self.workload.seq_len, SPLIT_TOKENS + self.workload.shared_prefix_len):
            beside = " beside its states" if self.state_bytes_per_sequence else ""
            raise PlanError(
                f"one R-worker's memory holds {max(room, 0):.0f} cached tokens{beside}, "
                f"{math.ceil(self.workload.seq_len - room):.6g} fewer than one sequence of {self.workload.seq_len:g}"
            )

    def plan(self, mini_batch_size: int) -> Plan:
        """Return the plan: the fewest R-workers that keep up with the S-worker, or the existing R-workers.
        The plan includes the load-stabilizing schedule. Raise PlanError if existing R-workers cannot hold the batch.
        """
        if mini_batch_size < 1:
            raise ConfigError(f"mini_batch_size must be at least 1, not {mini_batch_size}")
        in_flight = equations.in_flight(mini_batch_size, self.num_mini_batches)
        exact, for_memory = self.balanced_r_workers(mini_batch_size), self.memory_r_workers(in_flight)
        needed = self.num_r_workers or max(round_up(self.enough_r_workers(mini_batch_size)), self.placing.copies)
        if self.num_r_workers and for_memory > needed:
            raise PlanError(
                f"{needed} R-worker(s) cannot hold {in_flight} sequences in flight ({self.placing.copies} of each), "
                f"{for_memory} could: take a smaller mini-batch, or give more --kv-cache-memory"
            )
        if self.states:
            self.states.check_places(in_flight, self.placing.copies, self.state_bytes_per_sequence)
        chosen = self.candidate(mini_batch_size, max(needed, for_memory))
        # Numbers of R-workers to show, as multiples of the plan's
        around_the_knee = (0.25, 0.5, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 2.0)
        return Plan(
            mini_batch_size=mini_batch_size,
            in_flight=in_flight,
            num_mini_batches=self.num_mini_batches,
            num_r_workers_exact=exact,
            r_workers_set_by="pool" if self.num_r_workers else "memory" if for_memory > needed else "bandwidth",
            micro_batch_size=self.cache_room.micro_batch(in_flight),
            interval_steps=self.cache_room.interval(in_flight),
            kv_load_limit=self.cache_room.load_limit(in_flight, chosen.num_r_workers),
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_bytes_read_per_token=self.kv_bytes_read_per_token,
            r_workers_bound_by=self.r_part.bound_by or None,
            r_workers_arithmetic_over_reads=self.r_part.arithmetic_over_reads or None,
            state_bytes_per_sequence=self.state_bytes_per_sequence,
            r_worker_bandwidth_gb_per_s=_r_worker_bandwidth(self),
            candidates=tuple(
                self.candidate(mini_batch_size, number)
                for number in sorted({max(1, round(part * chosen.num_r_workers)) for part in around_the_knee})
            ),
            tensor_parallel_size=self.num_ranks,
            total_r_workers=self.num_ranks * chosen.num_r_workers,
            kv_replicas=self.placing.copies,
            ttft_seconds=self.first_token_seconds(in_flight, chosen.num_r_workers),
            **vars(chosen),
        )

    def balanced_r_workers(self, mini_batch_size: int) -> float:
        """Return how many R-workers equation 11 needs to keep up with the S-part or an overlapped hop, unrounded."""
        return equations.balanced_r_workers(
            mini_batch_size,
            self._attended_context,
            self.r_part.seconds_per_token,
            self.other_stages(mini_batch_size),
            self.workload.shared_prefix_len,
            self.r_part.call_seconds,
            self.r_part.row_seconds
            + self.r_part.prompt_row_seconds * (self.workload.rows_per_output_token - 1.0)
            + self.storage.append_seconds * self.copied_rows(self.workload.rows_per_output_token),
        )

    def enough_r_workers(self, mini_batch_size: int) -> float:
        """Return how many R-workers are needed so that the slowest keeps up, unrounded: equation 11 times the barrier.
        The barrier (the largest load divided by the mean) depends on the result, since more R-workers have fewer
        sequences each. So two iterations are made.
        """
        exact = self.balanced_r_workers(mini_batch_size)
        if not self.waits_for_slowest:
            return exact
        spread, enough = self.workload.context_spread, exact
        most_for_slowest = 1.5  # at most this many times the R-workers of equation 11
        for _ in range(2):
            each = mini_batch_size / max(enough, 1.0)
            enough = exact * min(barrier(enough, each, spread), most_for_slowest)
        return enough

    def step_model(self, num_r_workers: float) -> StepModel:
        """Return the model of any step with ``num_r_workers`` R-workers."""
        return StepModel(
            self.num_layers,
            self.s_part,
            self.r_part,
            num_r_workers,
            self.num_mini_batches,
            self.transport,
            self.step_overhead_seconds + self.r_worker_overhead_seconds * num_r_workers,
            self.row_overhead_seconds,
            contention=self.contention,
            drains=self.contention != NO_CONTENTION,
            storage=self.storage,
            states=self.states,
            context_spread=self.workload.context_spread if self.waits_for_slowest else None,
            ranges_each=max(1.0, math.ceil(self.workload.mean_context / self.placing.segment_tokens)),
        )

    def candidate(self, mini_batch_size: int, num_r_workers: int) -> Candidate:
        """Return the plan's figures if it had ``num_r_workers`` R-workers."""
        in_flight = equations.in_flight(mini_batch_size, self.num_mini_batches)
        model, steps = self.step_model(num_r_workers), self.steps(in_flight, num_r_workers)
        seconds = sum(share * model.seconds(load) for share, load in steps)
        stages = [(share, model.stages(load)) for share, load in steps]
        rows, kv_tokens = self.mean_step(in_flight, num_r_workers)
        mean_load = self.load(rows, in_flight, kv_tokens, num_r_workers)
        rate = StepMix.of(self.workload, in_flight).decoding / seconds
        hosts = round_up(self.num_ranks * num_r_workers / self.r_workers_per_host)
        per_stage = self.num_layers * self.num_mini_batches
        return Candidate(
            num_r_workers=num_r_workers,
            num_hosts=hosts,
            step_seconds=seconds,
            output_tokens_per_second=rate,
            sequence_seconds=self.workload.output_len * seconds,
            s_busy=per_stage * sum(share * each.s_part for share, each in stages) / seconds,
            r_busy=per_stage * sum(share * each.r_part for share, each in stages) / seconds,
            bottleneck=model.bottleneck(mean_load),
            fits_memory=num_r_workers >= self.memory_r_workers(in_flight),
            price_per_million_tokens=self.prices.per_million_tokens(hosts, rate),
        )

    def load(self, rows: float, sampled: float, kv_tokens: float, num_r_workers: float) -> Load:
        """Return the load of a step with ``rows`` rows, including the work for ranges and second copies."""
        parts = mean_parts(sampled, self.workload.mean_context, self.placing)
        return Load(rows, sampled, kv_tokens, *parts, self.copied_rows(rows, num_r_workers))

    def mean_step(self, in_flight: float, num_r_workers: float) -> tuple[float, float]:
        """Return the rows of the mean step, and the cached tokens that the step reads.

        Each R-worker reads a shared prefix once per mini-batch.
        """
        shared = self.workload.shared_prefix_len
        own = in_flight * (self._attended_context - shared)
        tokens = in_flight * self.workload.rows_per_output_token
        return tokens, own + shared * num_r_workers * self.num_mini_batches

    @property
    def _attended_context(self) -> float:
        """The cached tokens that a row attends to, on average.
        Half of all steps attend on second copies, where each sequence has its own copy of the shared prefix.
        """
        return self.workload.mean_context + (self.placing.copies - 1) / 2 * self.workload.shared_prefix_len

    def copied_rows(self, rows: float, num_r_workers: float = math.inf) -> float:
        """Return how many of ``rows``, prompts' included, a second R-worker stores too; 0 with one copy."""
        return rows if self.placing.twice and num_r_workers > 1 else 0.0

    def steps(self, in_flight: float, num_r_workers: float) -> list[tuple[float, Load]]:
        """Return each kind of step in the steady state: the fraction of all steps that it makes up, and its load."""
        mix = StepMix.of(self.workload, in_flight)
        _, kv_tokens = self.mean_step(mix.decoding, num_r_workers)
        return [(share, self.load(rows, mix.decoding, kv_tokens, num_r_workers)) for share, rows in mix.steps()]

    def mean_step_seconds(self, in_flight: float, num_r_workers: float) -> float:
        """Return the mean seconds of a step: time per output token (TPOT) of every sequence."""
        model = self.step_model(num_r_workers)
        return sum(share * model.seconds(load) for share, load in self.steps(in_flight, num_r_workers))

    def first_token_seconds(self, in_flight: float, num_r_workers: float) -> float:
        """Return the time to first token of a request that starts at once, while no other prompt is computed.
        The prompt is computed in chunks, each beside the decodes of a step. If prefill workers compute prompts, the
        time is one step.
        """
        workload, model = self.workload, self.step_model(num_r_workers)
        tokens = 0.0 if workload.remote_prompts else workload.prompt_len - workload.shared_prefix_len
        _, kv_tokens = self.mean_step(in_flight, num_r_workers)
        steps = (
            count * model.seconds(self.load(in_flight + rows, in_flight, kv_tokens, num_r_workers))
            for count, rows in prompt_chunks(tokens)
        )
        return sum(steps) + self.pair_seconds * prompt_pairs(tokens, workload.shared_prefix_len)

    def other_stages(self, mini_batch_size: int) -> float:
        """Return the seconds of the slowest stage of a layer other than the R-part."""
        rows = mini_batch_size * self.workload.rows_per_output_token
        copied_bytes = self.storage.copied_bytes * self.copied_rows(rows)
        hop = self.transport.stage_seconds(rows, last_bytes=copied_bytes) if self.transport.overlapped else 0.0
        return max(self.s_seconds(rows), hop)

    def s_seconds(self, rows: float) -> float:
        """Return T(B) of the mean step with prompts and decodes, including recurrent states on the S-worker."""
        decodes = rows / self.workload.rows_per_output_token
        states = self.states.seconds(decodes, rows - decodes) if self.states else 0.0
        return self.s_part.layer_seconds(rows) + states

    def has_places(self, in_flight: int) -> bool:
        """Return whether the S-worker's memory holds ``in_flight`` sequences' states; true if R-workers keep them."""
        return self.states is None or in_flight * self.placing.copies <= self.states.num_places

    def memory_r_workers(self, in_flight: int) -> int:
        """Return how many R-workers have the memory for the batch at the schedule's peak load."""
        return self.cache_room.memory_r_workers(in_flight)

    @property
    def cache_room(self) -> CacheRoom:
        """The memory that the schedule's peak load needs on R-workers."""
        return CacheRoom(
            self.workload, self.capacity_tokens, self.state_tokens, self.placing.copies, self.interval_steps
        )

    @property
    def state_tokens(self) -> float:
        """Cached tokens that take the memory of one sequence's states on R-workers."""
        if self.states:
            return 0.0
        return self.state_bytes_per_sequence / self.kv_bytes_per_token if self.kv_bytes_per_token else 0.0

    @property
    def kv_bytes_read_per_token(self) -> float | None:
        """Bytes over all layers that a step reads per token of a context; None if unknown."""
        return None if self.kv_bytes_per_token is None else self.read_share * self.kv_bytes_per_token


def _r_worker_bandwidth(planner: Planner) -> float | None:
    """Return the gigabytes of cache per second that an R-worker reads; None if bytes are unknown."""
    if planner.kv_bytes_read_per_token is None:
        return None
    return planner.kv_bytes_read_per_token / planner.num_layers / planner.r_part.seconds_per_token / 1e9
