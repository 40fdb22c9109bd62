"""Tiny random models with multi-head latent attention, one of each architecture."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from helpers.model_zoo import VOCABULARY, randomised

POSITIONS = 2048
STD = 0.2
LENGTHS = (620, 1, 40, 128, 3, 77, 17, 160)
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1024, "s_threads": 1}
SETTINGS |= {"r_threads": 1, "kv_cache_memory": "16MiB", "block_size": 16}
"""An engine's settings for a model of this zoo and its prompts."""

MLA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = MLA | {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", MOE | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", MOE | {"rope_parameters": YARN}),
    "kimi_k25": (
        "Kimi_K25Config",
        {"text_config": MOE | {"model_type": "deepseek_v3"}, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", MOE),
    "mistral4": ("Mistral4Config", MOE | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "longcat_flash": (
        "LongcatFlashConfig",
        MLA
        | {"num_layers": 2, "head_dim": 8, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    ),
    "minicpm3": ("MiniCPM3Config", MLA),
    "youtu": ("YoutuConfig", MLA),
    "axk1": ("AXK1Config", MOE),
}


def build_model(name: str, **changes: Any) -> Any:
    """Return the model in float32 on the CPU, with transformers' own attention; ``changes`` overrides settings."""
    config_class, settings = CONFIGS[name]
    config = getattr(transformers, config_class)(**settings | changes)
    with_pictures = name in ("kimi_k25", "mistral4")
    auto_class = transformers.AutoModelForImageTextToText if with_pictures else transformers.AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return randomised(model, STD).eval()


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
