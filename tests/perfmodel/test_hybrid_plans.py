"""Plans of hybrids: parameters and states are those of the models, and plans count what the states take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_configs import tiny_config

from fastdecode.cli.main import main
from fastdecode.core.errors import PlanError, UnsupportedModelError
from fastdecode.perfmodel.hardware import kernel_bytes_per_second
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.batch_search import BatchSearch
from fastdecode.perfmodel.lab.gpu_only import GpuServer
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.model_config import read_shape
from fastdecode.perfmodel.presets import find_cpu_host, find_gpu
from fastdecode.perfmodel.rank_costs import rank_shape
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import GpuSPart, RPart, Transport, beside_states
from fastdecode.perfmodel.states_here import StatesHere
from fastdecode.sworker.model.loader import auto_class

HYBRIDS = ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "bamba", "falcon_h1", "lfm2")
HYBRIDS += ("jamba", "minimax", "recurrent_gemma", "zamba2")
LEFT_OUT = ("conv1d", "conv.conv", "conv_", ".gate.weight", "shared_expert_gate", "router", "short_conv", "gate_bias")
"""Names of weights that are not counted: filters, biases of blocks, and the routers of experts."""

NEXT = BUILT_IN["qwen3-next-80b-a3b"]


def built(model_type: str) -> Any:
    return auto_class(model_type).from_config(tiny_config(model_type), attn_implementation="eager")


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_parameters_and_states_are_those_of_the_model(model_type: str) -> None:
    """The states are as large as those in transformers' cache, whose convolutions keep one token more."""
    model = built(model_type)
    shape = read_shape(model.config.to_dict(), model_type)
    named = [(name, each.numel()) for name, each in model.named_parameters() if each.dim() > 1]
    matrices = sum(size for name, size in named if not any(word in name for word in LEFT_OUT))
    assert shape.parameters == pytest.approx(matrices, rel=1e-3)
    assert shape.state and shape.attention_layers
    with torch.no_grad():
        cache = getattr(model(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=True), "past_key_values", None)
    assert shape.state_bytes_per_sequence == state_bytes(model, cache, shape.state.taps)
    halved = shape.with_state_dtype("bfloat16").state_bytes_per_sequence
    matrices = 4 * shape.state.num_layers * shape.state.key_dim * shape.state.wide
    assert shape.state_bytes_per_sequence - halved == matrices / 2


def state_bytes(model: Any, cache: Any, taps: int) -> int:
    """Return the bytes of a cache's states, except those that MiniMax and RecurrentGemma keep elsewhere."""
    kept = [each for each in getattr(cache, "linear_cache", []) if len(each)]
    kept += [each.recurrent_states for each in model.modules() if hasattr(each, "recurrent_states")]
    convolved = [each.conv1d_state for each in model.modules() if hasattr(each, "conv1d_state")]
    total = sum(each.numel() * 4 for each in [*kept, *convolved])
    for layer in cache.layers if cache else ():
        convolved, matrices = (getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states"))
        total += sum(each.numel() // each.shape[-1] * (taps - 1) * 4 for each in convolved.values() if each is not None)
        total += sum(each.numel() * 4 for each in matrices.values() if each is not None)
    return total


def test_published_sizes() -> None:
    """A published hybrid has 31 KB of cache per token and 189 MB of state matrices per sequence."""
    shape = BUILT_IN["qwen3.5-397b-a17b"]
    state = shape.state
    assert state is not None
    assert shape.kv_bytes_per_token("bfloat16") == 30720
    assert round(state.num_layers * state.heads * state.key_dim * state.value_dim * 4 / 1e6) == 189


def test_patterns_of_nemotron_h() -> None:
    config = tiny_config("nemotron_h").to_dict()
    del config["layers_block_type"]
    shape = read_shape(config | {"hybrid_override_pattern": "M-M-M*-"}, "nemotron_h")
    assert (shape.num_layers, shape.attention_layers, shape.mlp_layers, shape.num_experts) == (4, 1, 3, 1)
    with pytest.raises(UnsupportedModelError, match="all layers are recurrent"):
        read_shape(config | {"layers_block_type": ["mamba", "mlp"] * 3}, "nemotron_h")


def planner(**changed: Any) -> Planner:
    host = find_cpu_host("epyc-7452")
    settings: dict[str, Any] = {
        "workload": Workload(4096, 1024),
        "num_layers": NEXT.num_layers,
        "s_part": GpuSPart(NEXT, find_gpu("h200")),
        "r_part": host_r_part(NEXT, "bfloat16", host),
        "kv_bytes_per_token": NEXT.kv_bytes_per_token("bfloat16"),
        "state_bytes_per_sequence": NEXT.state_bytes_per_sequence,
    }
    return Planner(**settings | changed)


def test_r_workers_read_and_write_states() -> None:
    """A row takes as long as reading two of its states, whatever the context; a prompt's row takes a third of that."""
    host = find_cpu_host("epyc-7452")
    part = host_r_part(NEXT, "bfloat16", host)
    once = 2 * NEXT.state_bytes_per_sequence / host.read_bytes_per_second.achieved
    assert NEXT.num_layers * part.row_seconds == pytest.approx(once)
    assert NEXT.num_layers * part.seconds(0, 3, 6) == pytest.approx(5 * once)
    plain = replace(NEXT, state=None, num_layers=12)
    attended = 12 * host_r_part(plain, "bfloat16", host).seconds_per_token
    assert NEXT.num_layers * part.seconds_per_token == pytest.approx(attended)
    assert planner().balanced_r_workers(512) > planner(r_part=replace(part, row_seconds=0)).balanced_r_workers(512)


def test_measured_states_count_beside_rows() -> None:
    """36 layers advance states, for which 3 prompt rows cost as much as a decode's row; 12 layers attend."""
    rows, state = RPart(1e-9, 2e-6, 3e-7), (5e-6, 4e-5)
    part = beside_states(rows, NEXT, state, prompt_context=100.0)
    attending = 12 * (rows.seconds(7000, 5) + 16 * (3e-7 + 100 * 1e-9))
    recurrent = 36 * (state[0] + (5 + 16 / 3) * state[1])
    assert NEXT.num_layers * part.seconds(7000, 5, 16) == pytest.approx(attending + recurrent)


def test_prompts_attend_on_r_workers() -> None:
    """The seconds of a prompt of 100,000 tokens equal a sum over all pairs of rows in 12 of the 48 layers."""
    host, rows = find_cpu_host("epyc-7452"), 100_000
    workload = Workload(rows + 1000, rows)
    short, part = (host_r_part(NEXT, "bfloat16", host, prompt_context=each) for each in (0.0, workload.prompt_context))
    layer = NEXT.layer_layout
    rate = kernel_bytes_per_second("bfloat16", layer.multiply_adds() / layer.kv_elements, host.cores)
    products = sum(layer.token_bytes("bfloat16") / rate * row for row in range(0, rows, 1000)) * 1000
    more = NEXT.num_layers * (part.seconds(0, 0, rows) - short.seconds(0, 0, rows))
    assert more == pytest.approx(12 * products, rel=0.02)
    plain = replace(NEXT, state=None)
    assert host_r_part(plain, "bfloat16", host, prompt_context=1e5).prompt_row_seconds == 0


def test_memory_holds_states_beside_the_cache() -> None:
    """The number of R-workers is the peak's bytes of contexts and states over one R-worker's memory."""
    kv_bytes, room = NEXT.kv_bytes_per_token("bfloat16"), 40e9
    plan = planner(capacity_tokens=room / kv_bytes).plan(1024)
    held = plan.kv_load_limit * kv_bytes + plan.in_flight * NEXT.state_bytes_per_sequence
    assert planner().memory_r_workers(plan.in_flight) == 1
    assert planner(capacity_tokens=room / kv_bytes).memory_r_workers(plan.in_flight) == -(-held // room)
    assert plan.state_bytes_per_sequence == NEXT.state_bytes_per_sequence
    with pytest.raises(PlanError, match="cached tokens beside its states"):
        planner(capacity_tokens=NEXT.state_bytes_per_sequence / kv_bytes + 100)


HERE = NEXT.keeping_states(True)


def test_states_with_the_s_worker_take_its_time_and_no_link() -> None:
    """A step of 40 decodes and 20 prompt rows attends in 12 layers and advances states on the S-worker in 36."""
    host, gpu = find_cpu_host("epyc-7452"), find_gpu("h200")
    r_part = host_r_part(HERE, "bfloat16", host)
    assert r_part.row_seconds == r_part.prompt_row_seconds == 0
    assert r_part.seconds_per_token == host_r_part(NEXT, "bfloat16", host).seconds_per_token
    sent = 2 * (16 + 2) * 256 * 2  # q and o, then k and v; each element has two bytes.
    assert NEXT.num_layers * HERE.attending_row_bytes == pytest.approx(12 * sent, rel=1e-3)
    states = StatesHere.of_bandwidth(HERE, gpu.kv_bytes_per_second.achieved, 10 * NEXT.state_bytes_per_sequence + 1)
    assert states.num_places == 10
    model = planner(r_part=r_part, states=states, num_mini_batches=2).step_model(3)
    stages = model.stages(Load(60, 40, 7000))
    own = GpuSPart(NEXT, gpu).layer_seconds(30)
    moved = (20 + 10 / 3) * 2 * NEXT.state_bytes_per_sequence / gpu.kv_bytes_per_second.achieved
    assert NEXT.num_layers * stages.s_part == pytest.approx(NEXT.num_layers * own + moved)
    assert NEXT.num_layers * stages.r_part == pytest.approx(48 * r_part.seconds_per_token * 7000 / 6)


def test_measured_states_with_the_s_worker() -> None:
    """36 layers advance the states of 5 decodes and 6 prompt rows (as 2 more); an R-worker only attends, in 12."""
    states = StatesHere.as_measured(HERE, (5e-6, 4e-5))
    assert NEXT.num_layers * states.seconds(5, 6) == pytest.approx(36 * (5e-6 + 7 * 4e-5))
    part = beside_states(RPart(1e-9, 2e-6, 3e-7), HERE, (0.0, 0.0))
    assert NEXT.num_layers * part.seconds(7000, 5) == pytest.approx(12 * (2e-6 + 5 * 3e-7 + 7000e-9))
    way = Transport(10.0, (1e9,), 8e-5).of_layers(HERE.sent_share)
    assert NEXT.num_layers * way.latency_seconds == pytest.approx(12 * 8e-5)


def test_states_with_the_s_worker_bound_the_batch() -> None:
    kv_bytes, states = NEXT.kv_bytes_per_token("bfloat16"), StatesHere(1e-7, num_places=300)
    with_room = planner(states=states, capacity_tokens=40e9 / kv_bytes)
    assert with_room.state_tokens == 0 and BatchSearch(with_room).knee() == 150
    plan = with_room.plan(150)
    assert with_room.memory_r_workers(300) == -(-plan.kv_load_limit * kv_bytes // 40e9)
    with pytest.raises(PlanError, match=r"room for 300 states of 79\.04 MB, and 302 sequences in flight"):
        with_room.plan(151)


WORDS = ["plan", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--cpu", "epyc-9654", "--tensor-parallel-size", "2"]
WORDS += ["--seq-len", "16384", "--prompt-len", "14336", "--link", "400Gb"]


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main([*WORDS, *words, "--output-json", str(tmp_path / "plan.json")]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return found


def test_plan_decides_who_keeps_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan chooses by throughput or by the price of a token, and obeys where a side is asked for."""
    sides = {side: planned(tmp_path, "--state-on", side) for side in ("r", "s")}
    capsys.readouterr()
    chosen = planned(tmp_path)
    text = capsys.readouterr().out
    best = max(sides, key=lambda side: sides[side]["output_tokens_per_second"])
    assert chosen["state_on"] == chosen["states"]["state_on"] == best
    for side, found in sides.items():
        assert found["state_on"] == side
        for figures in (found["states"][side], chosen["states"][side]):
            assert figures["output_tokens_per_second"] == found["output_tokens_per_second"]
            assert figures["num_r_workers"] == found["num_r_workers"]
    assert f"(--state-on {best})" in text and "on a CPU alone so far" in text
    dear = planned(tmp_path, "--gpu-price", "1", "--cpu-price", "1000", "--num-r-workers", "1")
    assert chosen["ranges"]["kv_shard_tokens"] is None, "a state has none"
    prices = {side: dear["states"][side]["price_per_million_tokens"] for side in ("r", "s")}
    assert dear["state_on"] == min(prices, key=prices.__getitem__)


def test_plan_says_why_the_s_worker_cannot_keep_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--mini-batch-size", "512", "--state-memory", "8GB")
    assert found["state_on"] == "r" and found["states"]["s"] is None
    assert "room for 101 states" in found["states"]["lacks"] and "room for 101 states" in capsys.readouterr().out
    words = [*WORDS, "--mini-batch-size", "512", "--state-memory", "8GB", "--state-on", "s"]
    assert main(words) == 1
    assert "take a smaller mini-batch, or --state-on r" in capsys.readouterr().err
    dense = [*WORDS[:2], "llama-7b", *WORDS[3:]]
    for words, message in (
        ([*dense, "--state-on", "s"], "state_on: s needs recurrent layers, and llama-7b has none"),
        ([*WORDS, "--state-on", "r", "--state-memory", "8GB"], "state_memory is for states"),
        ([*WORDS, "--kv-shard-tokens", "4096"], "kv_shard_tokens: this model keeps a state per range"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert planned(tmp_path, "--model", "llama-7b")["state_on"] == "r"


def test_a_simulation_keeps_states_with_the_s_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """R-workers then have room for more sequences, and an S-worker without room is refused as an engine refuses it."""
    words = ["simulate", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--tensor-parallel-size", "2"]
    words += ["--num-prompts", "96", "--random-input-len", "64", "--random-output-len", "48", "--max-num-seqs", "32"]
    words += ["--cpu", "epyc-7452", "--kv-cache-memory", "400MB", "--num-r-workers", "2"]
    seconds = []
    for more in ([], ["--state-on", "s"]):
        assert main([*words, *more]) == 0
        found = re.search(r"Throughput: ([0-9.]+) requests/s", capsys.readouterr().out)
        assert found
        seconds.append(1 / float(found[1]))
    assert seconds[1] < seconds[0]
    assert main([*words, "--state-on", "s", "--state-memory", "1GB"]) == 1
    assert "states of max_num_seqs 32 sequences take" in capsys.readouterr().err


def test_each_rank_has_whole_states() -> None:
    """Each rank keeps whole states as an engine's ranks do, since transformers cuts no recurrent layer."""
    assert rank_shape(NEXT, 2).state == NEXT.state


def test_the_gpu_alone_holds_states_too() -> None:
    gpu, workload = find_gpu("h200").times(4), Workload(4096, 1024)
    shapes = (NEXT, replace(NEXT, state=replace(NEXT.state, key_dim=1, taps=1)))
    batches = [GpuServer(each, gpu, NEXT.kv_bytes_per_token("int8"), workload).best() for each in shapes]
    assert batches[0].max_batch_size < batches[1].max_batch_size


@pytest.mark.parametrize("num_r_workers", [None, 8, 32, 0])
def test_a_simulation_ends_and_counts_states(num_r_workers: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Several generations of requests end on R-workers whose memory holds only some of them at once."""
    words = ["simulate", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--tensor-parallel-size", "2"]
    words += ["--num-prompts", "96", "--random-input-len", "64", "--random-output-len", "48", "--max-num-seqs", "32"]
    if num_r_workers != 0:
        words += ["--cpu", "epyc-7452", "--kv-cache-memory", "400MB"]
    if num_r_workers is not None:
        words += ["--num-r-workers", str(num_r_workers)]
    assert main(words) == 0
    assert "output tokens/s" in capsys.readouterr().out


def test_bare_numbers_know_no_states(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen3-next-80b-a3b", "--s-part-seconds", "1e-3", "--r-part-seconds-per-token", "1e-7"]
    words += ["--num-layers", "48", "--seq-len", "1024", "--mini-batch-size", "64"]
    assert main(words) == 2
    assert "advances states" in capsys.readouterr().err
