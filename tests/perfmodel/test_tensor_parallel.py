"""Ranks of an S-worker: the memory of each, the time of their collectives, and plans with ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from helpers.hardware import profile, r_point
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError, PlanError, ProfileError
from fastdecode.perfmodel.hardware import Figure
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.measurements import SPartPoint
from fastdecode.perfmodel.presets import find_cpu_host, find_gpu
from fastdecode.perfmodel.profile_json import read_profile, write_profile
from fastdecode.perfmodel.rank_costs import (
    ALONE,
    PeerLink,
    RankGroup,
    RankSPart,
    gpu_peer_link,
    rank_shape,
    replicated_bytes,
)
from fastdecode.perfmodel.sizing import NO_PRICES, Prices, Workload
from fastdecode.perfmodel.stages import GpuSPart, Transport

OPT_175B, A10, EPYC = BUILT_IN["opt-175b"], find_gpu("a10"), find_cpu_host("epyc-7452")
RATE, ONCE = 1e9, 1e-5
LINK = PeerLink("test", Figure(RATE, 1.0, True, "test"), ONCE)
PLAN = ["plan", "--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "1024"]


def paper_175b(num_ranks: int, prices: Prices = NO_PRICES) -> Planner:
    """Return a planner of OPT-175B: A10s on PCIe, sockets of Epyc 7452, 100 Gb/s, and the paper's few layers."""
    own, group = rank_shape(OPT_175B, num_ranks), RankGroup(num_ranks, gpu_peer_link(A10))
    return Planner(
        Workload(1024), OPT_175B.num_layers, RankSPart(GpuSPart(own, A10), OPT_175B, group),
        host_r_part(own, "float16", EPYC),
        Transport(own.attending_row_bytes, (A10.host_bytes_per_second, 12.5e9 / num_ranks)),
        prices=prices, num_ranks=num_ranks,
    )  # fmt: skip


@pytest.mark.parametrize("mini_batch_size", [256, 512, 1024])
def test_the_papers_175b_on_twice_the_s_and_r(mini_batch_size: int) -> None:
    """Section 5.3 measured 1.84 times the throughput; presets give it within 3 % at any batch, with nothing fitted."""
    each = paper_175b(1).plan(mini_batch_size).num_r_workers
    one, two = (paper_175b(ranks).candidate(mini_batch_size, each) for ranks in (1, 2))
    assert two.output_tokens_per_second / one.output_tokens_per_second == pytest.approx(1.84, rel=0.03)


def ring_seconds(num_bytes: float, num_ranks: int) -> float:
    """Return the seconds of a reduce-scatter and an all-gather, each message to the next rank."""
    clocks = [0.0] * num_ranks
    for _ in range(2 * (num_ranks - 1)):
        sent = [clock + ONCE + num_bytes / num_ranks / RATE for clock in clocks]
        clocks = [max(sent[rank], sent[rank - 1]) for rank in range(num_ranks)]
    return max(clocks)


def doubling_seconds(num_bytes: float, num_ranks: int) -> float:
    """Return the seconds of sending everything to partners at doubling distances."""
    seconds, distance = 0.0, 1
    while distance < num_ranks:
        seconds, distance = seconds + ONCE + num_bytes / RATE, 2 * distance
    return seconds


@given(st.integers(2, 16), st.floats(0, 1e9))
def test_an_all_reduce_takes_the_faster_way(num_ranks: int, num_bytes: float) -> None:
    best = min(ring_seconds(num_bytes, num_ranks), doubling_seconds(num_bytes, num_ranks))
    assert RankGroup(num_ranks, LINK).all_reduce_seconds(num_bytes) == pytest.approx(best)


def test_one_rank_says_nothing_to_itself() -> None:
    assert ALONE.all_reduce_seconds(1e9) == ALONE.gather_seconds(1e9) == RankGroup(1, LINK).all_reduce_seconds(1e9) == 0
    with pytest.raises(ConfigError, match="2 ranks need a link"):
        RankGroup(2)


def test_two_layers_of_all_reduce_and_the_logits_by_hand() -> None:
    group = RankGroup(2, LINK)
    s_part = RankSPart(GpuSPart(rank_shape(OPT_175B, 2), A10), OPT_175B, group)
    tensor = 64 * 12288 * 2
    assert s_part.layer_seconds(64) - s_part.rank.layer_seconds(64) == pytest.approx(2 * (ONCE + tensor / RATE))
    logits = 64 * 50272 * 2 / 2
    assert s_part.head_seconds(64) - s_part.rank.head_seconds(64) == pytest.approx(ONCE + logits / RATE)


@pytest.mark.parametrize("name", ["llama-7b", "llama-3-70b", "mixtral-8x7b", "opt-175b"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_share_weights_and_cache(name: str, num_ranks: int) -> None:
    """The ranks together hold each weight of a layer and each byte of cache once."""
    shape, own = BUILT_IN[name], rank_shape(BUILT_IN[name], num_ranks)
    assert num_ranks * own.layer_parameters == shape.layer_parameters
    assert num_ranks * own.head_parameters == shape.head_parameters
    layouts = own.kv_layout("bfloat16"), shape.kv_layout("bfloat16")
    assert num_ranks * layouts[0].kv_bytes_per_token == layouts[1].kv_bytes_per_token
    assert replicated_bytes(shape, num_ranks) == (num_ranks - 1) * shape.hidden_size * shape.vocab_size * 2


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_hold_latent_rows_whole_and_heads_of_their_own(num_ranks: int) -> None:
    """Weights that make latents are on every rank, and every rank's R-workers keep all latent rows."""
    shape, own = BUILT_IN["deepseek-v3"], rank_shape(BUILT_IN["deepseek-v3"], num_ranks)
    assert own.kv_layout("bfloat16").kv_bytes_per_token == shape.kv_layout("bfloat16").kv_bytes_per_token
    assert own.layer_layout.num_heads == 128 // num_ranks
    latents = 7168 * (1536 + 576)
    more = 61 * latents + shape.head_parameters
    assert replicated_bytes(shape, num_ranks) == (num_ranks - 1) * more * 2
    assert num_ranks * (own.layer_parameters - latents) == pytest.approx(shape.layer_parameters - latents, rel=1e-3)
    heads, points = (128, 128 // num_ranks), []
    for each, rate in zip(heads, (1e-6, 4e-7), strict=True):
        points += [r_point(n, 1024, rate * n * 1024, num_heads=each, num_kv_heads=1, head_dim=576) for n in (16, 64)]
    found = dataclasses.replace(profile(), shape=shape, r_part=tuple(points))
    parts = [found.measured_r_part("float16", num_ranks=ranks) for ranks in (1, num_ranks)]
    assert [part.seconds_per_token for part in parts] == pytest.approx([1e-6, 4e-7])
    with pytest.raises(ProfileError, match=r"with 32 / 1 heads.*calibrate --tensor-parallel-size 4` measures them"):
        found.measured_r_part("float16", num_ranks=4)


def test_too_few_kv_heads_are_held_twice_and_odd_numbers_refused() -> None:
    assert rank_shape(BUILT_IN["llama-3-8b"], 16).num_kv_heads == 1
    for name, ranks in (("falcon-7b", 2), ("llama-7b", 3), ("yi-34b", 16)):
        with pytest.raises(PlanError, match=rf"{ranks} ranks cannot share the \d+ heads"):
            rank_shape(BUILT_IN[name], ranks)


def test_hosts_and_prices_count_every_rank() -> None:
    """Each of two ranks has 3 R-workers, two to a host, and a GPU."""
    planner = dataclasses.replace(paper_175b(2, Prices(3.0, 2.0, 2)), r_workers_per_host=2)
    plan = planner.plan(1024)
    assert (plan.num_r_workers, plan.total_r_workers, plan.num_hosts) == (3, 6, 3)
    per_second = (2 * 3.0 + 3 * 2.0) / 3600
    assert plan.price_per_million_tokens == pytest.approx(1e6 * per_second / plan.output_tokens_per_second)


def test_the_command_compares_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    flags = ["--gpu-price", "1", "--cpu-price", "0.5", "--mini-batch-size", "512", "--output-json", str(path)]
    assert main([*PLAN, "--tensor-parallel-size", "2", *flags]) == 0
    found, text = json.loads(path.read_text()), capsys.readouterr().out
    assert found["tensor_parallel_size"] == 2 and found["total_r_workers"] == 2 * found["num_r_workers"]
    assert found["kv_bytes_per_token"] == 16 * 16_384
    rows = {row["tensor_parallel_size"]: row for row in found["tensor_parallel"]}
    assert set(rows) == {1, 2, 4} and rows[2]["step_seconds"] == found["step_seconds"]
    assert (
        rows[4]["output_tokens_per_second"] > rows[2]["output_tokens_per_second"] > rows[1]["output_tokens_per_second"]
    )
    assert f"of each of 2 ranks, {found['total_r_workers']} in all" in text and "ranks, PCIe bytes_per_second" in text
    assert main([*PLAN, "--rank-link", "10Gb", "--tensor-parallel-size", "2", *flags]) == 0
    assert json.loads(path.read_text())["step_seconds"] > found["step_seconds"]
    assert main([*PLAN, "--model", "llama-13b", "--tensor-parallel-size", "2"]) == 0
    assert "4.4 GB too little" in capsys.readouterr().out  # The comparison has one row for the A10.


def test_the_command_simulates_logical_r_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two ranks has two R-workers; the scheduler sees two, so loads stay the same and steps are shorter."""
    path, found = tmp_path / "simulated.json", []
    for ranks in (1, 2):
        flags = ["--max-num-seqs", "8", "--num-r-workers", "2", "--random-output-len", "8", "--num-prompts", "8"]
        sizes = ["--tensor-parallel-size", str(ranks), "--output-json", str(path)]
        assert main(["simulate", *PLAN[1:7], *flags, *sizes]) == 0
        found.append(json.loads(path.read_text()))
    assert "2 R-worker(s) of each of 2 ranks" in capsys.readouterr().out
    assert found[0]["kv_load"]["peak_tokens"] == found[1]["kv_load"]["peak_tokens"]
    assert 0.5 < found[1]["elapsed_time"] / found[0]["elapsed_time"] < 0.8


def test_a_profile_says_what_ranks_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans take ranks' times from a profile that measured them; for other numbers of ranks a link has to be named."""
    one = profile()
    own = tuple(SPartPoint(p.batch_size, 0.6 * p.layer_seconds, p.head_seconds, 0.0, p.threads, 2) for p in one.s_part)
    both = dataclasses.replace(one, s_part=(*one.s_part, *own))
    assert read_profile(write_profile(both)) == both
    assert both.measured_s_part().layer_seconds(64) == one.measured_s_part().layer_seconds(64)
    assert both.measured_s_part(num_ranks=2).layer_seconds(64) == pytest.approx(
        0.6 * both.measured_s_part().layer_seconds(64)
    )
    with pytest.raises(ProfileError, match=r"no S-part of 4 rank\(s\); it has 1, 2"):
        both.measured_s_part(num_ranks=4)
    r_part = both.measured_r_part("float16"), both.measured_r_part("float16", num_ranks=2)
    assert r_part[1].seconds_per_token == r_part[0].seconds_per_token / 2
    path = tmp_path / "profile.json"
    path.write_text(write_profile(both))
    flags = ["--profile", str(path), "--seq-len", "64", "--mini-batch-size", "64"]
    assert main(["plan", *flags, "--tensor-parallel-size", "2"]) == 0
    assert main(["plan", *flags, "--tensor-parallel-size", "4"]) == 1
    assert "measures them; or give --rank-link" in capsys.readouterr().err
    assert main(["plan", *flags, "--tensor-parallel-size", "4", "--rank-link", "100GB"]) == 0
