"""Plans of hybrids: their parameters and states are those of the models, and a plan counts what states take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.tiny_configs import tiny_config

from fastdecode.cli.main import main
from fastdecode.core.errors import PlanError, UnsupportedModelError
from fastdecode.perfmodel.gpu_only import GpuServer
from fastdecode.perfmodel.hardware import find_cpu_host, find_gpu, kernel_bytes_per_second
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.model_config import read_shape
from fastdecode.perfmodel.planner import Planner
from fastdecode.perfmodel.rank_costs import rank_shape
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import GpuSPart, RPart, beside_states, host_r_part
from fastdecode.sworker.loader import auto_class

HYBRIDS = ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "bamba", "falcon_h1", "lfm2")
HYBRIDS += ("jamba", "minimax", "recurrent_gemma", "zamba2")
LEFT_OUT = ("conv1d", "conv.conv", "conv_", ".gate.weight", "shared_expert_gate", "router", "short_conv", "gate_bias")
"""Filters, biases in blocks, and the routers of experts."""

NEXT = BUILT_IN["qwen3-next-80b-a3b"]


def built(model_type: str) -> Any:
    return auto_class(model_type).from_config(tiny_config(model_type), attn_implementation="eager")


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_parameters_and_states_are_those_of_the_model(model_type: str) -> None:
    """The states against those in transformers' cache, whose convolutions keep one token more."""
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
    """Of a cache, but those that MiniMax keeps beside it and RecurrentGemma in its modules."""
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
    """31 KB of cache per token, and 189 MB of matrices per sequence."""
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
    """A row takes as long as reading two of its states, whatever the context; of a prompt an eighth of that."""
    host = find_cpu_host("epyc-7452")
    part = host_r_part(NEXT, "bfloat16", host)
    once = 2 * NEXT.state_bytes_per_sequence / host.read_bytes_per_second.achieved
    assert NEXT.num_layers * part.row_seconds == pytest.approx(once)
    assert NEXT.num_layers * part.seconds(0, 3, 16) == pytest.approx(5 * once)
    plain = replace(NEXT, state=None, num_layers=12)
    attended = 12 * host_r_part(plain, "bfloat16", host).seconds_per_token
    assert NEXT.num_layers * part.seconds_per_token == pytest.approx(attended)
    assert planner().balanced_r_workers(512) > planner(r_part=replace(part, row_seconds=0)).balanced_r_workers(512)


def test_measured_states_count_beside_rows() -> None:
    """A step of 5 rows and 16 of a prompt, layer by layer: 36 advance states, 12 attend; 8 rows of a prompt as one."""
    rows, state = RPart(1e-9, 2e-6, 3e-7), (5e-6, 4e-5)
    part = beside_states(rows, NEXT, state, prompt_context=100.0)
    attending = 12 * (rows.seconds(7000, 5) + 16 * (3e-7 + 100 * 1e-9))
    recurrent = 36 * (state[0] + (5 + 16 / 8) * state[1])
    assert NEXT.num_layers * part.seconds(7000, 5, 16) == pytest.approx(attending + recurrent)


def test_prompts_attend_on_r_workers() -> None:
    """A prompt of 100,000 tokens by brute force: each row multiplies with all before it, in 12 layers of 48."""
    host, rows = find_cpu_host("epyc-7452"), 100_000
    workload = Workload(rows + 1000, rows)
    short, part = (host_r_part(NEXT, "bfloat16", host, prompt_context=each) for each in (0.0, workload.prompt_context))
    layer = NEXT.layer_layout
    rate = kernel_bytes_per_second("bfloat16", layer.products_per_element, host.cores)
    products = sum(layer.kv_bytes_per_token("bfloat16") / rate * row for row in range(0, rows, 1000)) * 1000
    more = NEXT.num_layers * (part.seconds(0, 0, rows) - short.seconds(0, 0, rows))
    assert more == pytest.approx(12 * products, rel=0.02)
    plain = replace(NEXT, state=None)
    assert host_r_part(plain, "bfloat16", host, prompt_context=1e5).prompt_row_seconds == 0


def test_memory_holds_states_beside_the_cache() -> None:
    """R-workers by brute force: the bytes of peak contexts and states over those of one R-worker."""
    kv_bytes, room = NEXT.kv_bytes_per_token("bfloat16"), 40e9
    plan = planner(capacity_tokens=room / kv_bytes).plan(1024)
    held = plan.kv_load_limit * kv_bytes + plan.in_flight * NEXT.state_bytes_per_sequence
    assert planner().memory_r_workers(plan.in_flight) == 1
    assert planner(capacity_tokens=room / kv_bytes).memory_r_workers(plan.in_flight) == -(-held // room)
    assert plan.state_bytes_per_sequence == NEXT.state_bytes_per_sequence
    with pytest.raises(PlanError, match="cached tokens beside its states"):
        planner(capacity_tokens=NEXT.state_bytes_per_sequence / kv_bytes + 100)


def test_ranks_share_the_heads_of_states() -> None:
    rank = rank_shape(NEXT, 2).state
    assert rank and NEXT.state and 2 * rank.bytes_per_sequence == NEXT.state.bytes_per_sequence
    with pytest.raises(PlanError, match="3 ranks cannot share"):
        NEXT.state.of_rank(3, NEXT.name)


def test_the_gpu_alone_holds_states_too() -> None:
    gpu, workload = find_gpu("h200").times(4), Workload(4096, 1024)
    shapes = (NEXT, replace(NEXT, state=replace(NEXT.state, key_dim=1, taps=1)))
    batches = [GpuServer(each, gpu, NEXT.kv_bytes_per_token("int8"), workload).best() for each in shapes]
    assert batches[0].max_batch_size < batches[1].max_batch_size


@pytest.mark.parametrize("num_r_workers", [None, 8, 32, 0])
def test_a_simulation_ends_and_counts_states(num_r_workers: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Several generations of requests over R-workers that have memory for some of the seats alone."""
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
