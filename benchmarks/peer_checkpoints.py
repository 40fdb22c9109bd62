"""Writes random bfloat16 models, and a Llama in formats that vLLM (W8A8) and llama.cpp (GGUF, Q8_0) read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models import llama_folder
from safetensors.torch import load_file, save_file

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""GGUF's names of a layer's parts."""

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""GGUF's names of the other tensors."""


def saved_llama(kv_heads: int, layers: int, root: Path) -> str:
    """Return the folder of a Llama of hidden size 1024, 16 heads and random weights; write it if it is missing."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(llama_folder(1024, layers, group=16 // kv_heads))
    config.max_position_embeddings = 8192
    return _saved(config, root / f"llama-1024-{layers}-kv{kv_heads}")


def saved_experts(layers: int, root: Path) -> str:
    """Return a folder with ``layers`` random layers of Qwen3-30B-A3B and a small vocabulary; write it if missing."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=8192, mlp_only_layers=[], tie_word_embeddings=False,
    )  # fmt: skip
    return _saved(config, root / f"qwen3-30b-a3b-{layers}")


def _saved(config: Any, folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return str(folder)


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write_w8a8(plain: str, root: Path) -> str:
    """Write int8 weights with a scale per output row, for inputs that are quantized at run time; return the folder."""
    if (root / "config.json").exists():
        return str(root)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(plain).items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        scales = tensor.float().abs().amax(1, keepdim=True) / 127
        packed[name] = (tensor.float() / scales).round().clamp(-127, 127).to(torch.int8)
        packed[f"{name}_scale"] = scales.to(torch.bfloat16)
    each = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": each | {"strategy": "channel", "dynamic": False},
        "input_activations": each | {"strategy": "token", "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config = json.loads((Path(plain) / "config.json").read_text())
    config["quantization_config"] = settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    root.mkdir(parents=True, exist_ok=True)
    save_file(packed, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


def write_gguf(plain: str, file: Path) -> str:
    """Write a Q8_0 file without a tokenizer, which llama.cpp's benchmark does not need; return the file's name."""
    import gguf

    if file.exists():
        return str(file)
    config = json.loads((Path(plain) / "config.json").read_text())
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _write_sizes(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors_of(plain).items():
        part = name.removesuffix(".weight")
        # Reorder rows: llama.cpp's rotary embedding pairs neighbouring dims, and transformers' pairs the two halves.
        if (kind := part.rpartition(".")[2]) in heads:
            halves = tensor.view(heads[kind], 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(_gguf_name(part), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)
    return str(file)


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))


def _gguf_name(part: str) -> str:
    if part in OUTER:
        return f"{OUTER[part]}.weight"
    layer, _, leaf = part.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[leaf]}.weight"
