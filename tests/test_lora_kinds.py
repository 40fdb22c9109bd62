"""Every kind of LoRA adapter, merged, gives the logits of peft's unmerged model, with tied embeddings or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.cli.main import build_parser
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model.loader import load_hf_config, load_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

IDS = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(3))
Q = ["q_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head, kept tied": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding, kept tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved head": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "saved embedding, kept tied": {
        "target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True,
    },
    "saved norm": {"target_modules": Q, "modules_to_save": ["norm"]},
    "saved embedding, head": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "DoRA of the head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "DoRA of the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "rsLoRA": {"target_modules": "all-linear", "use_rslora": True, "r": 4, "lora_alpha": 3},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 64},
    },
    "biases of the base": {"target_modules": Q, "bias": "all"},
    "biases of its own": {"target_modules": ["q_proj", "up_proj", "lm_head"], "lora_bias": True},
    "tokens": {"target_modules": Q, "trainable_token_indices": [3, 7, 11]},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "prefixed names": {"target_modules": ["model.layers.0.self_attn.q_proj", "lm_head"]},
    "one layer": {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Save tiny Llamas with biases and return their folders, by whether embeddings are tied."""
    folders = {}
    for tied in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, attention_bias=True, tie_word_embeddings=tied,
            )
        )  # fmt: skip
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        folders[tied] = tmp_path_factory.mktemp("base")
        model.save_pretrained(folders[tied])
    return folders


def adapt(base: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """Save a random adapter of ``base`` in ``folder``."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(folder)
    return folder


def merged(base: Path, adapter: Path) -> Any:
    config = EngineConfig(model=str(base), device="cpu", dtype="float32", lora_modules=[f"a={adapter}"])
    model: Any = load_model(config, load_hf_config(config))
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        pytest.param(
            kind,
            tied,
            marks=[pytest.mark.thorough] * (tied == (number % 2 > 0 and "tied" not in kind)),
            id=f"{kind}-{tied}",
        )
        for number, kind in enumerate(KINDS)
        for tied in (False, True)
    ],
)
def test_logits_are_those_of_the_unmerged_model(kind: str, tied: bool, bases: dict[bool, Path], tmp_path: Path) -> None:
    adapter = adapt(bases[tied], tmp_path, KINDS[kind])
    base = AutoModelForCausalLM.from_pretrained(bases[tied], dtype=torch.float32)
    with torch.inference_mode():
        plain = base(IDS).logits
        wanted = peft.PeftModel.from_pretrained(base, adapter).eval()(IDS).logits
        found = merged(bases[tied], adapter)(IDS).logits
    assert not torch.allclose(plain, wanted, atol=1e-2) or "biases of the base" in kind
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"alora_invocation_tokens": [5, 6]}, "has alora_invocation_tokens .* counts only after these tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "has layer_replication .* computes layers twice"),
        (
            {"target_modules": ["lm_head"], "trainable_token_indices": [3, 7]},
            "trains single tokens of .*lm_head beside a LoRA of it",
        ),
    ],
)
def test_what_no_merged_weights_can_do_is_refused_by_name(
    settings: dict[str, Any], reason: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    adapter = adapt(bases[True], tmp_path, {"target_modules": Q, **settings})
    with pytest.raises(ModelLoadError, match=reason):
        merged(bases[True], adapter)


def test_tensors_of_other_names_and_short_files_are_named(bases: dict[bool, Path], tmp_path: Path) -> None:
    adapter = adapt(bases[False], tmp_path, {"target_modules": Q})
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.layers", "language_model.layers"): each for name, each in tensors.items()}, file)
    with pytest.raises(ModelLoadError, match=r"made for another model .* lacks .*layers.0.self_attn.q_proj.lora_A"):
        merged(bases[False], adapter)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"adapter_model.safetensors is no complete safetensors file: fetch it"):
        merged(bases[False], adapter)


def test_the_flag_leaves_the_prompt_alone() -> None:
    words = ["generate", "--lora-modules", "a=folder", "Hello"]
    args = build_parser(words).parse_args(words)
    assert args.lora_modules == ["a=folder"] and args.prompts == ["Hello"]
    told = EngineConfig(lora_modules=['{"name": "a", "path": "folder", "base_model_name": "b"}'])
    assert told.lora == ("a", "folder")
