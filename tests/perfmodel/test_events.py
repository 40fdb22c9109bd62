"""Worker events of a simulation: reading, random draws, and cases computed by hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.hardware import LIMITS, PlainMachine

from fastdecode.core.errors import ConfigError, PlanError, WorkerLostError
from fastdecode.core.metrics import StepRecord
from fastdecode.core.placing import Placing
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.gpu_only import GpuStepTime
from fastdecode.perfmodel.lab.simulate import (
    GpuMachine,
    Machine,
    PrefillFleet,
    SimulatedRequest,
    Simulator,
    SplitMachine,
    Timeline,
    WorkerEvent,
    random_losses,
    read_events,
)
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.partition import Forecast
from fastdecode.perfmodel.prefill_times import PrefillTimes, PromptAttentionTimes
from fastdecode.perfmodel.presets import GPUS
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import SCHEDULES, Limits, Scheduler
from fastdecode.scheduler.policy.prefill_policy import LeastWaiting

TWO = replace(LIMITS, placing=Placing(copies=2))
LOSE_ONE = '{"seconds": 1, "event": "lose", "r_worker": 1}'


def request(prompt_len: int, output_len: int, arrival: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest([0] * prompt_len, output_len, arrival)


def simulate(
    requests: list[SimulatedRequest],
    events: list[WorkerEvent],
    limits: Limits = LIMITS,
    machine: Machine | None = None,
    schedule: str = "stall-free",
) -> tuple[Simulator, list[StepRecord]]:
    steps: list[StepRecord] = []
    scheduler = Scheduler(SCHEDULES[schedule], limits)
    simulator = Simulator(scheduler, machine or PlainMachine(), steps.append, events=Timeline(events))
    simulator.run(requests)
    return simulator, steps


def test_events_are_read_in_order_of_time() -> None:
    """A new machine joins under the next number; later lines may name it."""
    lines = [
        {"seconds": 30, "event": "slow", "r_worker": 2, "factor": 1.5},
        {"seconds": 2.5, "event": "lose", "r_worker": 1},
        {"seconds": 20, "event": "join", "r_worker": 2},
        {"seconds": 25, "event": "drain", "prefill_worker": 0},
    ]
    found = read_events("\n\n".join(map(json.dumps, lines)), "f", 2, 1)
    assert found == [
        WorkerEvent(2.5, "lose", 1), WorkerEvent(20.0, "join", 2), WorkerEvent(25.0, "drain", 0, True),
        WorkerEvent(30.0, "slow", 2, False, 1.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", 'must be an object such as {"seconds": 12.5'),
        ('{"seconds": -1, "event": "lose", "r_worker": 1}', "seconds must be a number of at least 0, not -1"),
        ('{"seconds": true, "event": "lose", "r_worker": 1}', "seconds must be a number of at least 0, not True"),
        ('{"seconds": NaN, "event": "lose", "r_worker": 1}', "seconds must be a number of at least 0, not nan"),
        ('{"seconds": 1, "event": "kill", "r_worker": 1}', "event must be one of lose, join, drain, slow, not 'kill'"),
        ('{"seconds": 1, "event": "lose"}', "name one worker, as r_worker or as prefill_worker"),
        ('{"seconds": 1, "event": "lose", "r_worker": 1, "prefill_worker": 1}', "name one worker"),
        ('{"seconds": 1, "event": "lose", "r_worker": "1"}', "r_worker must be a whole number of at least 0, not '1'"),
        ('{"seconds": 1, "event": "lose", "r_worker": 2}', "there is no r_worker 2 at 1 s; there are 2, from 0 on"),
        ('{"seconds": 1, "event": "lose", "prefill_worker": 0}', "no prefill_worker 0 at 1 s; there are none"),
        ('{"seconds": 1, "event": "join", "r_worker": 3}', "r_worker 3 joins, and the next new one must have number 2"),
        ('{"seconds": 1, "event": "lose", "r_worker": 1, "factor": 2}', "factor belongs to slow, not to lose"),
        ('{"seconds": 1, "event": "slow", "r_worker": 1}', "slow needs a factor above 0, such as 2.0, not None"),
        ('{"seconds": 1, "event": "slow", "r_worker": 1, "factor": 0}', "slow needs a factor above 0"),
        ('{"seconds": 1, "event": "lose", "r_worker": 1, "wroker": 2}', "unknown key 'wroker'"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_events(f"{LOSE_ONE}\n\n{line}\n", "events.jsonl", 2)
    assert str(error.value).startswith("events.jsonl, line 3: ") and message in str(error.value)


def test_a_file_without_events_is_refused() -> None:
    with pytest.raises(ConfigError, match="the file has no events"):
        read_events("\n", "f", 2)


def test_random_losses_come_as_often_as_said_and_end_with_a_restart() -> None:
    """The losses of an R-worker do not depend on the number of others."""
    events = list(itertools.islice(random_losses(4, 2.0, 60.0, 5), 8000))
    moments = [each.seconds for each in events]
    assert moments == sorted(moments)
    first = [each for each in events if each.worker == 0]
    assert [each.kind for each in first] == ["lose", "join"] * (len(first) // 2) + ["lose"] * (len(first) % 2)
    up = [b.seconds - a.seconds for a, b in itertools.pairwise(first) if a.kind == "join"]
    down = [b.seconds - a.seconds for a, b in itertools.pairwise(first) if a.kind == "lose"]
    assert np.mean(up) == pytest.approx(7200, rel=0.1) and down == pytest.approx([60.0] * len(down))
    alone = [each for each, _ in zip(random_losses(1, 2.0, 60.0, 5), first, strict=False)]
    assert alone == first
    never = list(itertools.islice(random_losses(2, 2.0, math.inf, 5), 6))
    assert [each.seconds < math.inf for each in never] == [True, True, False, False, False, False]


def test_a_timeline_gives_each_event_once() -> None:
    timeline = Timeline(
        [WorkerEvent(1.0, "lose", 0), WorkerEvent(3.0, "join", 0)], [WorkerEvent(2.0, "slow", 1, factor=2.0)]
    )
    assert timeline.next_seconds == 1.0
    assert [each.seconds for each in timeline.due(2.5)] == [1.0, 2.0]
    assert timeline.next_seconds == 3.0 and not list(timeline.due(2.5))
    assert [each.kind for each in timeline.due(3.0)] == ["join"] and timeline.next_seconds == math.inf


def test_a_loss_by_hand() -> None:
    """Two sequences run on two R-workers, one second per step; an R-worker is lost in the third step.
    Its sequence's third token is discarded; the fourth step recomputes 4 + 3 tokens.
    """
    pair = [request(4, 6), request(4, 6)]
    simulator, steps = simulate(pair, [WorkerEvent(2.5, "lose", 1)])
    assert [list(each.token_seconds) for each in pair] == [[1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6, 7]]
    assert [step.num_tokens for step in steps] == [8, 2, 2, 1 + 6, 2, 2, 1]
    assert [step.lost_workers for step in steps] == [0, 0, 1, 0, 0, 0, 0]
    costs = simulator.interruptions
    assert costs is not None and (costs.num_recomputed, list(costs.pauses())) == (6, [2.0])


def test_with_two_copies_a_loss_repeats_one_row_of_those_that_attended_there() -> None:
    pair = [request(4, 6), request(4, 6)]
    simulator, steps = simulate(pair, [WorkerEvent(2.5, "lose", 1)], TWO)
    assert sorted(len(each.token_seconds) for each in pair) == [6, 6] and len(steps) == 7
    assert sum(step.num_tokens for step in steps) == 2 * (4 + 5) + 1
    costs = simulator.interruptions
    assert costs is not None and (costs.num_recomputed, list(costs.pauses())) == (1, [2.0])


@pytest.mark.parametrize("limits", [LIMITS, TWO, replace(TWO, num_blocks=(100,) * 4, bandwidths=(1.0,) * 4)])
@pytest.mark.parametrize("schedule", ["stall-free", "sls", "prefill-first"])
def test_rows_are_those_of_an_undisturbed_run_and_those_computed_again(limits: Limits, schedule: str) -> None:
    """Under random losses, joins, drains and slowness every token comes, and only the reported rows are recomputed."""
    rng, num_workers = np.random.default_rng(11), len(limits.num_blocks)
    requests = [request(*rng.integers(1, 31, 2).tolist(), float(rng.uniform(0, 60))) for _ in range(80)]
    events = [
        WorkerEvent(float(moment), kind, int(worker), factor=2.0)
        for moment, kind, worker in zip(
            np.sort(rng.uniform(0, 120, 60)),
            rng.choice(["lose", "join", "join", "drain", "slow"], 60),
            rng.integers(1, num_workers, 60),
            strict=True,
        )
    ]
    machine = SplitMachine(StepModel(3, MeasuredSPart((1,), (0.1,), (0.1,)), RPart(1e-3), num_workers))
    simulator, steps = simulate(requests, events, limits, machine, schedule)
    scheduler, costs = simulator.scheduler, simulator.interruptions
    assert all(each.finished for each in requests) and simulator.world.happened["lose"] > 5
    assert all((np.diff(each.token_seconds) > 0).all() for each in requests)
    rows = sum(len(each.prompt_token_ids) + each.output_len - 1 for each in requests)
    assert costs is not None and scheduler.statistics.preemptions == 0
    assert sum(step.num_tokens for step in steps) == rows + costs.num_recomputed > rows
    assert all(state.free == state.num_blocks for state in scheduler.snapshot().r_workers if not state.is_gone)
    assert sum(step.lost_workers for step in steps) <= simulator.world.happened["lose"]
    assert len(costs.pauses()) > 0 and costs.pauses().min() > 0


def test_an_r_worker_that_drains_gives_up_all_it_has_and_then_nobody_attends_there() -> None:
    requests = [request(8, 40) for _ in range(6)]
    simulator, steps = simulate(requests, [WorkerEvent(5.5, "drain", 0)], replace(LIMITS, seconds_per_moved_token=0.0))
    costs = simulator.interruptions
    assert costs is not None and costs.num_recomputed == 0 and simulator.changes.moved == 3
    assert all(step.kv_loads[0] == 0 for step in steps[8:]) and steps[3].kv_loads[0] > 0
    assert simulator.scheduler.snapshot().present == [1]


def test_one_that_joins_takes_its_part() -> None:
    """It joins as a third R-worker, and again after it was lost."""
    requests = [request(8, 50) for _ in range(8)]
    events = [WorkerEvent(5.5, "join", 2), WorkerEvent(20.5, "lose", 2), WorkerEvent(30.5, "join", 2)]
    simulator, steps = simulate(requests, events, replace(LIMITS, seconds_per_moved_token=0.0))
    assert [len(step.kv_loads) for step in (steps[3], steps[15], steps[35])] == [2, 3, 4]
    assert steps[15].kv_loads[2] > 0 and steps[25].kv_loads[2] == 0
    assert steps[35].kv_loads[2] == 0 and steps[35].kv_loads[3] > 0
    assert simulator.world.happened == {"join": 2, "lose": 1}


def test_a_slow_r_worker_takes_so_many_times_as_long() -> None:
    """Equal loads, R-bound: one R-worker is slow from the eleventh to the twentieth step."""
    machine = SplitMachine(StepModel(2, MeasuredSPart((1,), (1e-9,), (1e-9,)), RPart(1.0), 2, num_mini_batches=1))
    requests = [request(20, 30) for _ in range(2)]
    _, steps = simulate(
        requests, [WorkerEvent(500.0, "slow", 1, factor=3.0), WorkerEvent(2500.0, "slow", 1)], machine=machine
    )
    ratios = [step.r_seconds[1] / step.kv_loads[1] / 2 for step in steps if step.kv_loads[1]]
    assert sorted(set(np.round(ratios, 9))) == [1.0, 3.0]
    ends = np.cumsum([step.wall_seconds for step in steps])
    begins = ends - [step.wall_seconds for step in steps]
    slow = [3.0 if 500 <= begin < 2500 else 1.0 for begin, step in zip(begins, steps, strict=True) if step.kv_loads[1]]
    assert ratios == pytest.approx(slow)


def test_a_machine_changes_its_r_workers() -> None:
    """The faster one of two R-workers (speeds 1 and 3) takes both places, and is half as fast in one of them."""
    model = StepModel(2, MeasuredSPart((1,), (1e-3,), (1e-3,)), RPart(1e-6), 2)
    machine = SplitMachine(model, speeds=(1.0, 3.0))
    changed = machine.changed([1, -1, 0, 2], {0: 2.0})
    assert changed.slowness == pytest.approx((2 / 3, 1.0, 4.0, 1.0)) and changed.model.num_r_workers == 3
    kept = machine.changed([0, 1], {}).cost(Load.decode(8, 4000), [1000, 3000])
    first = machine.cost(Load.decode(8, 4000), [1000, 3000])
    assert kept.wall_seconds == pytest.approx(first.wall_seconds) and kept.r_seconds == pytest.approx(first.r_seconds)
    step_time = GpuStepTime(BUILT_IN["mistral-7b"], GPUS["a100"], 131072)
    with pytest.raises(PlanError, match="no R-workers that come and go"):
        GpuMachine(step_time).changed([], {})


def test_the_last_r_workers_loss_ends_the_run() -> None:
    with pytest.raises(WorkerLostError, match="at 4 simulated seconds the last R-worker is lost"):
        simulate([request(4, 20)], [WorkerEvent(1.5, "lose", 0), WorkerEvent(3.5, "lose", 1)])


def test_events_of_workers_that_are_not_there_are_counted_and_change_nothing() -> None:
    requests = [request(4, 20), request(4, 20)]
    events = [
        WorkerEvent(1.5, "lose", 0),
        WorkerEvent(2.5, "slow", 0),
        WorkerEvent(3.5, "lose", 0),
        WorkerEvent(4.5, "join", 1),
    ]
    simulator, _ = simulate(requests, events)
    assert (simulator.world.happened, simulator.world.num_ignored) == ({"lose": 1}, 3)


def test_what_happens_while_nothing_runs_is_known_when_a_request_comes() -> None:
    early, late = request(4, 2), request(4, 2, 100.0)
    simulator, steps = simulate([early, late], [WorkerEvent(50.0, "lose", 0), WorkerEvent(60.0, "join", 2)])
    assert list(late.token_seconds) == [101.0, 102.0] and simulator.scheduler.snapshot().present == [1, 2]
    assert steps[-1].kv_loads[0] == 0 and steps[2].lost_workers == 1


def prefill_simulator(num_workers: int, events: list[WorkerEvent]) -> Simulator:
    """Return a simulator in which each prefill worker computes ten tokens per second; chains run in parallel."""
    s_part = MeasuredSPart((1, 1 << 20), (0.1, 0.1 * (1 << 20)), (0.0, 0.0))
    forecast = Forecast(PrefillTimes(1, s_part, PromptAttentionTimes(1e-12), 1.0, before_share=0.0))
    scheduler = Scheduler(SCHEDULES["stall-free"], LIMITS, LeastWaiting(forecast, workers=range(num_workers)))
    fleet = PrefillFleet(forecast, num_workers)
    return Simulator(scheduler, PlainMachine(), None, fleet, events=Timeline(events))


def test_a_lost_prefill_worker_has_its_prompts_computed_again() -> None:
    """A chain of two computes 40 tokens in 2 s. One is lost after 1.5 s: the other restarts alone and takes 4 s."""
    alone = request(40, 1)
    simulator = prefill_simulator(2, [WorkerEvent(1.5, "lose", 1, True), WorkerEvent(1.6, "lose", 1, True)])
    simulator.run([alone])
    assert list(alone.token_seconds) == pytest.approx([5.5])
    assert simulator.prefill and simulator.prefill.num_prompts == 2 and simulator.world.num_ignored == 1


def test_slow_prefill_workers_and_those_that_come_and_go() -> None:
    """A factor applies to prompts that begin later; a draining worker finishes its prompts."""
    requests = [request(20, 1, moment) for moment in (0.0, 10.0, 20.0, 30.0)]
    events = [
        WorkerEvent(9.0, "join", 1, True), WorkerEvent(10.5, "drain", 1, True), WorkerEvent(19.0, "slow", 0, True, 3.0),
        WorkerEvent(29.0, "slow", 0, True),
    ]  # fmt: skip
    simulator = prefill_simulator(1, events)
    simulator.run(requests)
    taken = [float(each.token_seconds[0]) - each.arrival_seconds for each in requests]
    assert taken == pytest.approx([2.0, 1.0, 6.0, 2.0])
    assert simulator.world.happened == {"slow": 2, "join": 1, "drain": 1}
