"""The simulator against cases worked out by hand, and what must hold for any workload."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.hardware import LIMITS, PlainMachine

from fastdecode.core.errors import RequestError
from fastdecode.core.metrics import StepRecord
from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill, StoredAt
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.gpu_only import GpuStepTime
from fastdecode.perfmodel.lab.simulate import (
    GpuMachine,
    Machine,
    PrefillFleet,
    SimulatedRequest,
    Simulator,
    SplitMachine,
)
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.partition import Forecast
from fastdecode.perfmodel.prefill_times import PrefillTimes, PromptAttentionTimes
from fastdecode.perfmodel.presets import GPUS
from fastdecode.perfmodel.stages import MeasuredSPart, RPart, Transport
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler
from fastdecode.scheduler import Sequence as ScheduledSequence
from fastdecode.scheduler.policy.prefill_policy import LeastWaiting


def simulate(
    requests: list[SimulatedRequest],
    schedule: str = "stall-free",
    machine: Machine | None = None,
    limits: Limits = LIMITS,
) -> list[StepRecord]:
    steps: list[StepRecord] = []
    Simulator(Scheduler(SCHEDULES[schedule], limits), machine or PlainMachine(), steps.append).run(requests)
    return steps


def request(prompt_len: int, output_len: int, arrival: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest([0] * prompt_len, output_len, arrival)


def test_a_second_per_step() -> None:
    """Tokens appear when a step ends; a request that arrives in a step starts with the next; idle time is skipped."""
    early, late, after = request(4, 3), request(5, 2, 0.5), request(6, 1, 10.25)
    steps = simulate([after, early, late])
    assert list(early.token_seconds) == [1.0, 2.0, 3.0]
    assert list(late.token_seconds) == [2.0, 3.0]
    assert list(after.token_seconds) == [11.25]
    assert [each.start_seconds for each in (early, late, after)] == [0.0, 1.0, 10.25]
    assert late.scheduling_delay_seconds == 0.5
    assert [step.num_tokens for step in steps] == [4, 1 + 5, 1 + 1, 6]
    assert [step.num_output_tokens for step in steps] == [1, 2, 2, 1]
    assert [step.is_decode for step in steps] == [False, False, True, False]


def test_time_is_made_of_rows_and_cached_tokens() -> None:
    """A prompt costs only its rows; each decode costs one row, and attends its context and itself."""
    alone = request(10, 4)
    simulate([alone], machine=PlainMachine(0.0, 1.0, 100.0))
    gaps = [10.0, 1 + 1100.0, 1 + 1200.0, 1 + 1300.0]
    assert list(alone.token_seconds) == pytest.approx(np.cumsum(gaps).tolist())


def test_without_scratch_every_chunk_attends_what_came_before() -> None:
    limits = replace(LIMITS, scratch_tokens=0, max_num_batched_tokens=8)
    alone = request(20, 2)
    steps = simulate([alone], machine=PlainMachine(0.0, 1.0, 100.0), limits=limits)
    assert [step.kv_load for step in steps] == [8, 16, 20, 21]
    assert list(alone.token_seconds) == pytest.approx([8 + 8 + 4 + 4400, 8 + 8 + 4 + 4400 + 1 + 2100])


def test_a_long_prompt_stalls_decodes_only_where_it_is_computed_whole() -> None:
    """48 rows at once stall the decodes, and chunks of 7 rows do not, as in Sarathi-Serve's figure 7."""
    gaps = {}
    for schedule, budget in (("prefill-first", 64), ("stall-free", 8)):
        decoding = request(2, 12)
        limits = replace(LIMITS, max_num_batched_tokens=budget)
        simulate([decoding, request(48, 1, 0.5)], schedule, PlainMachine(0.0, 1.0), limits)
        gaps[schedule] = decoding.seconds_between_tokens.max()
    assert gaps == {"prefill-first": 49.0, "stall-free": 8.0}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [100, 10])
@pytest.mark.parametrize("limit", [None, 200])
def test_every_request_ends_with_its_length_and_time_only_passes(schedule: str, blocks: int, limit: int | None) -> None:
    """Requests wait, are preempted or are computed again, and yet all end; with few blocks some are preempted."""
    rng = np.random.default_rng(blocks)
    requests = [request(*rng.integers(1, 30, 2).tolist(), float(rng.uniform(0, 300))) for _ in range(60)]
    limits = replace(LIMITS, num_blocks=(blocks, blocks), kv_load_limit=limit)
    scheduler = Scheduler(SCHEDULES[schedule], limits)
    steps: list[StepRecord] = []
    simulator = Simulator(scheduler, PlainMachine(1.0, 0.1, 0.01), steps.append)
    simulator.run(requests)
    assert all(each.finished for each in requests) and simulator.num_finished == len(requests)
    assert all((each.seconds_between_tokens > 0).all() for each in requests)
    assert all(each.arrival_seconds <= each.start_seconds < each.token_seconds[0] for each in requests)  # type: ignore[operator]
    assert max(each.token_seconds[-1] for each in requests) == simulator.now_seconds
    assert sum(step.num_output_tokens for step in steps) == sum(each.output_len for each in requests)
    rows = sum(len(each.prompt_token_ids) + each.output_len - 1 for each in requests)
    computed = sum(step.num_tokens for step in steps)
    assert computed > rows if scheduler.statistics.preemptions else computed == rows
    assert simulator.num_steps == len(steps)


def test_small_caches_do_preempt() -> None:
    """The settings of the test above do cause preemptions."""
    requests = [request(30, 30) for _ in range(8)]
    scheduler = Scheduler(SCHEDULES["stall-free"], replace(LIMITS, num_blocks=(10, 10)))
    Simulator(scheduler, PlainMachine()).run(requests)
    assert scheduler.statistics.preemptions > 0 and all(each.finished for each in requests)


@pytest.mark.parametrize("schedule", ["stall-free", "prefill-first"])
def test_outputs_that_are_only_counted_are_scheduled_as_lists_of_tokens_are(schedule: str) -> None:
    """Outputs that are only counted get the schedule of listed tokens, with preemptions and cached prefixes."""
    rng = np.random.default_rng(7)
    sizes = [(int(rng.integers(20, 30)), int(rng.integers(20, 30))) for _ in range(30)]
    limits = replace(LIMITS, num_blocks=(10, 12), block_size=8, prefix_caching=True)
    counted = simulate([request(*size) for size in sizes], schedule, limits=limits)

    scheduler = Scheduler(SCHEDULES[schedule], limits)
    sequences = [ScheduledSequence(i, [0] * prompt, output) for i, (prompt, output) in enumerate(sizes)]
    for sequence in sequences:
        scheduler.add(sequence)
    listed = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        listed.append((step.num_tokens, tuple(step.kv_loads), step.is_decode))
        scheduler.commit(step)
        for sequence in (sequences[i] for mini_batch in step.mini_batches for i in mini_batch.sampled_ids):
            sequence.append(0)
            if len(sequence.output_token_ids) == sequence.max_tokens:
                scheduler.finish(sequence, "length")
    assert [(step.num_tokens, step.kv_loads, step.is_decode) for step in counted] == listed
    assert scheduler.statistics.preemptions > 0


def test_a_simulation_can_be_stopped_and_an_impossible_request_is_refused() -> None:
    endless = request(4, 50)
    Simulator(Scheduler(SCHEDULES["fcfs"], LIMITS), PlainMachine()).run([endless], lambda each: each.now_seconds >= 3)
    assert list(endless.token_seconds) == [1.0, 2.0, 3.0] and not endless.finished
    assert request(1, 1).scheduling_delay_seconds == float("inf")
    with pytest.raises(RequestError, match="KV blocks"):
        simulate([request(40, 10)], limits=replace(LIMITS, num_blocks=(2, 2)))


S_PART = MeasuredSPart((8, 64), (1e-3, 4e-3), (2e-3, 3e-3))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_split_step_waits_for_the_busiest_r_worker(mini_batches: int) -> None:
    """Over ten layers the load of the other R-worker changes only its own time."""
    model = StepModel(10, S_PART, RPart(1e-6, 1e-4), 2, mini_batches, Transport(1000, (1e9,), 1e-5), 5e-3)
    machine = SplitMachine(model, 100)
    even, uneven = machine.cost(Load(64, 64, 18000), [9000, 9000]), machine.cost(Load(64, 64, 10000), [9000, 1000])
    assert even.wall_seconds == uneven.wall_seconds == model(64, 18000)
    assert uneven.r_seconds.tolist() == pytest.approx(
        [10 * (mini_batches * 1e-4 + load * 1e-6) for load in (9000, 1000)]
    )
    assert machine.cost(Load(64, 64, 9000), [9000, 0]).r_seconds[1] == 0.0
    rows = 64 // mini_batches
    assert even.s_seconds == pytest.approx(mini_batches * (10 * S_PART.layer_seconds(rows) + S_PART.head_seconds(rows)))
    assert even.transfer_seconds == pytest.approx(10 * mini_batches * (1e-5 + rows * 1e-6))
    assert even.host_seconds == 5e-3
    assert machine.cost(Load(64, 64, 90000), [90000, 0]).wall_seconds > even.wall_seconds


def test_only_sampled_rows_meet_the_head_and_the_host() -> None:
    """All rows of a prompt but its last go through the layers only."""
    model = StepModel(
        10, S_PART, RPart(1e-6), step_overhead_seconds=5e-3, row_overhead_seconds=1e-4, num_mini_batches=1
    )
    decode, prompt = (SplitMachine(model).cost(Load(64, sampled, 0), [0]) for sampled in (64, 8))
    head = S_PART.head_seconds(64) - S_PART.head_seconds(8)
    assert head > 0 and decode.s_seconds - prompt.s_seconds == pytest.approx(head)
    assert decode.host_seconds - prompt.host_seconds == pytest.approx(56e-4)
    assert decode.wall_seconds - prompt.wall_seconds == pytest.approx(head + 56e-4)
    assert model(64, 0) == decode.wall_seconds


def test_rows_cost_r_workers_what_they_cost_the_step() -> None:
    """A layer and mini-batch cost one call, rows and tokens; prompt rows attend on the S-worker."""
    model = StepModel(10, S_PART, RPart(1e-6, 1e-4, 1e-5), 2, 2)
    cost = SplitMachine(model).cost(Load(64, 40, 10000), [9000, 1000])
    assert cost.r_seconds.tolist() == pytest.approx(
        [20 * (1e-4 + 1e-5 * 10 + 1e-6 * load / 2) for load in (9000, 1000)]
    )
    assert cost.r_seconds[0] == pytest.approx(20 * model.stages(Load(64, 40, 18000)).r_part)


def test_those_who_come_together_start_in_their_order() -> None:
    requests = [request(8, 4) for _ in range(6)]
    simulate(requests, "fcfs", limits=replace(LIMITS, max_num_seqs=1))
    starts = [each.start_seconds for each in requests]
    assert starts == sorted(starts) and len(set(starts)) == 6


def test_records_add_up() -> None:
    model = StepModel(10, S_PART, RPart(1e-6, 1e-4), 2, 2, Transport(1000, (1e9,), 1e-5), 5e-3)
    steps = simulate([request(5, 9), request(7, 3)], machine=SplitMachine(model, 100))
    for step in steps:
        assert step.s_seconds + step.wait_seconds + step.host_seconds == pytest.approx(step.wall_seconds)
        assert step.kv_bytes_read == 100 * step.kv_load
        assert len(step.r_seconds) == len(step.transfer_seconds) == len(step.kv_loads) == 2


def test_a_gpu_alone_is_its_roofline() -> None:
    """The step takes the longer of reading weights and computing, and then reading the cache."""
    shape, gpu = BUILT_IN["mistral-7b"], GPUS["a100"]
    step_time = GpuStepTime(shape, gpu, 131072)
    assert shape.kv_layout("bfloat16").kv_bytes_per_token == 131072
    weights = shape.weight_bytes / (0.8 * 2039e9)
    assert step_time(1, 0) == pytest.approx(weights)
    assert step_time(4096, 0) == pytest.approx(2 * 4096 * shape.parameters / (0.62 * 312e12))
    assert step_time(1, 10_000) - step_time(1, 0) == pytest.approx(10_000 * 131072 / (0.8 * 2039e9))
    assert step_time.capacity_tokens == int((0.9 * 80e9 - shape.weight_bytes) / 131072)
    cost = GpuMachine(step_time).cost(Load(1, 1, 10000), [10_000])
    assert cost.s_seconds == pytest.approx(weights) and cost.s_seconds + cost.r_seconds[0] == cost.wall_seconds


def prefill_forecast(seconds_per_token: float) -> Forecast:
    """Return a forecast of prompts without attention: so many seconds per token, on each worker."""
    s_part = MeasuredSPart((1, 1 << 20), (seconds_per_token, seconds_per_token * (1 << 20)), (0.0, 0.0))
    return Forecast(PrefillTimes(1, s_part, PromptAttentionTimes(1e-12), 1.0, before_share=0.0))


def simulate_prefill(
    requests: list[SimulatedRequest], num_workers: int, machine: Machine | None = None
) -> list[StepRecord]:
    forecast = prefill_forecast(0.1)
    steps: list[StepRecord] = []
    scheduler = Scheduler(SCHEDULES["stall-free"], LIMITS, LeastWaiting(forecast, workers=range(num_workers)))
    fleet = PrefillFleet(forecast, num_workers)
    Simulator(scheduler, machine or PlainMachine(), steps.append, fleet).run(requests)
    assert fleet.num_prompts == len(requests)
    return steps


def test_prompts_on_prefill_workers_by_hand() -> None:
    """40 tokens on two workers take 2 s, then a token comes each second; the second prompt waits for nothing."""
    first, second = request(40, 3), request(20, 3, 2.5)
    steps = simulate_prefill([first, second], 2)
    assert list(first.token_seconds) == pytest.approx([2.0, 3.0, 4.0])
    # The step at 3.0 learns of it, and the prompt takes the workers for 1 s.
    assert list(second.token_seconds) == pytest.approx([4.0, 5.0, 6.0])
    assert first.start_seconds == 0.0 and second.start_seconds == pytest.approx(3.0)
    assert sum(step.num_output_tokens for step in steps) == 6
    assert all(step.is_decode for step in steps)


def test_a_fleet_counts_the_prefix_of_a_prompt() -> None:
    model = PrefillTimes(2, MeasuredSPart((100,), (0.1,), (0.0,)), PromptAttentionTimes(1e-3), 1.0)
    fleet = PrefillFleet(Forecast(model), 2)
    parts = (PrefillPart(0, 100, 130), PrefillPart(1, 130, 150))
    stores, prefix = (StoredAt(0, 1, 0, 150, 1),), (StoredAt(0, 1, 0, 100, 1),)
    fleet.submit(RemotePrefill(1, 1, stores, tuple(range(150)), parts, prefix), 5.0)
    assert fleet.next_seconds == pytest.approx(5.0 + model.chain_seconds((30, 20), (), 100)[-1])
    assert fleet.next_seconds > 5.0 + 2 * 50 * 100 * 1e-3 / 2


def test_many_prompts_go_side_by_side() -> None:
    """Four prompts of 2 s each take two workers 4 s, so neither worker is ever idle."""
    requests = [request(20, 1) for _ in range(4)]
    simulate_prefill(requests, 2)
    assert sorted(each.token_seconds[0] for each in requests)[-1] == pytest.approx(4.0)


def test_prefill_workers_keep_decodes_from_stalling() -> None:
    """A prompt of 48 rows, which stalls a decode for 48 s on the S-worker, does not delay a decode here."""
    decoding = request(2, 12)
    simulate_prefill([decoding, request(48, 1, 0.5)], 1, PlainMachine(0.0, 1.0))
    assert decoding.seconds_between_tokens.max() == pytest.approx(1.0)
