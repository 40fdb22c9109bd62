"""vLLM's model code as the S-part (``make test-vllm``): tokens are transformers', and packed ones are vLLM's."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import latent_zoo, model_zoo, packed_weights, r_workers
from helpers.fake_recorders import fake_recorders
from helpers.rank_jobs import run_ranks
from helpers.vllm_models import GREEDY, SETTINGS, Zoo, generate, job_of_ranks, prompts
from safetensors.torch import load_file

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.sworker.model import vllm_code
from fastdecode.sworker.model.vllm_layers import OnePassNorm

vllm = pytest.importorskip("vllm", reason="`make test-vllm` makes an environment with vLLM")

MODELS = ("llama-gqa", "qwen3", "qwen3_moe", "gemma2", "mistral", "gpt_oss", "deepseek_v3")
SHARED = ("llama-gqa", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Models whose tokens are compared with two tensor-parallel ranks."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_mini_batches": 2},
    "ranges": {"kv_shard_tokens": 512, "r_workers": "inproc:2"},
    "two copies": {"kv_replicas": 2, "r_workers": "inproc:2"},
    "preemption": {"max_model_len": 720, "schedule": "stall-free"},
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
LITTLE_MEMORY = {"llama-gqa": "1MiB", "gemma2": "1MiB", "mistral": "3MiB", "deepseek_v3": "512KiB"}
"""Memory of an R-worker that holds the longest of eight sequences, but not all; the other models use 2MiB."""
NUM_PACKED = 64
"""The number of sequences whose tokens are compared with vLLM's own."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, way: str, zoo: Zoo) -> None:
    """The prompts come twice, so that prefixes are hits the second time."""
    folder, wanted = zoo[name]
    memory = {"kv_cache_memory": LITTLE_MEMORY.get(name, "2MiB")} if way == "preemption" else {}
    with LLM(str(folder), **SETTINGS | WAYS[way] | memory) as llm:
        assert generate(llm, prompts()) == wanted
        assert generate(llm, prompts()) == wanted
        statistics = llm.engine.scheduler.statistics
    assert statistics.prefix_hit_tokens > 0 or way == "preemption"
    assert (statistics.preemptions > 0) == (way == "preemption")


@pytest.mark.parametrize("name", MODELS)
def test_a_killed_r_worker_costs_no_token(name: str, zoo: Zoo) -> None:
    folder, wanted = zoo[name]
    with LLM(str(folder), **SETTINGS | {"r_workers": "spawn:2"}) as llm:
        engine, tokens, victim = llm.engine, {}, r_workers.spawned_pids(llm)[1]
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, GREEDY)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if victim and sum(map(len, tokens.values())) > 100:
                os.kill(victim, signal.SIGKILL)
                victim = 0
        assert not victim and [tokens[number] for number in range(len(wanted))] == wanted


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_share_the_model(name: str, zoo: Zoo, tmp_path: Path) -> None:
    """Each of two processes loads its part. Rank 0 loses an R-worker in the last job."""
    folder, wanted = zoo[name]
    ways: list[dict[str, Any]] = [WAYS["plain"] | {"r_workers": "inproc:1"}, WAYS["ranges"], {"r_workers": "spawn:2"}]
    jobs = [job_of_ranks(folder, way) for way in ways]
    jobs[-1]["kill_at"] = 30
    for result in run_ranks(2, jobs, tmp_path):
        assert [tokens for (tokens,) in result["tokens"]] == wanted and result["held"] == 0


@pytest.mark.timeout(500)
def test_killed_ranks_leave_no_memory_behind(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks inherit one name of shared memory from their parent, as they do if the parent itself uses vLLM.
    Memory by this name would outlive the first ranks, and the next ranks could not make theirs.
    """
    monkeypatch.setenv("VLLM_DIST_IDENT", f"test-{os.getpid()}")
    folder, wanted = zoo["llama-gqa"]
    job = job_of_ranks(folder, {"r_workers": "inproc:1"})
    with pytest.raises(AssertionError):
        run_ranks(2, [job | {"die_at": 3}], tmp_path)
    assert not list(Path("/dev/shm").glob(f"*test-{os.getpid()}*"))
    (result,) = run_ranks(2, [job], tmp_path)
    assert [tokens for (tokens,) in result["tokens"]] == wanted


@pytest.mark.timeout(500)
def test_ranks_that_cannot_share_the_model_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    odd = {"num_attention_heads": 5, "num_key_value_heads": 5}, {"intermediate_size": 129}
    ways = [{"journal": str(tmp_path / "journal")}, *({"hf_overrides": each, "load_format": "dummy"} for each in odd)]
    jobs = [job_of_ranks(zoo["llama-gqa"][0], way) for way in ways]
    journal, heads, width = (result["error"] for result in run_ranks(2, jobs, tmp_path))
    assert "journal: ranks do not know the whole layout with --model-impl vllm" in journal
    assert "2 ranks cannot share the model's 5 heads and 5 KV heads evenly; 1 or 5 can" in heads
    assert re.search("vLLM's layers cannot be dealt to 2 ranks: .*% self.tp_size == 0.*; give another number", width)


@pytest.mark.parametrize(
    ("name", "absorption"),
    [("deepseek_v2", "s"), ("deepseek_v2", "r"), ("glm4_moe_lite", "s"), ("glm4_moe_lite", "r"), ("minicpm3", "s")],
)
def test_latents_rotate_and_choose_experts_as_in_transformers(name: str, absorption: str, zoo: Zoo) -> None:
    """vLLM's kernel for CPUs rotates their queries wrongly, and vLLM scores experts otherwise where files omit how."""
    folder, wanted = zoo[name]
    with LLM(str(folder), **SETTINGS | {"latent_absorption": absorption}) as llm:
        assert generate(llm, prompts()) == wanted


@pytest.mark.parametrize(
    ("kinds", "name", "reason"),
    [
        (model_zoo, "gpt_neox", "this model has no code of vLLM's own, which would run transformers', so vLLM's code"),
        (latent_zoo, "youtu", r"vLLM refuses this model with these settings: .*YoutuForCausalLM.* are not supported"),
        (
            model_zoo,
            "llama4_text",
            "has layers of vLLM's class ChunkedLocalAttention, so vLLM's code cannot",
        ),
    ],
)
def test_models_without_such_layers_of_vllms_are_refused(kinds: Any, name: str, reason: str, tmp_path: Path) -> None:
    kinds.build_model(name).save_pretrained(tmp_path)
    refused_as(reason, tmp_path, UnsupportedModelError)


@pytest.mark.parametrize(
    ("quantization", "settings", "reason"),
    [
        ({"quant_method": "foo"}, {}, "Unknown quantization method: foo"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, {}, "float32 .* Supported dtypes: "),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            {"dtype": "bfloat16"},
            "Failed to find a kernel",
        ),
    ],
)
def test_formats_that_vllm_refuses_are_named(
    quantization: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model_zoo.build_model("llama-gqa").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"quantization_config": quantization}))
    reason = "vLLM refuses this model with these settings: .*" + reason
    refused_as(reason, tmp_path, UnsupportedModelError, **settings)


def refused_as(reason: str, folder: Path, kind: type[Exception], **settings: Any) -> None:
    """Check that the refusal gives ``reason`` in one line, and ends in advice about vLLM's code alone."""
    with pytest.raises(kind, match=reason) as caught:
        LLM(str(folder), **SETTINGS | {"max_model_len": 256} | settings)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    assert "AttentionInterface" not in message and message.endswith("or leave --model-impl vllm out")


def test_weights_that_can_hold_code_are_refused(tmp_path: Path) -> None:
    """vLLM would unpickle them."""
    model_zoo.build_model("llama-gqa").save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"the folder has its weights as \.bin files"):
        LLM(str(tmp_path), **SETTINGS | {"max_model_len": 256})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_compute_in_one_pass_what_vllm_computes(dtype: torch.dtype, zoo: Zoo) -> None:
    """The residual is large, so that rounding the sum before it is normalised would show."""
    with LLM(str(zoo["qwen3"][0]), **SETTINGS | {"dtype": str(dtype).removeprefix("torch.")}) as llm:
        s_worker = llm.engine.world.s_worker
        norms = [each for each in s_worker.code.module.modules() if type(each).__name__ == "RMSNorm"]
        assert len(norms) == 4 * len(s_worker.layout.layers) + 1
        assert all(isinstance(each._forward_method, OnePassNorm) for each in norms)
        norm = norms[-1]
    rows, residual = torch.randn((2, 7, len(norm.weight)), generator=torch.Generator().manual_seed(3)).to(dtype)
    residual *= 100
    for arguments in ((rows,), (rows, residual)):
        found, wanted = norm(*arguments), norm.forward_native(*(each.clone() for each in arguments))
        pairs = zip(found, wanted, strict=True) if len(arguments) == 2 else [(found, wanted)]
        for one, other in pairs:
            assert torch.allclose(one, other, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
            assert dtype == torch.float32 or (one != other).float().mean() < 0.01


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_graphs_of_vllms_modules_generate_the_same(name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for CUDA graphs captures vLLM's own norms, since it cannot see those that replace them on a CPU."""
    made = fake_recorders(monkeypatch)
    monkeypatch.setattr(vllm_code, "norm_in_one_pass", lambda module: None)
    folder, wanted = zoo[name]
    with LLM(str(folder), **SETTINGS | {"num_mini_batches": 2}) as llm:
        assert generate(llm, prompts()) == wanted
    assert len(made) == 1 and any(min(each) > 60 for each in made[0].replays())


def test_the_first_layers_draft(zoo: Zoo) -> None:
    folder, wanted = zoo["llama-gqa"]
    drafts = {"method": "early_exit", "num_layers": 1, "num_speculative_tokens": 2}
    with LLM(str(folder), **SETTINGS | {"speculative_config": drafts}) as llm:
        assert generate(llm, prompts()) == wanted


@pytest.mark.parametrize("kind", packed_weights.FORMATS)
def test_packed_weights_answer_as_in_vllm(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all tokens agree in float32. In bfloat16, which 4-bit weights need, the two engines round differently."""
    dtype, least = ("float32", 0.95) if kind == "w8a8" else ("bfloat16", 0.7)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    model_zoo.build_model("llama-gqa", **sizes).bfloat16().save_pretrained(tmp_path / "plain")
    folder = str(packed_weights.pack(tmp_path / "plain", kind, tmp_path / kind))
    texts = [[(7 * place + 31 * number) % 500 for place in range(4 + number)] for number in range(NUM_PACKED)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    with LLM(folder, **SETTINGS | {"dtype": dtype, "max_model_len": 512}) as llm:
        ours = generate(llm, texts, params)
    theirs = vllm.LLM(folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=512)
    own = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    wanted = [
        list(each.outputs[0].token_ids) for each in theirs.generate([{"prompt_token_ids": t} for t in texts], own)
    ]
    pairs = [pair for both in zip(ours, wanted, strict=True) for pair in zip(*both, strict=True)]
    assert sum(one == other for one, other in pairs) >= least * len(pairs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8"}, "quantization: vLLM multiplies a packed checkpoint as it is packed, or leave"),
        ({"latent_absorption": "r"}, r"latent_absorption: r needs latent attention \(MLA\), and vLLM's code of llama"),
    ],
)
def test_what_is_not_done_there_is_one_clear_line(settings: dict[str, Any], message: str, zoo: Zoo) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        LLM(str(zoo["llama-gqa"][0]), **SETTINGS | settings)


def test_layers_of_another_class_are_named(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "state_size": 16}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(tmp_path)
    refused_as("this model has layers of vLLM's class MambaMixer, so vLLM's code", tmp_path, UnsupportedModelError)
