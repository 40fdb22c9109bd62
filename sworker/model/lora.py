"""A LoRA adapter, merged by peft into a model's weights while they are loaded."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.files.weight_files import ADAPTER_FILE, adapter_config, check_file


def merged(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """Return ``model`` with the weights of the LoRA adapter in ``folder`` added.

    Raise ModelLoadError if the folder has no LoRA adapter, or one of another model.
    """
    check_adapter(folder)
    if find_spec("peft") is None:
        raise ModelLoadError("lora_modules: merging an adapter needs peft: pip install 'fastdecode[lora]'")
    from peft import PeftConfig, PeftModel

    try:
        wrapped = PeftModel(model, PeftConfig.from_pretrained(str(folder)))
        found = wrapped.load_adapter(str(folder), "default")
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(other_model(folder, " ".join(str(error).split())[:200])) from None
    strangers = sorted(found.missing_keys) or sorted(found.unexpected_keys)
    if strangers:
        what = "lacks" if found.missing_keys else "has a place for"
        raise ModelLoadError(other_model(folder, f"one of the two {what} {strangers[0]}, among {len(strangers)}"))
    for name, module in wrapped.named_modules():
        if hasattr(getattr(module, "base_layer", None), "token_adapter"):
            raise ModelLoadError(
                f"lora_modules: the adapter in {str(folder)!r} trains single tokens of {name} beside a LoRA of it, "
                "which peft does not merge: train one of the two"
            )
    _part_shared(wrapped)
    _give_biases(wrapped)
    whole: torch.nn.Module = wrapped.merge_and_unload(safe_merge=True)
    for module in whole.modules():
        if isinstance(module, torch.nn.Linear):  # peft saves an LM head with its sizes swapped, like an embedding
            module.out_features, module.in_features = module.weight.shape
    return whole


def _give_biases(wrapped: torch.nn.Module) -> None:
    """Give each layer without a bias a zero bias if the adapter trains one for it (``lora_bias``)."""
    for module in wrapped.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, torch.nn.Linear) and base.bias is None and any(getattr(module, "lora_bias", {}).values()):
            base.bias = torch.nn.Parameter(base.weight.new_zeros(len(base.weight)), requires_grad=False)


def _part_shared(wrapped: Any) -> None:
    """Give an adapted layer its own copy of a weight that it shares with another layer (tied embeddings).

    Merged into a shared weight, an adapter of the LM head would also change the embedding.
    """
    owners = Counter(id(weight) for _, weight in wrapped.named_parameters(remove_duplicate=False))
    for module in wrapped.modules():
        base: Any = getattr(module, "base_layer", None)
        weight = getattr(base, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and owners[id(weight)] > 1:
            base.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
            wrapped.config.get_text_config().tie_word_embeddings = False


def check_adapter(folder: Path) -> None:
    """Raise ModelLoadError for an adapter that cannot be merged, as far as the files in ``folder`` show."""
    if not (folder / ADAPTER_FILE).is_file():
        raise ModelLoadError(f"lora_modules: {str(folder)!r} is no folder with {ADAPTER_FILE}, as peft saves adapters")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelLoadError(
            f"lora_modules: {str(folder)!r} has no adapter_model.safetensors; other forms can hold code"
        )
    check_file(folder / "adapter_model.safetensors")
    config = adapter_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"lora_modules: {str(folder)!r} holds an adapter of type {kind!r}, not LORA")
    # Settings of adapters that cannot be merged into weights, each with the reason
    not_merged = {
        "alora_invocation_tokens": "it counts only after these tokens, and is merged for all: give an adapter without",
        "layer_replication": "it computes layers twice, whose keys and values need caches of their own: save the whole "
        "model with its layers repeated, and give that",
    }
    for name, why in not_merged.items():
        if config.get(name):
            raise ModelLoadError(f"lora_modules: {str(folder)!r} has {name} in its {ADAPTER_FILE}: {why}")


def other_model(folder: Path, why: str) -> str:
    """Return the message that the adapter in ``folder`` does not fit the model."""
    base = adapter_config(folder).get("base_model_name_or_path")
    return f"lora_modules: the adapter in {str(folder)!r} was made for another model (its base is {base!r}): {why}"
