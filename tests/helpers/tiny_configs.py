"""Makes a tiny configuration of any transformers architecture, by the names that configurations use for sizes."""

from __future__ import annotations

from typing import Any

import transformers

NUM_LAYERS = 4
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "n_embed": 64,
    "num_hidden_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "n_layers": NUM_LAYERS,
    "num_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "original_max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 24,
    "sliding_window_size": 24,
    "attention_chunk_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 12,
    "index_block_size": 32,
    "index_topk_blocks": 2,
    "index_topk": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "query_pre_attn_scalar": 16,
    "is_decoder": True,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": False,
}
"""Sizes by their names in configurations; sizes that a configuration does not have are left out."""

BOTH = ["sliding_attention", "full_attention"]
FOUR_HEADS = {"num_key_value_heads": 4}
SHARING = {"layer_types": BOTH * 2, "num_kv_shared_layers": 2}
QWEN4_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8} | {
    "indexer_compress_ratio": 4
}
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": BOTH * 2,
        "rope_parameters": {each: {"rope_type": "default", "rope_theta": 1e4} for each in BOTH},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": FOUR_HEADS,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": FOUR_HEADS,
    "gemma3n_text": SHARING | {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_unified_assistant": {"text_config": SHARING},
    "gpt_neo": {"window_size": 24},
    "laguna": {"layer_types": BOTH * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": BOTH * 2},
    "mistral4": {"head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "smollm3": {"layer_types": BOTH * 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings that a model type needs to be built, or to have the features of published models."""


def tiny_config(model_type: str) -> Any:
    """Return the configuration of ``model_type`` with SMALL and OWN sizes in each of its parts."""
    kind = transformers.CONFIG_MAPPING[model_type]
    return kind(**_small(kind(), OWN.get(model_type, {})))


def _small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the configuration's class: its names of SMALL's sizes, shortened lists, and parts alike."""
    known = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    depth = next(
        (known[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in known), 0
    )
    small = {name: SMALL[name] for name in known if name in SMALL}
    if "head_dim" in known and known["head_dim"] == known.get("qk_rope_head_dim"):
        small["head_dim"] = SMALL["qk_rope_head_dim"]
    if "use_sliding_window" in known and "layer_types" in known:
        small["layer_types"] = BOTH * 2
    if known.get("kv_lora_rank"):
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name, value in known.items():
        if name not in small and isinstance(value, list) and depth > NUM_LAYERS and len(value) == depth:
            small[name] = _cut(value)
        elif isinstance(value, transformers.PretrainedConfig):
            small[name] = _small(value, {}) | ({"model_type": value.model_type} if value.model_type else {})
    if not any(isinstance(value, transformers.PretrainedConfig) for value in known.values()):
        return small | own
    for name in own:
        small[name] = small[name] | own[name] if isinstance(small.get(name), dict) else own[name]
    return small


def _cut(each: list[Any]) -> list[Any]:
    """Return NUM_LAYERS entries of a list per layer, with each kind of entry."""
    firsts = sorted({each.index(value) for value in each})[:NUM_LAYERS]
    more = [index for index in range(len(each)) if index not in firsts][: NUM_LAYERS - len(firsts)]
    return [each[index] for index in sorted(firsts + more)]


KINDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "indexed_attention": "sparse",
    "minimax_m3_sparse": "sparse",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "compressed",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "hybrid": "recurrent",
    "hybrid_sliding": "recurrent",
}
"""The kind of cache that layers of each type keep."""


def kind_of_cache(config: Any) -> str:
    """Return what the layers keep according to the configuration; "" if it does not say."""
    text = config.get_text_config(decoder=True)
    kinds = dict.fromkeys(KINDS.get(each, "") for each in vars(text).get("layer_types") or ())
    latent = "latent" if vars(text).get("kv_lora_rank") else ""
    kinds = {latent: None} | {each: None for each in kinds if not latent or each != "full"}
    return ", ".join(filter(None, kinds))
