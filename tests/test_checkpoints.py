"""Packed checkpoints, as they are published, answer as the same weights unpacked."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import model_zoo
from helpers.tiny_configs import tiny_config
from safetensors.torch import load_file, save_file

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model import checkpoints, loader, unpack
from fastdecode.sworker.model.loader import load_hf_config, load_model
from fastdecode.sworker.model.sharding import Rank, shard

Tensors = dict[str, torch.Tensor]
GROUP = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack columns of integers, several to a word, in plain loops over the places in a word."""
    each = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for column, place in enumerate(order or range(each)):
        packed |= numbers[:, column::each].long() << (bits * place)
    return packed.to(torch.int32) if packed.max() < 2**31 else (packed - ((packed >> 31) << 32)).to(torch.int32)


def drawn(rows: int, groups: int, most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that are exact in bfloat16, and zero points from 1 to ``most`` - 1."""
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.randint(1, 64, (rows, groups), generator=generator) / 512).bfloat16().float()
    return scales, torch.randint(1, most, (rows, groups), generator=generator)


def quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [out, in], scales and zeros [out, groups], and the weight that they stand for."""
    scales, zeros = drawn(weight.shape[0], weight.shape[1] // GROUP, 2**bits, weight.numel())
    wide_scales, wide_zeros = (each.repeat_interleave(GROUP, 1) for each in (scales, zeros))
    numbers = (weight / wide_scales + wide_zeros).round().clamp(0, 2**bits - 1).long()
    return numbers, scales, zeros, (numbers - wide_zeros) * wide_scales


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, plain = quantized(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's packer has column order[i] at place i
    place = tuple(order.index(column) for column in range(8))
    stem = name.removesuffix("weight")
    packed = {
        "qweight": words(numbers.T, 4, place),
        "qzeros": words(zeros.T, 4, place),
        "scales": scales.T.contiguous(),
    }
    return {stem + leaf: each for leaf, each in packed.items()}, plain


def gptq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """With its columns' groups in another order, as `desc_act` has them."""
    numbers, scales, zeros, plain = quantized(weight, 4)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    stem = name.removesuffix("weight")
    packed = {
        "qweight": words(numbers[:, order], 4).T.contiguous(),
        "qzeros": words((zeros - 1).T, 4),
        "scales": scales.T.contiguous(),
        "g_idx": (order // GROUP).int(),
    }
    return {stem + leaf: each for leaf, each in packed.items()}, plain[:, order]


def int4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros, plain = quantized(weight, 4)
    packed = {"_packed": words(numbers, 4), "_scale": scales, "_shape": torch.tensor(weight.shape)}
    return {name + leaf: each for leaf, each in packed.items()} | {
        name + "_zero_point": words(zeros.T, 4).T.contiguous()
    }, plain


def int8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {name: numbers, name + "_scale": scales}, numbers.float() * scales


def fp8(name: str, weight: torch.Tensor, block: tuple[int, int] = (24, 40)) -> tuple[Tensors, torch.Tensor]:
    """In blocks [out, in], which the sizes are no multiples of, or are."""
    high, wide = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales, _ = drawn(high, wide, 4, weight.numel())
    spread = scales.repeat_interleave(block[0], 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {name: numbers, name + "_scale_inv": scales}, numbers.float() * spread


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of experts' weights [experts, in, out], which are packed along in, as [experts, out, in / 32, 16]."""
    turned = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    powers = torch.full(turned.shape[:-1], 125, dtype=torch.uint8)
    numbers = (turned[..., None] * 4 - FP4).abs().argmin(-1)
    blocks = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    plain = (FP4[numbers] / 4).flatten(-2).transpose(1, 2).contiguous()
    return {f"{name}_blocks": blocks, f"{name}_scales": powers}, plain


Format = tuple[str, Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, Any]]
FORMATS: dict[str, Format] = {
    "fp8": ("deepseek_v3", fp8, {"quant_method": "fp8", "weight_block_size": [24, 40]}),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "awq": ("qwen2", awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": ("qwen2", gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "int4": (
        "qwen2",
        int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
    ),
    "int8": ("qwen2", int8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
}
EVEN_FP8: Format = ("deepseek_v3", partial(fp8, block=(8, 8)), {"quant_method": "fp8", "weight_block_size": [8, 8]})
"""transformers unpacks no blocks that the sizes are no multiples of."""
UNPACK_THEMSELVES = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
"""What transformers unpacks on a CPU, without a package of the format's own."""


def saved(kind: str, folder: Path, model_type: str = "", form: Format | None = None) -> tuple[Path, Path]:
    """Save a tiny model packed, by default of the format's own type, and the same weights plain."""
    own_type, pack, settings = form or FORMATS[kind]
    config = tiny_config(model_type or own_type)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain, packed = folder / "plain", folder / "packed"
    model_zoo.randomised(model, 0.15).save_pretrained(plain)
    tensors, parts, rest = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if _is_packed(kind, name, tensor):
            made, tensors[name] = pack(name, tensor)
            parts |= made
        else:
            rest[name] = tensor
    assert len(parts) > 8
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    packed.mkdir()
    index = {}
    for number, part in enumerate((parts, rest)):
        file = f"model-{number}.safetensors"
        save_file(part, packed / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index, "metadata": {}}))
    settings_file = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(settings_file))
    return plain, packed


def _is_packed(kind: str, name: str, tensor: torch.Tensor) -> bool:
    if kind == "mxfp4":
        return name.endswith(("gate_up_proj", "down_proj"))
    return name.endswith("proj.weight") and tensor.ndim == 2 and (kind == "fp8" or tensor.shape[1] % GROUP == 0)


def loaded(folder: Path, **settings: Any) -> Any:
    config = EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, **settings)
    return load_model(config, load_hf_config(config))


LATENT = [(kind, "deepseek_v3") for kind in ("awq", "gptq", "int4", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*((kind, "") for kind in FORMATS), *(pytest.param(*each, marks=pytest.mark.thorough) for each in LATENT)],
)
def test_packed_weights_are_those_unpacked(
    kind: str, model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, in float32 and rounded once in bfloat16, at once and in parts, read one by one and by threads, and a
    rank's part of them."""
    plain, packed = saved(kind, tmp_path, model_type)
    for dtype, part_elements, one_by_one in (("float32", unpack.PART_ELEMENTS, "1"), ("bfloat16", 1 << 11, "0")):
        monkeypatch.setattr(unpack, "PART_ELEMENTS", part_elements)
        monkeypatch.setenv(loader.ONE_BY_ONE[0], one_by_one)
        whole = loaded(plain, dtype=dtype)
        expected = whole.state_dict()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model = loaded(packed, dtype=dtype)
        assert f"weights in {FORMATS[kind][2]['quant_method']} are unpacked to {dtype}" in caplog.text
        found = model.state_dict()
        assert list(found) == list(expected) and not hasattr(model.config, "quantization_config")
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
    for folder, each in ((plain, whole), (packed, model)):
        shard(each, load_hf_config(EngineConfig(model=str(folder))), Rank(1, 2, None))
    assert sum(map(torch.numel, model.parameters())) < sum(map(torch.numel, found.values()))
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("fp8", ""), *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("mxfp4", ""), *LATENT))],
)
def test_packed_weights_answer_as_those_unpacked(kind: str, model_type: str, tmp_path: Path) -> None:
    """Greedily, as transformers does with what it unpacks itself, or else with the weights saved plain."""
    plain, packed = saved(kind, tmp_path, model_type, EVEN_FP8 if kind == "fp8" else None)
    if unpacked := UNPACK_THEMSELVES.get(kind):
        place, settings = packed, {"quantization_config": unpacked(dequantize=True)}
    else:
        place, settings = plain, {}
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **settings).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(128, (length,), generator=generator).tolist() for length in (1, 40, 100)]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    more = {"max_model_len": 256, "kv_cache_memory": "8MiB", "s_threads": 1, "r_threads": 1}
    with LLM(str(packed), device="cpu", skip_tokenizer_init=True, dtype="float32", **more) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(set(each)) > 8 for each in tokens)
    assert [model_zoo.disagreements(model, *pair) for pair in zip(prompts, tokens, strict=True)] == [0] * 3


@pytest.mark.slow
def test_weights_are_unpacked_one_layer_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no two layers are there experts apart at once, and of files no more than the tensors that are under way."""
    monkeypatch.delenv(loader.ONE_BY_ONE[0], raising=False)
    _, packed = saved("fp8", tmp_path)
    mapped: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    made: weakref.WeakKeyDictionary[torch.Tensor, str] = weakref.WeakKeyDictionary()
    layers: list[set[str]] = []

    def map_one(files: Any, name: str, own: Any = checkpoints.Files.read) -> torch.Tensor:
        mapped.add(tensor := own(files, name))
        assert len(mapped) <= 2  # numbers, and their scales
        return tensor

    def make_one(weights: Any, name: str, *parts: str, own: Any = checkpoints.Packed._scaled) -> torch.Tensor:
        made[tensor := own(weights, name, *parts)] = name
        layers.append({each.split(".")[2] for each in made.values() if ".experts." in each})
        return tensor

    monkeypatch.setattr(checkpoints, "MAPPED_BYTES", 1 << 12)
    monkeypatch.setattr(checkpoints.Files, "read", map_one)
    monkeypatch.setattr(checkpoints.Packed, "_scaled", make_one)
    loaded(packed)
    assert not mapped and len(set().union(*layers)) == 3 and max(map(len, layers)) == 1


def test_integers_are_read_as_they_are_packed() -> None:
    """Also where the highest bits make a word negative."""
    numbers = torch.randint(16, (3, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack.integers(words(numbers, 4), 4), numbers.int())
    assert torch.equal(unpack.integers(words(numbers * 16 + 15, 8), 8), (numbers * 16 + 15).int())
    assert unpack.integers(torch.tensor([[-1]], dtype=torch.int32), 2).tolist() == [[3] * 16]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "awq weights with version 'gemv' are not unpacked; gemm",
        ),
        ({"quant_method": "gptq", "bits": 3}, "gptq weights with bits 3 are not unpacked; 2, 4, 8 are"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' are not unpacked; pack"),
    ],
)
def test_other_layouts_are_one_clear_line(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = tiny_config("qwen2").to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        loaded(tmp_path)
