"""A LoRA adapter beside vLLM's model code (``make test-vllm``): tokens are those of the merged adapter elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import latent_zoo, model_zoo, packed_weights
from helpers.rank_jobs import run_ranks
from helpers.vllm_models import SETTINGS, Zoo, generate, job_of_ranks, prompts

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import FastDecodeError, ModelLoadError

vllm = pytest.importorskip("vllm", reason="`make test-vllm` makes an environment with vLLM")
peft = pytest.importorskip("peft")

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "some layers": ("llama-gqa", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all layers": ("qwen3", {"target_modules": "all-linear"}),
    "the LM head": ("llama-gqa", {"target_modules": ["lm_head", "k_proj"]}),
    "unlike ranks and scales": (
        "qwen3",
        {
            "target_modules": ["o_proj", "up_proj", "k_proj"],
            "rank_pattern": {"up_proj": 9},
            "alpha_pattern": {"o_proj": 2},
            "use_rslora": True,
        },
    ),
    "a model with soft caps": ("gemma2", {"target_modules": ["o_proj", "gate_proj"]}),
    "a model with experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    "a model with sinks": ("gpt_oss", {"target_modules": ["k_proj", "o_proj"]}),
    "a model with latents": (
        "deepseek_v3",
        {"target_modules": ["o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"]},
    ),
    "joined layers": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
}

SIZES = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
"""Sizes of a model whose weights can be packed."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


def save_adapter(name: str, folder: Path, sizes: dict[str, int] | None = None, **settings: Any) -> Path:
    """Save a random adapter of model ``name``, large enough to change the tokens; return ``folder``."""
    torch.manual_seed(1)
    kinds: Any = latent_zoo if name in latent_zoo.CONFIGS else model_zoo
    settings = {"r": 4, "lora_alpha": 16, "init_lora_weights": False} | settings
    tuned = peft.get_peft_model(
        kinds.build_model(name, **{"tie_word_embeddings": False} | (sizes or {})), peft.LoraConfig(**settings)
    )
    tuned.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.mark.parametrize(("name", "settings"), ADAPTERS.values(), ids=ADAPTERS)
def test_tokens_are_those_of_the_merged_adapter(name: str, settings: dict[str, Any], zoo: Zoo, tmp_path: Path) -> None:
    folder, plain = zoo[name]
    adapter = {"lora_modules": [f"tuned={save_adapter(name, tmp_path, **settings)}"], "num_mini_batches": 2}
    with LLM(str(folder), **SETTINGS | adapter | {"model_impl": "transformers"}) as llm:
        wanted = generate(llm, prompts())
    with LLM(str(folder), **SETTINGS | adapter) as llm:
        assert generate(llm, prompts()) == wanted != plain


@pytest.mark.timeout(500)
def test_two_ranks_share_a_model_with_an_adapter(zoo: Zoo, tmp_path: Path) -> None:
    folder, _ = zoo["qwen3"]
    adapter = {"lora_modules": [f"tuned={save_adapter('qwen3', tmp_path / 'a', target_modules='all-linear')}"]}
    with LLM(str(folder), **SETTINGS | adapter) as llm:
        wanted = generate(llm, prompts())
    (result,) = run_ranks(2, [job_of_ranks(folder, adapter | {"r_workers": "inproc:1"})], tmp_path)
    assert [tokens for (tokens,) in result["tokens"]] == wanted


@pytest.mark.parametrize("kind", ["w4a16", "awq", "gptq"])
def test_packed_weights_have_an_adapter_as_in_vllm(
    kind: str, packed: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs 4-bit weights in bfloat16 only, where the two attentions round otherwise."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    folder, adapter = (
        packed(kind),
        save_adapter("llama-gqa", tmp_path / "tuned", SIZES, target_modules=["q_proj", "up_proj"]),
    )
    texts = [[(7 * place + 31 * number) % 500 for place in range(4 + number)] for number in range(32)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    own = SETTINGS | {"max_model_len": 512, "dtype": "bfloat16"}
    with LLM(folder, **own) as llm:
        plain, without = generate(llm, texts, params), llm.engine.s_model.identity
    with LLM(folder, **own | {"lora_modules": [f"tuned={adapter}"]}) as llm:
        ours = generate(llm, texts, params)
        assert llm.engine.s_model.identity != without
    limits = {"max_model_len": 512, "enforce_eager": True, "enable_lora": True}
    theirs = vllm.LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", **limits)
    params = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    asked = vllm.lora.request.LoRARequest("tuned", 1, str(adapter))
    outputs = theirs.generate([{"prompt_token_ids": text} for text in texts], params, lora_request=asked)
    wanted = [list(each.outputs[0].token_ids) for each in outputs]
    pairs = [pair for both in zip(ours, wanted, strict=True) for pair in zip(*both, strict=True)]
    assert ours != plain and sum(one == other for one, other in pairs) >= 0.7 * len(pairs)


def test_weights_for_which_vllm_has_no_place_are_refused(packed: Callable[[str], str], tmp_path: Path) -> None:
    adapter = save_adapter("llama-gqa", tmp_path / "tuned", SIZES, target_modules=["q_proj"])
    with pytest.raises(ModelLoadError, match="lora_modules: vLLM refuses the adapter in"):
        LLM(packed("w8a8"), **SETTINGS | {"max_model_len": 512, "lora_modules": [f"tuned={adapter}"]})


@pytest.fixture
def packed(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that saves a tiny Llama in a packed format and returns its folder."""

    def save(kind: str) -> str:
        model_zoo.build_model("llama-gqa", **SIZES).bfloat16().save_pretrained(tmp_path / "plain")
        return str(packed_weights.pack(tmp_path / "plain", kind, tmp_path / kind))

    return save


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_base(**changes: Any) -> Callable[[Path, Path], None]:
    return lambda base, _: model_zoo.build_model("qwen3", **changes).save_pretrained(base)


BREAKAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "fewer layers": (other_base(num_hidden_layers=2), r"made for another model .*layers\.2.* no linear layer"),
    "wider": (other_base(hidden_size=128), "made for another model .* has another size than the layer"),
    "narrower": (other_base(intermediate_size=64), "made for another model .* has another size than the layer"),
    "DoRA": (
        lambda _, tuned: edited(tuned, use_dora=True),
        "vLLM refuses the adapter .*: .* DoRA",
    ),
    "no LoRA": (lambda _, tuned: edited(tuned, peft_type="LOHA"), "an adapter of type 'LOHA', not LORA"),
    "a tied LM head": (
        lambda base, tuned: [
            other_base(tie_word_embeddings=True)(base, tuned),
            save_adapter("qwen3", tuned, target_modules=["lm_head"]),
        ],
        "vLLM adds no adapter to an LM head that shares the embedding's weight",
    ),
    "embeddings": (
        lambda _, tuned: save_adapter("qwen3", tuned, target_modules=["embed_tokens"]),
        "embed_tokens.* belongs to no linear layer of the model",
    ),
}


@pytest.mark.parametrize(("breakage", "message"), BREAKAGES.values(), ids=BREAKAGES)
def test_adapters_that_vllm_would_add_in_part_are_refused(
    breakage: Callable[[Path, Path], Any], message: str, tmp_path: Path
) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    model_zoo.build_model("qwen3").save_pretrained(base)
    save_adapter("qwen3", tuned, target_modules=["q_proj", "down_proj"])
    breakage(base, tuned)
    with pytest.raises(FastDecodeError, match=message):
        LLM(str(base), **SETTINGS | {"max_model_len": 256, "lora_modules": [f"tuned={tuned}"]})


def test_an_adapter_of_absorbed_latents_is_refused(zoo: Zoo, tmp_path: Path) -> None:
    adapter = save_adapter("deepseek_v3", tmp_path, target_modules=["kv_b_proj"])
    with pytest.raises(FastDecodeError, match="expands latents in another way than its weights of each head say"):
        LLM(str(zoo["deepseek_v3"][0]), **SETTINGS | {"lora_modules": [f"tuned={adapter}"]})
