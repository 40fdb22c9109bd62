"""Scaled rotary frequencies: long texts give transformers' tokens, and unknown scalings are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError, ModelLoadError, UnsupportedModelError
from fastdecode.sworker.model.loader import load_hf_config, most_positions
from fastdecode.sworker.model.smodel import SModel

YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {
    "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a tiny Llama for 64 tokens, without scaling, and return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_theta=5000.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    return tmp_path


def scale(folder: Path, scaling: dict[str, Any], **changes: Any) -> Path:
    """Write ``scaling`` into config.json in its published form."""
    told = json.loads((folder / "config.json").read_text())
    del told["rope_parameters"]
    told |= {"rope_theta": 5000.0, "rope_scaling": scaling, **changes}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def check_text(folder: Path, **settings: Any) -> None:
    """Check that the tokens after 150 others are transformers'."""
    ids = torch.randint(3, 64, (1, 150), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    told = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **told)[0, 150:].tolist()
    small = {"kv_cache_memory": "16MiB", "s_threads": 1, "device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(folder), **small, **settings) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": ids[0].tolist()}, greedy, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == wanted and len(set(wanted)) > 2


@pytest.mark.parametrize("scaling", [YARN, LINEAR, YARN | {"original_max_position_embeddings": 32, "factor": 8.0}])
def test_texts_beyond_the_original_length_are_those_of_transformers(scaling: dict[str, Any], folder: Path) -> None:
    check_text(scale(folder, scaling), max_model_len=256)


def test_a_scaling_whose_length_is_named_needs_no_flag(folder: Path) -> None:
    check_text(scale(folder, LLAMA3, max_position_embeddings=256))


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        (YARN, 256),
        (LINEAR, 256),
        (YARN | {"original_max_position_embeddings": 16}, 64),
        (LLAMA3, 64),
        (LONG, 64),
        (DYNAMIC, 64),
    ],
)
def test_the_most_that_may_be_asked_for_is_vllm_s(scaling: dict[str, Any], most: int, folder: Path) -> None:
    config = EngineConfig(model=str(scale(folder, scaling)), max_model_len=most + 1, load_format="dummy")
    assert most_positions(load_hf_config(config)) == most
    with pytest.raises(ConfigError, match=f"max_model_len {most + 1} is more than the model's own {most} tokens"):
        SModel(config)


def test_frequencies_that_depend_on_the_batch_are_refused(folder: Path) -> None:
    def build(length: int) -> SModel:
        settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        return SModel(EngineConfig(model=str(folder), max_model_len=length, **settings))

    scale(folder, LONG)
    assert build(16).max_model_len == 16
    with pytest.raises(UnsupportedModelError, match="it runs with --max-model-len 16 or less"):
        build(17)
    told = json.loads((folder / "config.json").read_text())
    told["rope_scaling"]["short_factor"] = LONG["long_factor"]
    (folder / "config.json").write_text(json.dumps(told))
    assert build(64).max_model_len == 64, "the same in all lengths"


OVERRIDES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 64},
    ),
    ({"rope_parameters": LINEAR}, LINEAR | {"rope_theta": 5000.0}),
    ({"rope_parameters": LINEAR | {"rope_theta": 10.0}}, LINEAR | {"rope_theta": 10.0}),
    ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
]


@pytest.mark.parametrize(("overrides", "wanted"), OVERRIDES)
def test_a_scaling_set_by_hand_keeps_the_rest(overrides: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    config = EngineConfig(model=str(folder), hf_overrides=overrides)
    assert load_hf_config(config).rope_parameters == wanted


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"factor": 4.0}, "the factor 4.0 is of no kind: give rope_type"),
        ({"rope_type": "ntk", "factor": 4.0}, "rope_type 'ntk' is not known: .*yarn"),
    ],
)
def test_what_transformers_leaves_out_is_refused(scaling: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load_hf_config(EngineConfig(model=str(scale(folder, scaling))))
    with pytest.raises(FastDecodeError, match="rope_scaling must be an object"):
        load_hf_config(EngineConfig(model=str(folder), hf_overrides={"rope_scaling": 4.0}))
