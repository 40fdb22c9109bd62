"""An adapter merged at load answers as peft and transformers do, under its own name; errors are one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo
from helpers.servers import serving
from transformers import AutoModelForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.sworker.files.weight_files import check_not_adapted
from fastdecode.sworker.model.loader import load_hf_config, load_model

peft = pytest.importorskip("peft")

Change = Callable[[Path, Path], Any]


def save_adapter(model: Any, folder: Path) -> Any:
    """Save a random adapter, large enough to change the answers; return the model with it, unmerged."""
    torch.manual_seed(1)
    modules = ["q_proj", "v_proj", "down_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=modules, init_lora_weights=False)
    tuned = peft.get_peft_model(model, settings)
    tuned.save_pretrained(folder)
    return tuned.eval()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of a tiny model and of an adapter for it."""
    model_zoo.save_model("qwen3", tmp_path / "base")
    save_adapter(model_zoo.build_model("qwen3"), tmp_path / "tuned")
    return tmp_path / "base", tmp_path / "tuned"


def load(base: Path, *modules: str) -> Any:
    config = EngineConfig(model=str(base), device="cpu", lora_modules=list(modules))
    return load_model(config, load_hf_config(config))


def test_the_weights_are_those_that_peft_merges(folders: tuple[Path, Path]) -> None:
    base, tuned = folders
    found = load(base, f"tuned={tuned}").state_dict()
    with_adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tuned)
    wanted = with_adapter.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not torch.equal(found["model.layers.0.self_attn.q_proj.weight"], plain(base))


def test_an_adapter_beside_the_weights_is_refused(folders: tuple[Path, Path]) -> None:
    """A model with an unmerged adapter, as transformers loads it for an adapter's id, is refused."""
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    model.load_adapter(str(folders[1]))
    with pytest.raises(ModelLoadError, match="the model is a LoRA adapter: give its base, and --lora-modules"):
        check_not_adapted(model)


def plain(base: Path) -> torch.Tensor:
    weights: torch.Tensor = load(base).state_dict()["model.layers.0.self_attn.q_proj.weight"]
    return weights


@pytest.mark.thorough
def test_it_is_served_by_its_name_by_all_ranks_and_prefill_workers(tmp_path: Path) -> None:
    """Ranks and prefill workers merge the adapter too, and vLLM's flags for adapters are accepted."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tuned, prompt = save_adapter(model, tmp_path / "tuned"), [11, 40, 7, 90, 23]
    wanted = tuned.generate(input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    flags = ["--lora-modules", f"tuned={tmp_path / 'tuned'}", "--enable-lora", "--max-lora-rank", "16"]
    flags += ["--tensor-parallel-size", "2", "--prefill-workers", "spawn:1", "--prefill-threads", "1"]
    with serving(tmp_path, *flags, "--dtype", "float32") as running:
        (card,) = running.request("/v1/models")[1]["data"]
        assert (card["id"], card["parent"], card["root"]) == ("tuned", str(DEMO_MODEL), str(tmp_path / "tuned"))
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        _, answer = running.request("/v1/completions", {"model": "tuned", **asked})
        assert answer["choices"][0]["token_ids"] == wanted.tolist()
        assert running.request("/v1/completions", {"model": str(DEMO_MODEL), **asked})[0] == 404


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _other_base(**changes: Any) -> Change:
    return lambda base, _: model_zoo.build_model("qwen3", **changes).save_pretrained(base)


BREAKAGES: dict[str, tuple[Change, str]] = {
    "no folder": (lambda _, tuned: shutil.rmtree(tuned), "is no folder with adapter_config.json"),
    "pickled": (
        lambda _, tuned: (tuned / "adapter_model.safetensors").rename(tuned / "adapter_model.bin"),
        "no adapter_model.safetensors; other forms can hold code",
    ),
    "no LoRA": (lambda _, tuned: _edit(tuned, peft_type="LOHA"), "an adapter of type 'LOHA', not LORA"),
    "no JSON": (lambda _, tuned: (tuned / "adapter_config.json").write_text("{"), "not a readable JSON file"),
    "more layers": (_other_base(num_hidden_layers=4), "made for another model .* lacks .*layers.3.*, among 6"),
    "fewer layers": (_other_base(num_hidden_layers=2), "made for another model .* has a place for .*layers.2"),
    "wider": (_other_base(hidden_size=128), "made for another model .*size mismatch"),
    "other modules": (
        lambda base, _: (shutil.rmtree(base), model_zoo.save_model("gpt_bigcode", base)),
        "made for another model .*Target modules",
    ),
    "an adapter as the model": (
        lambda base, tuned: (shutil.rmtree(base), shutil.copytree(tuned, base)),
        "it holds a LoRA adapter .*, without a model: give --model .* --lora-modules NAME=",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BREAKAGES.values(), ids=BREAKAGES)
def test_what_cannot_be_merged_is_one_clear_line(change: Change, reason: str, folders: tuple[Path, Path]) -> None:
    base, tuned = folders
    change(base, tuned)
    with pytest.raises(ModelLoadError, match=reason) as found:
        load(base, f"tuned={tuned}")
    assert "\n" not in str(found.value)


def test_one_adapter_with_a_name_is_asked_for() -> None:
    assert EngineConfig(lora_modules=["a=x=y"]).lora == ("a", "x=y") and EngineConfig().lora is None
    with pytest.raises(ConfigError, match=r"one adapter .* not 2 \(a=x, b=y\): start an engine for each"):
        EngineConfig(lora_modules=["a=x", "b=y"])
    for wrong in ("folder", "=folder", "name="):
        with pytest.raises(ConfigError, match=f"must be NAME=FOLDER, not '{wrong}'"):
            EngineConfig(lora_modules=[wrong])
