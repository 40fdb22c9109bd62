"""Writes model folders that hold only a configuration, and makes tiny models with random weights and varied texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

LLAMA_3_8B = Path(__file__).with_name("llama-3-8b.json")
SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
"""Sizes for a CPU."""

TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "phi3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
"""Six architectures: plain, with norms of queries, with windows and soft caps, fused, with experts, with states."""


def shape_folder(folder: Path, layers: int, small: bool) -> Path:
    """Write a configuration with ``layers`` layers of Llama-3-8B's size, or of a small size."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(LLAMA_3_8B.read_text()) | (SMALL if small else {}) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def tiny_model(name: str, seed: int = 0) -> Any:
    """Return a tiny model with random weights whose greedy texts do not repeat a single token."""
    config = transformers.AutoConfig.for_model(name, **TINY | ARCHITECTURES[name])
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in own:
                parameter.normal_(0.0, 0.2)
    model.generation_config.eos_token_id = None
    return model.eval()


def prompts(count: int = 6, vocabulary: int = 512) -> list[list[int]]:
    """Return ``count`` prompts of 1 to about 70 random tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = (70, 1, 30, 29, 2, 45)[:count]
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def engine_settings(device: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a small engine, with ``more`` added."""
    found: dict[str, Any] = {"skip_tokenizer_init": True, "device": device, "max_model_len": 512}
    return found | {"kv_cache_memory": "128MiB", "max_num_seqs": 16} | more
