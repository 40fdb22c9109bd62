"""Tiny random models with an index that picks tokens, and contexts over eight times as long as the picks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from helpers import latent_zoo, model_zoo
from helpers.latent_zoo import SETTINGS as SETTINGS  # the settings are the same

LENGTHS = (620, 1, 500, 128, 3, 77, 400, 160)

TOKENS = latent_zoo.MOE | {"index_topk": 48, "index_head_dim": 16, "index_n_heads": 12, "head_dim": 8}
WINDOW = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24, "qk_nope_head_dim": 16}
WINDOW |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 24, "kv_lora_rank": 1080}
WIDE_WINDOWS: dict[str, Any] = {
    "head_dim": 24,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 100,
    "per_layer_config": {1: WINDOW},
}
"""Settings with windows over latent rows of 1,088 elements."""

BLOCKS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "vocab_size": model_zoo.VOCABULARY,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 16,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", TOKENS),
    "glm_moe_dsa": ("GlmMoeDsaConfig", TOKENS | {"indexer_types": ["full", "shared", "full"]}),
    "hy_v4": ("HYV4Config", TOKENS | {"indexer_types": ["full", "shared", "full"]}),
    "dots3_note": ("Dots3NoteTextConfig", TOKENS | WIDE_WINDOWS),
    "minimax_m3": ("MiniMaxM3VLTextConfig", BLOCKS),
}


def build_model(name: str, **changes: Any) -> Any:
    """Return the model in float32 on the CPU, with transformers' own attention; ``changes`` overrides settings."""
    config_class, settings = CONFIGS[name]
    config = getattr(transformers, config_class)(**settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model_zoo.randomised(model, latent_zoo.STD).eval()


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(model_zoo.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
