"""Workloads, SLOs, and the search for the largest rate that meets one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.hardware import LIMITS, PlainMachine

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.simulate import SimulatedRequest, SimulatedWorkload, Simulator, Slo, find_capacity
from fastdecode.perfmodel.lab.simulate.workload import (
    SARATHI,
    LogNormal,
    TraceItem,
    drawn_workload,
    read_trace,
    traced_workload,
)
from fastdecode.scheduler import SCHEDULES, Scheduler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("guess", [0.01, 3.3, 500.0])
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_the_search_ends_just_below_the_limit(guess: float, limit: float) -> None:
    asked: list[float] = []
    found = find_capacity(lambda rate: not asked.append(rate) and rate <= limit, guess, 0.02)  # type: ignore[func-returns-value]
    assert limit / 1.02 <= found <= limit and found in asked
    assert len(asked) < 30


def test_a_search_may_find_nothing_or_no_end() -> None:
    assert find_capacity(lambda rate: False, 1.0) == 0.0
    assert find_capacity(lambda rate: True, 1.0) == math.inf
    with pytest.raises(ConfigError, match="rate above 0"):
        find_capacity(lambda rate: True, 0.0)


def ran(arrival: float, start: float | None, *moments: float, output_len: int | None = None) -> SimulatedRequest:
    made = SimulatedRequest([0], len(moments) if output_len is None else output_len, arrival, start)
    made.token_seconds = np.array(moments)
    return made


def test_an_slo_is_about_the_median_delay_and_the_slowest_gaps() -> None:
    quick = [ran(0, 0, *np.arange(1, 52) / 10) for _ in range(4)]
    assert Slo(0.11).is_met(quick) and not Slo(0.09).is_met(quick)
    assert Slo(0.11).is_met([*quick, ran(0, 3, 4)]) and not Slo(0.11).is_met([ran(0, 3, 4)])
    assert Slo(0.11, 3.5).is_met([ran(0, 3, 4)])
    stalled = ran(0, 0, 0, 1, 2, 3)  # P99 of 203 gaps is among the three slow ones; P99 of 803 gaps is not
    assert not Slo(0.11).is_met([*quick, stalled]) and Slo(0.11).is_met([*quick * 4, stalled])
    assert not Slo(9, 9).is_met([ran(0, 0, 1, output_len=2)])


def test_lost_means_lost() -> None:
    """Half of the requests are late, so no later request can improve the median."""
    requests = [ran(0, 3, 4), ran(0, None), ran(1, None), ran(0, 1, 2)]
    assert Slo(1).is_lost(requests, 3.5) and not Slo(1).is_lost(requests, 2.5)
    assert not Slo(1).is_lost([ran(0, 1, 2), ran(9, None)], 5.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_impossible_slos(bad: float) -> None:
    with pytest.raises(ConfigError, match="tbt_p99_seconds must be above 0"):
        Slo(bad)
    with pytest.raises(ConfigError, match="delay_p50_seconds must be above 0"):
        Slo(1.0, bad)


def capacity(workload: SimulatedWorkload, slo: Slo, machine: PlainMachine) -> float:
    def meets(rate: float) -> bool:
        requests = workload.at(rate)
        Simulator(Scheduler(SCHEDULES["stall-free"], LIMITS), machine).run(requests)
        return slo.is_met(requests)

    return find_capacity(meets, 1.0)


def test_capacity_is_that_of_the_machine() -> None:
    """8 seats and 10 steps of 0.1 s each make 8 requests per second.
    At a higher rate r the i-th of 50 requests waits i(1/8 − 1/r): half a second at the median for r = 9.52. A machine
    twice as fast has twice the capacity, and a looser SLO never reduces it.
    """
    workload = SimulatedWorkload([[0]] * 50, [10] * 50, np.arange(50.0))
    slo, machine = Slo(0.15, 0.5), PlainMachine(0.1)
    found = capacity(workload, slo, machine)
    assert 8 / 1.02 < found < 9.53
    assert capacity(workload, Slo(0.075, 0.25), PlainMachine(0.05)) == pytest.approx(2 * found, rel=0.03)
    assert found <= capacity(workload, Slo(0.15, 1.0), machine) < 12.0


def test_log_normals_go_through_median_and_p90() -> None:
    lengths = LogNormal(1730, 5696).draw(np.random.default_rng(0), 200_000)
    assert np.percentile(lengths, [50, 90]) == pytest.approx([1730, 5696], rel=0.02)
    with pytest.raises(ConfigError, match="must be from 1 to the 90th"):
        LogNormal(10, 9)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "most"),
    [("sarathi-chat", (1730, 5696), (415, 834), 8192), ("sarathi-arxiv", (7059, 12985), (208, 371), 16384)],
)
def test_sarathis_workloads(name: str, prompt: tuple[int, int], output: tuple[int, int], most: int) -> None:
    """Table 2 of the paper; no total exceeds its limit, and the same seed gives the same requests at any rate."""
    workload = drawn_workload(SARATHI[name], 3000, 1)
    assert np.percentile(workload.prompt_lens, [50, 90]) == pytest.approx(prompt, rel=0.06)
    assert np.percentile(workload.output_lens, [50, 90]) == pytest.approx(output, rel=0.06)
    assert workload.longest == most and min(map(len, workload.prompts)) >= 1
    slow, fast = workload.at(1.0), workload.at(4.0)
    assert [each.arrival_seconds / 4 for each in slow] == [each.arrival_seconds for each in fast]
    assert slow[-1].arrival_seconds == pytest.approx(3000, rel=0.06)
    assert {each.arrival_seconds for each in workload.at(math.inf)} == {0.0}


LINE = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'


def test_a_trace_keeps_its_gaps_and_has_a_rate() -> None:
    """Lines may be in any order, with times from the first; at twice the rate, requests arrive twice as fast."""
    items = read_trace(LINE % (12.0, 7, 1) + "\n" + LINE % (10, 5, 2) + LINE % (20.0, 9, 3), "t.jsonl")
    assert items == [TraceItem(0.0, 5, 2), TraceItem(2.0, 7, 1), TraceItem(10.0, 9, 3)]
    workload = traced_workload(items)
    assert workload.own_rate == pytest.approx(0.2)
    assert [each.arrival_seconds for each in workload.at(workload.own_rate)] == pytest.approx([0, 2, 10])
    assert [each.arrival_seconds for each in workload.at(0.4)] == pytest.approx([0, 1, 5])
    assert traced_workload(items[:1]).own_rate == math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.jsonl: the trace is empty"),
        ("{", "t.jsonl, line 1: not valid JSON"),
        ("[]", "line 1: must be an object with timestamp, input_length, output_length"),
        (LINE % (0, 1, 1) + "\n" + LINE % ('"x"', 1, 1), "line 3: timestamp must be a number of seconds, not 'x'"),
        (LINE % ("NaN", 1, 1), "timestamp must be a number"),
        (LINE % (0, 0, 1), "input_length must be a whole number of at least 1 token, not 0"),
        (LINE % (0, 1, "1.5"), "output_length must be a whole number"),
        ('{"timestamp": 0, "input_length": 3}', "output_length must be a whole number of at least 1 token, not None"),
    ],
)
def test_bad_traces(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(text, "t.jsonl")
    assert message in str(caught.value)
