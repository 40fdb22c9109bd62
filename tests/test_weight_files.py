"""A checkpoint's files: tensors that are missing, short or left over are named."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model.loader import load_hf_config, load_model

SECOND = "model-00002-of-00002.safetensors"
Q = "model.layers.0.self_attn.q_proj"


def load(folder: Path, **settings: Any) -> Any:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings)
    return load_model(config, load_hf_config(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Set tensors of a checkpoint, or remove them."""
    file = folder / "model.safetensors"
    found: dict[str, Any] = load_file(file) | tensors
    save_file({name: each for name, each in found.items() if each is not None}, file, metadata={"format": "pt"})


def in_shards(folder: Path) -> Path:
    """Split the checkpoint into two files and an index; return the second."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        here = {name: each for name, each in tensors.items() if places[name] == file}
        save_file(here, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder / SECOND


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1000\n"
BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is gone": (lambda folder: in_shards(folder).unlink(), f"{SECOND} is missing, which .*index.json names"),
    "a shard is short": (
        lambda folder: os.truncate(in_shards(folder), 3000), f"{SECOND} is no complete safetensors file: fetch it",
    ),
    "a shard is empty": (lambda folder: in_shards(folder).write_bytes(b""), f"{SECOND} is no complete safetensors"),
    "a shard is a pointer": (
        lambda folder: in_shards(folder).write_bytes(POINTER), f"{SECOND} is a pointer of Git LFS .* run git lfs pull",
    ),
    "the index is cut": (
        lambda folder: in_shards(folder).with_name("model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json is no index of safetensors files",
    ),
    "the only file is short": (
        lambda folder: os.truncate(folder / "model.safetensors", 3000), "model.safetensors is no complete safetensors",
    ),
    "a tensor is missing": (lambda folder: change(folder, **{f"{Q}.weight": None}), f"1 tensors are missing, {Q}"),
    "a tensor has another shape": (
        lambda folder: change(folder, **{f"{Q}.weight": torch.ones(16, 32)}), rf"{Q}.weight has the shape \(16, 32\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), BREAKAGES.values(), ids=BREAKAGES)
def test_what_is_broken_is_named(damage: Callable[[Path], Any], reason: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelLoadError, match=reason):
        load(folder)


def test_tensors_that_no_parameter_takes_are_named_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(folder)
        assert not caplog.records
        change(folder, **{f"{Q}.bias": torch.ones(32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
        load(folder)
        (record,) = caplog.records
        assert record.getMessage().endswith(f"1 of the checkpoint's tensors, which stay unused: {Q}.bias")
        caplog.clear()
        load(folder, hf_overrides={"num_hidden_layers": 1})
        assert not caplog.records, "the user has asked for a part"


def test_shards_load_where_all_are_whole(folder: Path) -> None:
    wanted = load(folder).state_dict()
    in_shards(folder)
    found = load(folder).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
