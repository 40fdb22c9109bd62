"""Plans: they balance S and R, stay within memory, and say why where there is no plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.perfmodel.equations import largest
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.batch_search import BatchSearch
from fastdecode.perfmodel.lab.gpu_only import GpuOnly, GpuServer
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.verdict import judge
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.presets import find_cpu_host, find_gpu
from fastdecode.perfmodel.sizing import Prices, Workload
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart, RPart, Transport

LLAMA_7B = BUILT_IN["llama-7b"]
A10, EPYC = find_gpu("a10"), find_cpu_host("epyc-7452")
NO_PRICES = Prices()
TRANSPORT = Transport(LLAMA_7B.attending_row_bytes, (32e9, 12.5e9))


def paper(seq_len: float = 1024, **more: Any) -> Planner:
    """Return a planner for the paper's 7B model, with the measured A10 and sockets, without transport."""
    s_part = MeasuredSPart((1, 1024), (1.46e-3, 7.08e-3), (0.0, 0.0))
    return Planner(Workload(seq_len), 32, s_part, RPart(0.1239e-6), **more)


def preset(workload: Workload, **more: Any) -> Planner:
    """Return a planner for the same model with presets and transport."""
    kv_bytes = LLAMA_7B.kv_layout("float16").kv_bytes_per_token
    figures = {"transport": TRANSPORT, "kv_bytes_per_token": kv_bytes} | more
    return Planner(workload, 32, GpuSPart(LLAMA_7B, A10), host_r_part(LLAMA_7B, "float16", EPYC), **figures)


@pytest.mark.parametrize(("seq_len", "printed", "workers"), [(1024, "9.2", 10), (768, "6.9", 7), (128, "1.1", 2)])
def test_the_papers_plan(seq_len: int, printed: str, workers: int) -> None:
    plan = paper(seq_len).plan(1024)
    assert f"{plan.num_r_workers_exact:.1f}" == printed
    assert (plan.num_r_workers, plan.in_flight) == (workers, 2048)
    assert plan.step_seconds == pytest.approx(2 * 32 * 7.08e-3)
    assert plan.sequence_seconds == pytest.approx(seq_len * plan.step_seconds)
    assert plan.output_tokens_per_second == pytest.approx(2048 / plan.step_seconds)
    assert plan.bottleneck == "s-worker"


def test_the_papers_eight_sockets_are_slightly_overloaded_at_1024_and_balanced_at_768() -> None:
    assert paper(1024).candidate(1024, 8).bottleneck == "r-workers"
    assert paper(1024).candidate(1024, 8).s_busy == pytest.approx(8 / 9.175, rel=1e-3)
    assert paper(768).candidate(1024, 7).bottleneck == "s-worker"


@given(
    prompt=st.integers(0, 40),
    output=st.integers(1, 40),
    windows=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    chunked=st.booleans(),
)
def test_the_share_of_a_context_that_windows_leave(prompt: int, output: int, windows: list[int], chunked: bool) -> None:
    """The share equals the mean of min(c, w), or of c mod w, over finely spaced contexts and over layers."""
    workload = Workload(prompt + output, prompt)
    contexts = [prompt + output * (index + 0.5) / 2000 for index in range(2000)]
    read = [sum((c % w if chunked else min(c, w)) if w else c for c in contexts) / 2000 for w in windows]
    near = pytest.approx(sum(read) / len(read), rel=1e-3, abs=0.05)
    assert workload.read_share(windows, chunked) * workload.mean_context == near
    assert workload.read_share(()) == workload.read_share([0]) == 1.0


def test_a_pool_that_is_there_gets_the_batch_at_its_own_knee() -> None:
    """Twice the batch would give less than a tenth more tokens per second, and memory bounds the batch as well."""
    for count in (2, 5, 9):
        planner = preset(Workload(1024), num_r_workers=count)
        size = BatchSearch(planner).knee()
        rate = {each: planner.candidate(each, count).output_tokens_per_second for each in (size, 2 * size)}
        assert rate[2 * size] < 1.1 * rate[size]
        if size > 64:
            less = [planner.candidate(each, count).output_tokens_per_second for each in (size - 64, 2 * size - 128)]
            assert less[1] >= 1.1 * less[0]
        plan = planner.plan(size)
        assert (plan.num_r_workers, plan.r_workers_set_by) == (count, "pool")
    small = preset(Workload(1024), num_r_workers=3, capacity_tokens=20_000)
    size = BatchSearch(small).knee()
    assert small.memory_r_workers(2 * size) <= 3 < small.memory_r_workers(2 * (size + 1))
    with pytest.raises(PlanError, match=r"3 R-worker\(s\) cannot hold 2048 sequences in flight"):
        small.plan(1024)
    limited = preset(Workload(1024), num_r_workers=3)
    size = BatchSearch(limited).largest_mini_batch(200.0)
    assert limited.plan(size).sequence_seconds <= 200.0 < limited.plan(size + 1).sequence_seconds


def test_the_schedule_of_a_plan() -> None:
    """1,024 sequences in flight and F = 32 are the paper's second example."""
    plan = paper(1024).plan(512)
    assert (plan.in_flight, plan.interval_steps, plan.micro_batch_size, plan.kv_load_limit) == (1024, 32, 32, 540_672)
    assert paper(6, interval_steps=2).plan(3).kv_load_limit == 24


workloads = st.builds(
    lambda prompt, output, cv, shared: Workload(prompt + output, prompt, cv, shared * prompt),
    st.integers(0, 4000),
    st.integers(1, 4000),
    st.floats(0, 1),
    st.floats(0, 0.5),
)


@given(workloads, st.integers(1, 4096), st.integers(1, 4), st.booleans(), st.sampled_from([1e9, 12.5e9]))
def test_a_plan_balances_s_and_r_within_rounding(
    workload: Workload, batch: int, k: int, overlapped: bool, link: float
) -> None:
    """With the plan's R-workers the R-part is no longer than the slowest other stage; with one fewer it is."""
    transport = Transport(LLAMA_7B.attending_row_bytes, (32e9, link), overlapped=overlapped)
    planner = preset(workload, num_mini_batches=k, transport=transport)
    try:
        plan = planner.plan(batch)
    except PlanError:  # Reading the shared prefix alone takes longer than the S-part.
        return
    assert plan.num_r_workers - 1 < max(plan.num_r_workers_exact, 1) <= plan.num_r_workers + 1e-6
    rows = batch * workload.rows_per_output_token
    stage = planner.s_part.layer_seconds(rows)
    if overlapped:
        stage = max(stage, transport.stage_seconds(rows))
    for workers, at_most in ((plan.num_r_workers, True), (plan.num_r_workers - 1, False)):
        if workers >= 1:
            own = batch * (workload.mean_context - workload.shared_prefix_len) / workers
            r_part = planner.r_part.seconds(own + workload.shared_prefix_len)
            assert (r_part <= stage * (1 + 1e-6)) is at_most


@given(workloads, st.integers(1, 2000))
def test_longer_sequences_want_more_r_workers_and_bigger_kv_heads_too(workload: Workload, batch: int) -> None:
    planner = preset(dataclasses.replace(workload, shared_prefix_len=0.0))
    exact = planner.balanced_r_workers(batch)
    longer = dataclasses.replace(workload, shared_prefix_len=0.0, output_len_cv=workload.output_len_cv + 0.5)
    assert dataclasses.replace(planner, workload=longer).balanced_r_workers(batch) > exact
    half = dataclasses.replace(planner, r_part=RPart(planner.r_part.seconds_per_token / 2))
    assert half.balanced_r_workers(batch) == pytest.approx(exact / 2)


@given(st.floats(5.0, 5000.0), st.booleans())
def test_the_largest_batch_within_a_latency_limit(limit: float, overlapped: bool) -> None:
    """The batch found is within the limit on whole R-workers, and a larger batch on balanced ones is not."""
    transport = dataclasses.replace(TRANSPORT, overlapped=overlapped)
    planner = preset(Workload(512, 100), transport=transport)
    try:
        batch = BatchSearch(planner).largest_mini_batch(limit)
    except PlanError as error:
        assert "too long" in str(error)
        assert planner.plan(1).sequence_seconds > limit * 0.99
        return
    assert planner.plan(batch).sequence_seconds <= limit * (1 + 1e-9)
    assert batch == 1 << 20 or 412 * BatchSearch(planner).step_seconds(batch + 1) > limit


def test_prompts_rows_cost_s_time_and_no_balance() -> None:
    """With an R-worker's cost per row, the balanced number of R-workers makes both parts of the step equal."""
    s_part = MeasuredSPart((1, 4096), (1.46e-3, 28e-3), (1e-3, 4e-3))
    planner = Planner(
        Workload(1088, 1024), 32, s_part, RPart(1e-7, 0.0, 2e-5), step_overhead_seconds=1e-3, row_overhead_seconds=1e-5
    )
    workers = planner.balanced_r_workers(64)
    model, rows = planner.step_model(workers), 2 * 64 * planner.workload.rows_per_output_token
    stages = model.stages(Load(rows, 2 * 64, 2 * 64 * planner.workload.mean_context))
    assert rows > 10 * 128 and stages.r_part == pytest.approx(stages.s_part)
    found = planner.plan(64)
    assert found.step_seconds == pytest.approx(
        2 * 32 * stages.s_part + 2 * s_part.head_seconds(64) + 1e-3 + 1e-5 * 128, rel=1e-6
    )


def test_a_latency_limit_finds_batches_that_can_be_balanced() -> None:
    """Reading a shared prefix takes longer than a small batch's S-part, but not longer than a large batch's."""
    planner = preset(Workload(17024, 16000, shared_prefix_len=16000))
    with pytest.raises(PlanError, match="no number of R-workers can keep up"):
        planner.balanced_r_workers(1)
    size = BatchSearch(planner).largest_mini_batch(5000.0)
    assert planner.plan(size).sequence_seconds <= 5000.0 and size > 1
    with pytest.raises(PlanError, match="cannot be met: with a mini-batch of "):
        BatchSearch(planner).largest_mini_batch(1.0)


def test_a_latency_limit_below_one_step_says_by_how_much() -> None:
    """A step of 2·32 layers of 1.46 ms takes 93 ms, and a sequence takes 95.7 s."""
    with pytest.raises(PlanError, match=r"1024 steps of 0\.0934 s take 95\.7 s, 45\.7 s too long"):
        BatchSearch(paper()).largest_mini_batch(50)
    assert BatchSearch(paper()).largest_mini_batch(464.0) == 1024
    with pytest.raises(ConfigError, match="latency_limit"):
        BatchSearch(paper()).largest_mini_batch(0)


def test_the_knee_is_where_doubling_gains_less_than_a_tenth() -> None:
    """T(B) = 1.46 ms + 5.49 µs·B: 2·T(B)/T(2B) − 1 < 0.1 from B = 1196 on, in tiles of 64."""
    s_part = MeasuredSPart((1, 100_000), (1.46e-3, 1.46e-3 + 99_999 * 5.49e-6), (0.0, 0.0))
    planner = Planner(Workload(1024), 32, s_part, RPart(1e-7))
    assert BatchSearch(planner).knee() == 1216
    flat = MeasuredSPart((256,), (1e-3,), (0.0,))
    assert BatchSearch(dataclasses.replace(planner, s_part=flat)).knee() == 256


def test_memory_may_ask_for_more_r_workers() -> None:
    """1,081,344 tokens at the peak, 90,000 per R-worker, need more R-workers than balance does."""
    plan = paper(capacity_tokens=90_000).plan(1024)
    assert (plan.num_r_workers, plan.r_workers_set_by) == (13, "memory")
    assert [row.fits_memory for row in plan.candidates] == [row.num_r_workers >= 13 for row in plan.candidates]
    assert paper(capacity_tokens=200_000).plan(1024).r_workers_set_by == "bandwidth"
    with pytest.raises(PlanError, match=r"holds 500 cached tokens, 524 fewer than one sequence of 1024"):
        paper(capacity_tokens=500)  # One sequence does not fit even if its R-workers share it.
    assert paper(capacity_tokens=1000).plan(1024).num_r_workers == 1082  # Sequences are split into ranges.


def test_a_shared_prefix_by_hand() -> None:
    """500 of 600 prompt tokens are shared and 100 come out; each R-worker reads 500 + B·150/P tokens per mini-batch."""
    planner = paper(capacity_tokens=5000)
    shared = dataclasses.replace(planner, workload=Workload(700, 600, shared_prefix_len=500), interval_steps=100)
    row = shared.candidate(256, 4)
    seconds = 0.1239e-6 * (500 + 256 * 150 / 4)
    assert row.r_busy * row.step_seconds == pytest.approx(2 * 32 * seconds)
    # At the peak 512 sequences hold 100 of their own prompt and 100 of output; each R-worker has room for 4,500.
    assert [shared.candidate(256, number).fits_memory for number in (22, 23)] == [False, True]


def test_prices() -> None:
    prices = Prices(1.8, 0.9)
    assert prices.per_million_tokens(2, 1000.0) == pytest.approx(1.0)
    assert prices.per_million_tokens(0, 500.0) == pytest.approx(1.0)
    assert Prices(1.8).per_million_tokens(0, 500.0) == pytest.approx(1.0)
    assert Prices(1.8).per_million_tokens(2, 500.0) is None
    plan = paper(prices=prices, r_workers_per_host=2).plan(1024)
    assert plan.num_hosts == 5
    assert plan.price_per_million_tokens == pytest.approx(6.3 / 3600 / plan.output_tokens_per_second * 1e6)
    with pytest.raises(ConfigError, match="price"):
        Prices(-1.0)


def server(workload: Workload, gpu: str = "a10", model: str = "llama-7b") -> GpuServer:
    shape = BUILT_IN[model]
    return GpuServer(shape, find_gpu(gpu), shape.kv_layout(shape.dtype).kv_bytes_per_token, workload)


def test_the_gpu_alone_by_hand() -> None:
    """0.9 of 24 GB hold 13.5 GB of weights and 30 sequences of 512 tokens on average; 0.8 of 600 GB/s reads them."""
    alone = server(Workload(1024)).best()
    assert (alone.max_batch_size, alone.limited_by) == (30, "memory")
    read = LLAMA_7B.weight_bytes + 30 * 512 * 524_288
    assert alone.step_seconds == pytest.approx(read / 480e9)
    assert alone.output_tokens_per_second == pytest.approx(30 / (read / 480e9))
    shared = server(Workload(1024, 512, shared_prefix_len=512)).best()
    assert shared.max_batch_size > server(Workload(1024, 512)).best().max_batch_size


def test_the_gpu_alone_with_prompts_by_hand() -> None:
    """Each output token has eight prompt rows; 512 tokens are read once, and 56 plus half the output per sequence."""
    workload = Workload(576, 568, shared_prefix_len=512)
    rows, tokens = 1 + 56 / 8, 512 + 1000 * (56 + 4)
    arithmetic = 2 * 1000 * rows * LLAMA_7B.parameters / (0.62 * 125e12)
    assert server(workload).step_seconds(1000) == pytest.approx(arithmetic + tokens * 524_288 / 480e9)


def test_the_gpu_alone_within_a_latency_limit() -> None:
    workload = Workload(1024)
    alone = server(workload).best(40.0)
    assert 0 < alone.max_batch_size < 30 and alone.limited_by == "latency limit"
    assert server(workload).step_seconds(alone.max_batch_size) * 1024 <= 40.0
    assert server(workload).step_seconds(alone.max_batch_size + 1) * 1024 > 40.0
    lone = server(workload).step_seconds(1)
    assert server(workload).best(1.0) == GpuOnly(0, 0.0, None, "latency limit", lone_step_seconds=lone)


def test_weights_that_do_not_fit_are_refused_by_how_much() -> None:
    """174.6e9 parameters of 2 bytes do not fit into 0.9 of 80 GB, and the message says how much is missing."""
    with pytest.raises(PlanError, match=r"349\.1 GB of float16 weights.*72\.0 GB: 277\.1 GB too little"):
        server(Workload(1024), "h100", "opt-175b").check_weights()
    dataclasses.replace(server(Workload(1024), model="opt-175b"), gpu=find_gpu("h100").times(8)).check_weights()


def test_verdicts() -> None:
    """A verdict compares throughput first, then price, with a margin for figures not measured on this machine."""
    plan = paper(prices=Prices(1.0, 1.0)).plan(1024)  # 10 hosts give 4,520 tokens/s.

    def verdict(rate: float, batch: int = 30, prices: Prices = NO_PRICES) -> tuple[bool | None, str]:
        found = judge(plan, GpuOnly(batch, rate, 1.0 if batch else None, "memory", 1.0), prices)
        return found.use_fastdecode, found.sentence

    assert verdict(5000.0)[0] is False and verdict(5000.0)[1].startswith("Do not use FastDecode here: ")
    assert verdict(4000.0)[0] is False and "within their error" in verdict(4000.0)[1]
    assert verdict(1000.0) == (True, verdict(1000.0)[1]) and "4.5 x" in verdict(1000.0)[1]
    assert verdict(1000.0, prices=Prices(1.0, 1.0))[0] is False  # The hosts cost 11 per hour for 4.5 times the tokens.
    assert verdict(100.0, prices=Prices(1.0, 1.0))[0] is True
    assert verdict(0.0, batch=0)[0] is True
    assert judge(plan, None, Prices()).use_fastdecode is None


@given(st.integers(0, 3000), st.integers(1, 2000))
def test_largest(answer: int, most: int) -> None:
    assert largest(lambda size: size <= answer, most) == min(answer, most)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_mini_batches": 0}, "num_mini_batches"),
        ({"interval_steps": 2000}, "interval_steps must be from 1 to the 1024"),
    ],
)
def test_bad_planners(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(paper(), **change)
    with pytest.raises(ConfigError, match="mini_batch_size"):
        paper().plan(0)
