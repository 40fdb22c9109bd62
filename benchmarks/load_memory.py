"""Peak memory of loading a checkpoint over what stays of it: python benchmarks/load_memory.py

Of each published format, a model of random numbers is saved in shards and loaded as an engine does, in a fresh process.
Counted is what is resident, mapped files included, beyond what the process held before; what stays is the weights in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from fastdecode.api.config import EngineConfig
from fastdecode.sworker.model.loader import load_hf_config, load_model

GROUP = 128
Tensors = dict[str, torch.Tensor]


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Random words, or bytes."""
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, dtype=dtype)


def scales(*shape: int) -> torch.Tensor:
    """Of weights that are about as small as those of a model."""
    return torch.rand(shape, dtype=torch.float16) / 512


def awq(name: str, rows: int, columns: int) -> Tensors:
    """4 bits, words along rows."""
    return gptq(name, rows, columns) | {f"{name}.qweight": numbers(columns, rows // 8)}


def gptq(name: str, rows: int, columns: int) -> Tensors:
    """4 bits, words along columns."""
    groups = columns // GROUP
    packed = {"qweight": numbers(columns // 8, rows), "qzeros": numbers(groups, rows // 8)}
    return {f"{name}.{leaf}": each for leaf, each in (packed | {"scales": scales(groups, rows)}).items()}


def int4(name: str, rows: int, columns: int) -> Tensors:
    """compressed-tensors' "pack-quantized"."""
    packed = {"packed": numbers(rows, columns // 8), "scale": scales(rows, columns // GROUP)}
    return {f"{name}.weight_{leaf}": each for leaf, each in (packed | {"shape": torch.tensor([rows, columns])}).items()}


def int8(name: str, rows: int, columns: int) -> Tensors:
    """compressed-tensors' "int-quantized", a scale per row."""
    return {f"{name}.weight": numbers(rows, columns, dtype=torch.int8), f"{name}.weight_scale": scales(rows, 1)}


def fp8(name: str, rows: int, columns: int) -> Tensors:
    """Blocks of 128 by 128."""
    whole = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return {f"{name}.weight": whole, f"{name}.weight_scale_inv": scales(-(-rows // 128), -(-columns // 128)).float()}


def mxfp4(name: str, experts: int, columns: int, rows: int) -> Tensors:
    """Of all experts, blocks of 32."""
    blocks = numbers(experts, rows, columns // 32, 16, dtype=torch.uint8)
    powers = torch.full(blocks.shape[:-1], 120, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": powers}


SIZES = {"vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 16, "head_dim": 64, "tie_word_embeddings": False, "pad_token_id": None}
DENSE = ("qwen2", SIZES | {"intermediate_size": 4096})
EXPERTS = {"moe_intermediate_size": 512, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
DEEPSEEK = ("deepseek_v3", SIZES | EXPERTS | LATENT | {"intermediate_size": 4096, "first_k_dense_replace": 1})
GPT_OSS = ("gpt_oss", SIZES | {"intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2})
INT4 = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}

FORMATS: dict[str, tuple[tuple[str, dict[str, Any]], Callable[..., Tensors] | None, dict[str, Any]]] = {
    "plain": (DENSE, None, {}),
    "plain experts": (DEEPSEEK, None, {}),
    "fp8": (DEEPSEEK, fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "mxfp4": (GPT_OSS, mxfp4, {"quant_method": "mxfp4"}),
    "awq": (DENSE, awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (DENSE, gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "int4": (DENSE, int4, {"quant_method": "compressed-tensors"} | INT4),
    "int8": (DENSE, int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}


def save(name: str, folder: Path, shard: str) -> None:
    """Save a checkpoint of the format ``name``, in files of ``shard`` before their weights are packed."""
    (model_type, sizes), pack, settings = FORMATS[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    if pack is None:
        return
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = packed(name, pack, file)
        save_file(tensors, file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places, "metadata": {}}))
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(described))


def packed(name: str, pack: Callable[..., Tensors], file: Path) -> Tensors:
    """The tensors of one file of a plain checkpoint, random numbers in place of those that the format packs."""
    made: Tensors = {}
    with safe_open(file, "pt") as handle:
        for key in handle.keys():  # noqa: SIM118
            tensor = handle.get_tensor(key)
            packs = ("gate_up_proj", "down_proj") if name == "mxfp4" else ("proj.weight",)
            made |= pack(key.removesuffix(".weight"), *tensor.shape) if key.endswith(packs) else {key: tensor.clone()}
    return made


def status_mib(key: str) -> float:
    """A figure of /proc/self/status in MiB."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else float("nan")


def load(folder: str) -> None:
    """Load in this process and print one line."""
    config = EngineConfig(model=folder, skip_tokenizer_init=True, device="cpu", dtype="bfloat16")
    hf_config = load_hf_config(config)
    with torch.device("meta"):  # the model's code is imported before
        transformers.AutoModelForCausalLM.from_config(hf_config)
    files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 2**20
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    model = load_model(config, hf_config)
    stays = sum(each.numel() * each.element_size() for each in model.parameters()) / 2**20
    peak, after = status_mib("VmHWM") - before, status_mib("VmRSS") - before
    print(f"{files:6.0f} {stays:6.0f} {peak:6.0f} {peak / stays:6.3f} {after / stays:6.3f}", flush=True)


def main() -> None:
    """Print a line per format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS), help="(all)")
    parser.add_argument("--shard", default="64MB", help="files' size in bfloat16 (64MB)")
    parser.add_argument("--save", nargs=2, metavar=("FORMAT", "FOLDER"), help="save a checkpoint in this process")
    parser.add_argument("--load", metavar="FOLDER", help="load one in this process")
    args = parser.parse_args()
    if args.load:
        return load(args.load)
    if args.save:
        return save(args.save[0], Path(args.save[1]), args.shard)
    print(f"{'MiB':13} {'files':>6} {'stays':>6} {'peak':>6} {'/stays':>6} {'after':>6}")
    for name in args.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            own = [sys.executable, __file__, "--shard", args.shard]
            subprocess.run([*own, "--save", name, folder], check=True, stderr=subprocess.DEVNULL)
            print(f"{name:13}", end=" ", flush=True)
            subprocess.run([*own, "--load", folder], check=True, stderr=subprocess.DEVNULL)
    return None


if __name__ == "__main__":
    main()
