"""Properties of the equations, and slow oracles for sums in closed form."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.protocols import StepTime
from fastdecode.perfmodel import equations
from fastdecode.perfmodel.equations import token_budget
from fastdecode.perfmodel.hardware import Figure, kernel_bytes_per_second, parse_link
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS, find_cpu_host, find_gpu
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart, RPart, Transport
from fastdecode.perfmodel.step_model import StepModel

LENGTHS = st.integers(1, 5000)
SECONDS = st.floats(1e-6, 1e-1)


@pytest.mark.parametrize(
    ("in_flight", "output_len", "interval"), [(1024, 1024, 32), (4, 64, 16), (34, 1024, 30), (100, 5, 1)]
)
def test_default_interval_by_hand(in_flight: int, output_len: int, interval: int) -> None:
    """The interval is a 32nd of the steps, a quarter for four sequences, 30 for one of 34 at a time; at least one."""
    assert equations.default_interval_steps(in_flight, output_len) == interval


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 30))
def test_peak_load_is_that_of_the_schedule(intervals: int, interval: int, micro_batch: int, prompt_len: int) -> None:
    """A micro-batch starts every F steps, and each of its sequences attends one more token per step."""
    output_len = intervals * interval
    in_flight = micro_batch * intervals
    assert equations.micro_batch_size(in_flight, output_len, interval) == pytest.approx(micro_batch)
    loads = np.zeros(4 * output_len)
    for start in range(0, 3 * output_len, interval):
        loads[start : start + output_len] += micro_batch * (prompt_len + np.arange(1, output_len + 1))
    peak = equations.peak_load_stabilized(in_flight, output_len, interval, prompt_len)
    assert peak == pytest.approx(loads[: 3 * output_len].max())


@given(LENGTHS, LENGTHS)
def test_whole_sequences_start_together_at_the_default_interval(in_flight: int, output_len: int) -> None:
    """With an interval of whole steps, the rounding error is at most half a step's sequences."""
    interval = equations.default_interval_steps(in_flight, output_len)
    together = equations.micro_batch_size(in_flight, output_len, interval)
    assert interval == 1 or abs(together - max(1, round(in_flight / 32))) <= in_flight / output_len / 2 + 1e-9


@given(st.integers(1, 4096), LENGTHS, SECONDS, SECONDS, st.floats(0, 0.9), st.floats(0, 0.9))
def test_balanced_r_workers_balance(
    batch: int, output_len: int, per_token: float, stage: float, call_share: float, prefix_share: float
) -> None:
    """Equation 11 solves equation 10, also with a fixed cost per call and a shared prefix."""
    call = call_share * stage
    prefix = math.floor(min(prefix_share * (stage - call) / per_token, 1000.0))
    context = Workload(output_len + prefix, prefix).mean_context
    workers = equations.balanced_r_workers(batch, context, per_token, stage, prefix, call)
    tokens = batch / workers * (context - prefix) + prefix
    assert per_token * tokens + call == pytest.approx(stage)


def test_rows_per_output_token_by_hand() -> None:
    """100 of the 300 prompt tokens are shared and computed once; the other 200 come with 50 output tokens."""
    assert Workload(350, 300, shared_prefix_len=100).rows_per_output_token == 5.0
    assert Workload(350).rows_per_output_token == 1.0


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(PlanError, match=r"1 ms more than the 2 ms"):
        equations.balanced_r_workers(64, 100, 1e-6, 2e-3, call_seconds=3e-3)


@given(st.lists(LENGTHS, min_size=1, max_size=50), LENGTHS)
def test_mean_context_of_unequal_sequences(outputs: list[int], prompt_len: int) -> None:
    """The mean over the steps of all sequences is half a token above the equation."""
    lengths = np.array(outputs)
    cv = float(lengths.std() / lengths.mean())
    workload = Workload(prompt_len + lengths.mean(), prompt_len, output_len_cv=cv)
    attended = np.concatenate([prompt_len + np.arange(1, length + 1) for length in lengths])
    assert workload.mean_context + 0.5 == pytest.approx(attended.mean())


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", ["llama-7b", "mixtral-8x7b"])
def test_s_part_grows_less_than_its_rows(gpu: str, model: str) -> None:
    """Both T(B) and E(B) rise with B."""
    s_part = GpuSPart(BUILT_IN[model], find_gpu(gpu))
    times = [s_part.layer_seconds(rows) for rows in (1, 64, 512, 4096)]
    assert times == sorted(times)
    efficiencies = [rows / seconds for rows, seconds in zip((1, 64, 512, 4096), times, strict=True)]
    assert efficiencies == sorted(efficiencies)


def test_measured_s_part_errs_towards_slow_at_both_ends() -> None:
    s_part = MeasuredSPart((10, 20), (1.0, 3.0), (0.5, 0.5))
    assert [s_part.layer_seconds(rows) for rows in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]
    assert s_part.head_seconds(40) == 1.0
    for bad in ((), (20, 10), (0, 10)):
        with pytest.raises(ConfigError, match="batch sizes"):
            MeasuredSPart(bad, (1.0, 1.0)[: len(bad)], (0.0, 0.0)[: len(bad)])


def test_r_falls_with_kv_heads_and_kv_bits() -> None:
    """On a server's socket memory is the limit, until groups and codes make it arithmetic."""
    host, mha = find_cpu_host("epyc-9654"), BUILT_IN["llama-7b"]
    gqa = dataclasses.replace(mha, num_kv_heads=8)
    r = {(shape.group, dtype): host_r_part(shape, dtype, host) for shape in (mha, gqa) for dtype in ("float16", "int8")}
    assert r[4, "float16"].seconds_per_token == pytest.approx(r[1, "float16"].seconds_per_token / 4)
    assert r[1, "int8"].seconds_per_token == pytest.approx(r[1, "float16"].seconds_per_token * (128 + 4) / 256)
    mqa = dataclasses.replace(mha, num_kv_heads=1)
    computing = mqa.layer_layout.token_bytes("int4") / kernel_bytes_per_second("int4", 32, host.cores)
    assert host_r_part(mqa, "int4", host).seconds_per_token == pytest.approx(computing)
    reading = mqa.layer_layout.token_bytes("int4") / host.read_bytes_per_second.achieved
    assert computing > reading


@given(st.integers(1, 128), st.sampled_from(["float16", "int8"]))
def test_kernel_rate_falls_with_the_group(group: int, dtype: str) -> None:
    assert kernel_bytes_per_second(dtype, group + 1, 1) < kernel_bytes_per_second(dtype, group, 1)


def model(k: int = 2, workers: float = 1.0, transport: Transport | None = None) -> StepModel:
    """Return a model of ten layers; T(B) is 1 ms up to 100 rows; R is 1 µs per token."""
    s_part = MeasuredSPart((100,), (1e-3,), (2e-3,))
    return StepModel(10, s_part, RPart(1e-6), workers, k, transport or Transport(), step_overhead_seconds=5e-3)


def test_a_step_by_hand() -> None:
    """Two mini-batches of 100 rows and 500 tokens: S 1 ms, R 0.5 ms, head 2 ms each, overhead 5 ms."""
    forecast: StepTime = model()
    assert forecast(200, 1000) == pytest.approx(10 * 2e-3 + 2 * 2e-3 + 5e-3)
    assert model().bottleneck(Load.decode(200, 1000)) == "s-worker"
    assert model(k=1)(100, 500) == pytest.approx(10 * 1.5e-3 + 2e-3 + 5e-3)
    assert model().bottleneck(Load.decode(200, 4000)) == "r-workers"
    assert model(workers=4).bottleneck(Load.decode(200, 4000)) == "s-worker"
    assert model(workers=3)(200, model(workers=3).balanced_kv_tokens(200)) == pytest.approx(model()(200, 0))


def test_transport_by_hand() -> None:
    """100 rows take 0.4 ms to a first hop and 0.2 ms to a second."""
    hops = {"row_bytes": 4.0, "hop_bytes_per_second": (1e6, 2e6)}
    overlapped, exposed = Transport(**hops), Transport(**hops, overlapped=False)
    # hidden behind B's S-part
    assert model(2, transport=overlapped).layer_seconds(Load.decode(200, 0)) == pytest.approx(2e-3)
    assert model(2, transport=overlapped).layer_seconds(Load.decode(200, 2000)) == pytest.approx(2.6e-3)  # S + trip + R
    assert model(2, transport=overlapped).bottleneck(Load.decode(200, 2000)) == "round-trip"
    # a third mini-batch hides it
    assert model(3, transport=overlapped).layer_seconds(Load.decode(300, 3000)) == pytest.approx(3e-3)
    assert model(2, transport=exposed).layer_seconds(Load.decode(200, 2000)) == pytest.approx(2 * 1.6e-3)
    assert model(2, transport=exposed).layer_seconds(Load.decode(200, 4000)) == pytest.approx(2 * 2.6e-3)
    slow = model(3, transport=dataclasses.replace(overlapped, hop_bytes_per_second=(1e5, 2e5)))
    # the slower hop; the other one works meanwhile
    assert slow.layer_seconds(Load.decode(300, 3000)) == pytest.approx(3 * 4e-3)
    assert slow.bottleneck(Load.decode(300, 3000)) == "transport"


@given(st.integers(1, 4), st.floats(1, 1e4), st.floats(0, 1e6), st.floats(1, 64), st.booleans())
def test_a_step_never_gets_shorter_with_more_work(
    k: int, tokens: float, kv_tokens: float, workers: float, overlapped: bool
) -> None:
    transport = Transport(16384.0, (12.5e9, 32e9), 20e-6, overlapped)
    forecast = model(k, workers, transport)
    least = forecast(tokens, kv_tokens)
    assert forecast(tokens * 1.5, kv_tokens) >= least
    assert forecast(tokens, kv_tokens + 1000) >= least
    assert model(k, workers + 1, transport)(tokens, kv_tokens) <= least
    bare = model(k, workers)
    assert bare(tokens, kv_tokens) <= least


@given(st.floats(0.03, 10.0), st.sampled_from([1, 64, 128, 256]))
def test_token_budget_is_the_largest_tile_multiple_in_time(target: float, tile: int) -> None:
    forecast = model(k=1, workers=8)
    if forecast(tile, 0) > target:
        with pytest.raises(PlanError, match="more than the target"):
            token_budget(forecast, target, tile)
        return
    budget = token_budget(forecast, target, tile)
    assert budget % tile == 0
    assert forecast(budget, 0) <= target < forecast(budget + tile, 0)


@pytest.mark.parametrize(
    ("text", "rate"), [("100Gb", 12.5e9), ("12.5GB", 12.5e9), ("400 Gbps", 50e9), ("1.6Tb/s", 2e11)]
)
def test_links(text: str, rate: float) -> None:
    assert parse_link(text) == rate


@pytest.mark.parametrize("text", ["0Gb", "100", "-1Gb", "fast", "100gb", ""])
def test_no_links(text: str) -> None:
    with pytest.raises(ConfigError, match="link"):
        parse_link(text)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"seq_len": 0}, "at least prompt_len"),
        ({"seq_len": 100, "prompt_len": 100}, "101"),
        ({"seq_len": float("nan")}, "seq_len must be"),
        ({"seq_len": 10, "prompt_len": -1}, "prompt_len must be"),
        ({"seq_len": 10, "prompt_len": 4, "shared_prefix_len": 5}, "at most prompt_len"),
    ],
)
def test_lengths_that_make_no_sense(lengths: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**lengths)


def test_two_gpus_are_twice_one() -> None:
    one, two = find_gpu("a10"), find_gpu("A10").times(2)
    for rate in ("flops_per_second", "weight_bytes_per_second", "kv_bytes_per_second"):
        assert getattr(two, rate).achieved == 2 * getattr(one, rate).achieved
    assert (two.memory_bytes, two.host_bytes_per_second) == (48e9, 64e9)
    assert one.times(1) == one
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        one.times(0)


def test_every_figure_names_its_source() -> None:
    """A preset counts as measured only if the papers measured that very part."""
    figures = [
        figure
        for preset in (*GPUS.values(), *CPU_HOSTS.values())
        for field in dataclasses.fields(preset)
        if isinstance(figure := getattr(preset, field.name), Figure)
    ]
    assert len(figures) == 3 * len(GPUS) + len(CPU_HOSTS)
    assert all(figure.source for figure in figures)
    assert sum(figure.measured for figure in figures) == 3
    prices = [preset.price for preset in (*GPUS.values(), *CPU_HOSTS.values()) if preset.price]
    assert all(re.search(r"20\d\d|comes with", price.source) for price in prices), "a list price has a date"


def test_pure_arithmetic_needs_numpy_and_msgspec_only(tmp_path: Path) -> None:
    """The imports are checked in a separate process, outside the checkout."""
    code = """
import importlib, pkgutil, sys
import numpy
before = set(sys.modules)
import fastdecode.perfmodel
names = [m.name for m in pkgutil.iter_modules(fastdecode.perfmodel.__path__)]
for name in names:
    importlib.import_module("fastdecode.perfmodel." + name)
brought = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
brought = {name for name in brought if not name.startswith("_")}
sys.exit(str(brought) if brought - {"fastdecode", "numpy", "msgspec", "typing_extensions"} or len(names) < 10 else 0)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
