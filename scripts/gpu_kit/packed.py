"""Part e: checkpoints in int4 and FP8, made here, stay packed and give the same tokens as unpacked weights."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fastdecode import LLM, SamplingParams
from fastdecode.sworker.model.held import bits_of
from gpu_kit.models import engine_settings, prompts, tiny_model
from gpu_kit.rows import Part, part_of_arguments

GROUP, BLOCK = 32, 32
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
Made = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The packed tensors of a weight, and the weight that they stand for."""


def main() -> None:
    part = part_of_arguments()
    for kind in FORMATS:
        part.tried(f"{kind}, a checkpoint", lambda kind=kind: checkpoint(part, kind))
    for kind in ("int4", "int8"):
        part.tried(f"--quantization {kind}", lambda kind=kind: quantized(part, kind))


def checkpoint(part: Part, kind: str) -> None:
    """Add the rows of one packed format."""
    with tempfile.TemporaryDirectory() as name:
        plain, packed, method = save(kind, Path(name))
        settings = engine_settings(part.device, dtype="float32" if kind == "int4" else "bfloat16")
        said = Said()
        logging.getLogger("fastdecode").addHandler(said)
        found, bits = texts(packed, settings | ({} if part.on_gpu else {"quantization": method}))
        logging.getLogger("fastdecode").removeHandler(said)
        wanted, _ = texts(plain, settings)
        same = sum(one == other for pair in zip(found, wanted, strict=True) for one, other in zip(*pair, strict=True))
        line = next((line.partition(": ")[2] for line in said.lines if "packed" in line), "nothing was said")
        part.add(f"{kind}, bits of a weight in memory", round(bits, 2), "", line)
        note = "must be 1" if kind == "int4" else "the GPU's FP8 products round rows too"
        share = round(same / sum(map(len, wanted)), 3)
        part.add(
            f"{kind}, packed against unpacked", share, "of tokens are the same", note, 1.0 if kind == "int4" else None
        )


def quantized(part: Part, kind: str) -> None:
    """Add a row of plain weights that torchao packs while loading.
    On a CPU, int8 weights are multiplied as integers.
    """
    if not part.on_gpu and kind == "int4":
        part.add("--quantization int4", None, note="it is torchao's, for a GPU")
        return
    with tempfile.TemporaryDirectory() as name:
        tiny_model("llama").save_pretrained(name)
        wanted, _ = texts(Path(name), engine_settings(part.device, dtype="bfloat16"))
        found, bits = texts(Path(name), engine_settings(part.device, dtype="bfloat16", quantization=kind))
    firsts = sum(one[0] == other[0] for one, other in zip(found, wanted, strict=True))
    note = f"bits of a weight {bits:.2f}" if part.on_gpu else "products of integers"
    part.add(f"--quantization {kind}", f"{firsts} of {len(wanted)}", "first tokens are bfloat16's", note)


class Said(logging.Handler):
    """A log handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def texts(folder: Path, settings: dict[str, Any]) -> tuple[list[list[int]], float]:
    """Return the greedy tokens after each prompt, and the number of bits of a packed weight in memory."""
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(folder), **settings) as llm:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        bits = bits_of(llm.llm_engine.s_model.model)
    return [list(output.outputs[0].token_ids) for output in outputs], bits


def save(kind: str, folder: Path) -> tuple[Path, Path, str]:
    """Save a tiny Llama with packed weights, and with the same weights unpacked; return both folders and the format."""
    pack, settings = FORMATS[kind]
    plain, packed = folder / "plain", folder / "packed"
    tiny_model("llama").save_pretrained(plain)
    packed.mkdir()
    tensors, parts = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            made, tensors[name] = pack(name, tensor)
            parts |= made
        else:
            parts[name] = tensor
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    save_file({name: each.contiguous() for name, each in parts.items()}, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed, str(settings["quant_method"])


def int4(name: str, weight: torch.Tensor) -> Made:
    """Pack a weight as compressed-tensors' "pack-quantized": eight numbers per word, a scale per group of columns."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).bfloat16().float()
    numbers = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1)
    shifts = 4 * torch.arange(8)
    words = ((numbers.long() + 8).unflatten(1, (-1, 8)) << shifts).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    packed = {"_packed": words, "_scale": scales, "_shape": torch.tensor(weight.shape)}
    wide = scales.repeat_interleave(GROUP, 1)
    return {name + leaf: each for leaf, each in packed.items()}, numbers * wide


def fp8(name: str, weight: torch.Tensor) -> Made:
    """Pack a weight in FP8 as DeepSeek publishes it: a scale per block."""
    blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = (blocks.abs().amax((1, 3)) / 448).bfloat16().float()
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scales}, numbers.float() * wide


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"],
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
Pack = Callable[[str, torch.Tensor], Made]
FORMATS: dict[str, tuple[Pack, dict[str, Any]]] = {"int4": (int4, INT4), "fp8": (fp8, FP8)}


if __name__ == "__main__":
    main()
