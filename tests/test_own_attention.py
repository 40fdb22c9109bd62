"""Models whose attention is their own code: the layers that R-workers get, and the tokens of `generate`.

`test_exactness.py` compares them with the other architectures; these tests preempt and cut sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_configs import tiny_config
from msgspec import structs

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.kinds import Dense, Layer
from fastdecode.sworker import SModel

NAMES = ["falcon-40b", "falcon-rw", "bloom", "gptj"]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model and return its folder."""
    return model_zoo.save_model(name, tmp_path_factory.mktemp(name))


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "block_size": 16}
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "64MiB", "num_mini_batches": 2, **settings})


def run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(name: str, num_tokens: int) -> list[list[int]]:
    return [list(tokens[:num_tokens]) for tokens in model_zoo.reference(name).tokens]


@pytest.mark.slow
def test_chunks_of_prompts_on_three_r_workers_and_prefixes_that_are_found(name: str, folder: Path) -> None:
    settings = {"r_workers": "inproc:3", "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with make_llm(folder, **settings) as llm:
        for _ in range(2):
            assert run(llm, model_zoo.prompts(name), 8) == expected(name, 8)
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 300
        assert_nothing_held(llm.engine)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["falcon-40b", "bloom"], indirect=True)
def test_preempted_sequences(name: str, folder: Path) -> None:
    """Prompts attend on the S-worker in chunks, and little more than one longest sequence has room."""
    prompts = model_zoo.prompts(name)
    longest = max(map(len, prompts)) + 64
    with make_llm(folder) as llm:
        block_bytes = 16 * llm.engine.s_model.layout.kv_bytes_per_token
    settings: dict[str, Any] = {"kv_cache_memory": (-(-longest // 16) + 2) * block_bytes, "max_model_len": longest}
    with make_llm(folder, **settings, prefill_scratch="64MiB", max_num_batched_tokens=64, max_num_seqs=16) as llm:
        assert run(llm, prompts, 64) == expected(name, 64)
        assert llm.engine.scheduler.statistics.preemptions >= 2
        assert_nothing_held(llm.engine)


def first_layer(config: transformers.PretrainedConfig, folder: Path, **settings: Any) -> Layer:
    """Return the first layer that R-workers would get for a model with random weights."""
    config.save_pretrained(folder)
    given: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"} | settings
    return SModel(EngineConfig(model=str(folder), **given)).layout.layers[0]


PLAIN = Dense(6, 6, 8, 8, 8**-0.5)
BLOOM_SLOPES = tuple(2.0**-power for power in (2, 4, 6, 8, 1, 3))
"""The paper's slopes for 6 heads: those of 4, and every other one of 8."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        ("Falcon", {"num_attention_heads": 6}, {"num_kv_heads": 1}),
        (
            "Falcon",
            {"num_attention_heads": 6, "new_decoder_architecture": True, "num_kv_heads": 2},
            {"num_kv_heads": 2},
        ),
        (
            "Falcon",
            {"num_attention_heads": 6, "new_decoder_architecture": True, "num_kv_heads": 3}
            | {"num_ln_in_parallel_attn": 1, "alibi": True},
            {"num_kv_heads": 3, "alibi_slopes": tuple(slope * 8**-0.5 for slope in BLOOM_SLOPES)},
        ),
        ("Falcon", {"num_attention_heads": 6, "multi_query": False, "bias": True}, {}),
        ("Bloom", {"n_head": 6}, {"alibi_slopes": BLOOM_SLOPES}),
        ("Mpt", {"n_heads": 6, "max_seq_len": 64}, {"alibi_slopes": BLOOM_SLOPES}),
        ("GPTJ", {"n_head": 6, "rotary_dim": 4, "n_positions": 64}, {}),
    ],
)
def test_what_r_workers_are_told(
    kind: str, settings: dict[str, Any], changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    names = {"Mpt": ("d_model", "n_layers"), "GPTJ": ("n_embd", "n_layer")}.get(
        kind, ("hidden_size", "num_hidden_layers")
    )
    common = {"vocab_size": 96, "eos_token_id": None, "bos_token_id": None} | dict(zip(names, (48, 2), strict=True))
    layer = first_layer(getattr(transformers, f"{kind}Config")(**common | settings), tmp_path, dtype=dtype)
    slopes = changes.get("alibi_slopes", ())
    assert layer.alibi_slopes == pytest.approx(slopes, rel=1e-6)
    assert layer.scale == pytest.approx(PLAIN.scale)
    assert structs.replace(layer, scale=PLAIN.scale, alibi_slopes=()) == structs.replace(
        PLAIN, **changes | {"alibi_slopes": ()}
    )


def test_slopes_between_powers_of_two(tmp_path: Path) -> None:
    """With 12 heads, BLOOM's slopes are in float32, and Falcon's are rounded to bfloat16 as its own code has them."""
    common = {"vocab_size": 96, "hidden_size": 96, "num_hidden_layers": 1, "eos_token_id": None, "bos_token_id": None}
    exact = [2 ** -(i + 1) for i in range(8)] + [2 ** -(i + 0.5) for i in range(4)]
    bloom = first_layer(transformers.BloomConfig(**common, n_head=12), tmp_path / "bloom")
    assert bloom.alibi_slopes == pytest.approx(exact, rel=1e-6)
    config = transformers.FalconConfig(**common, num_attention_heads=12, alibi=True, multi_query=False)
    falcon = first_layer(config, tmp_path / "falcon")
    rounded = [float(torch.tensor(slope).bfloat16()) / math.sqrt(8) for slope in exact]
    assert falcon.alibi_slopes == pytest.approx(rounded, rel=1e-6) and falcon.alibi_slopes[8:] != tuple(exact[8:])


def test_falcon_with_slopes_between_powers_of_two_matches_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens match once transformers does not round the products of slopes and positions to bfloat16."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.falcon import modeling_falcon

    recipe = model_zoo.RECIPES["falcon-rw"]
    monkeypatch.setitem(
        model_zoo.RECIPES, "falcon-rw", replace(recipe, settings=recipe.settings | {"num_attention_heads": 12})
    )
    prompts, folder = model_zoo.prompts("falcon-rw")[:3], model_zoo.save_model("falcon-rw", tmp_path)
    with make_llm(folder) as llm:
        tokens = run(llm, prompts, 12)
        slopes = torch.tensor(llm.engine.s_model.layout.layers[0].alibi_slopes)

    def unrounded(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        positions = build_alibi_tensor(mask, 1, torch.float32) * 2**8  # The one head has a slope of 2 ** -8.
        return (slopes * math.sqrt(192 // 12))[:, None, None] * positions

    assert unrounded(torch.ones(1, 9), 12, torch.float32)[8, 0, 8] == float(torch.tensor(2**-0.5).bfloat16()) * 8
    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", unrounded)
    model = model_zoo.build_model("falcon-rw")
    assert [model_zoo.disagreements(model, *pair) for pair in zip(prompts, tokens, strict=True)] == [0, 0, 0]


@pytest.mark.parametrize(
    "name",
    ["gpt_neo"]
    + [
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("codegen", "gpt_neox_japanese", "openai-gpt", "megatron-bert", "xglm")
    ],
)
def test_other_adapters_match_generate(name: str, tmp_path: Path) -> None:
    """One of two prompts is longer than GPT-Neo's window, and its chunks attend on the S-worker."""
    model = model_zoo.randomised(transformers.AutoModelForCausalLM.from_config(tiny_config(name)), 0.15)
    model.save_pretrained(tmp_path)
    prompts = [prompt[:100] for prompt in model_zoo.prompts("llama-gqa")[2:4]]
    prompts = [[token % 120 for token in prompt] for prompt in prompts]
    with make_llm(
        tmp_path, max_model_len=128, prefill_scratch="16MiB", max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        windows = [layer.window for layer in llm.engine.s_model.layout.layers]
        assert windows == ([0, 24] * 2 if name == "gpt_neo" else [0] * 4)
        tokens = run(llm, prompts, 10)
    assert max(len(set(each)) for each in tokens) >= 3
    assert [model_zoo.disagreements(model, *pair) for pair in zip(prompts, tokens, strict=True)] == [0, 0]
