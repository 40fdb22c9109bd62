"""Published packed checkpoints answer like the same weights unpacked."""

from __future__ import annotations

import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import model_zoo
from helpers.packed_checkpoints import EVEN_FP8, FORMATS, saved, words
from helpers.tiny_configs import tiny_config

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model import checkpoints, loader, unpack
from fastdecode.sworker.model.loader import load_hf_config, load_model
from fastdecode.sworker.model.sharding import Rank, shard

UNPACK_THEMSELVES = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
"""Formats that transformers unpacks on a CPU without a further package."""


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
    """Unpacked weights are equal bit by bit.

    They are compared in float32 and rounded to bfloat16, at once and in parts, read singly and by threads, and as a
    rank's part.
    """
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
    """Greedy answers equal those of transformers' own unpacking, or else those of the weights saved plain."""
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
    """Only one layer's experts are unpacked at a time, and only the tensors in use are read from files."""
    monkeypatch.delenv(loader.ONE_BY_ONE[0], raising=False)
    _, packed = saved("fp8", tmp_path)
    mapped: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    made: weakref.WeakKeyDictionary[torch.Tensor, str] = weakref.WeakKeyDictionary()
    layers: list[set[str]] = []

    def map_one(files: Any, name: str, own: Any = checkpoints.Files.read) -> torch.Tensor:
        mapped.add(tensor := own(files, name))
        assert len(mapped) <= 2  # The two are the numbers and their scales.
        return tensor

    def make_one(weights: Any, name: str, own: Any = checkpoints.Packed._made) -> torch.Tensor:
        made[tensor := own(weights, name)] = name
        layers.append({each.split(".")[2] for each in made.values() if ".experts." in each})
        return tensor

    monkeypatch.setattr(checkpoints, "MAPPED_BYTES", 1 << 12)
    monkeypatch.setattr(checkpoints.Files, "read", map_one)
    monkeypatch.setattr(checkpoints.Packed, "_made", make_one)
    loaded(packed)
    assert not mapped and len(set().union(*layers)) == 3 and max(map(len, layers)) == 1


def test_integers_are_read_as_they_are_packed() -> None:
    """Packed integers are right also where the highest bits make a word negative."""
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
