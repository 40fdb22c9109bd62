"""Adds a LoRA adapter to a vLLM module by vLLM's own manager, so that packed weights can have one too.

The manager wraps the adapted layers and deals an adapter to tensor-parallel ranks. An engine has one adapter, which all
rows of a forward get. So nothing maps rows to adapters, as vLLM does for one forward at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.files.weight_files import adapter_config
from fastdecode.sworker.model.loader import auto_class
from fastdecode.sworker.model.lora import other_model
from fastdecode.sworker.model.refusals import one_line


class AllRows:
    """Adds the adapter in slot 0 to all rows, in place of vLLM's ``PunicaWrapper``."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        downs: Sequence[torch.Tensor],
        ups: Sequence[torch.Tensor],
        scale: float,
        widths: Sequence[int],
        **_: Any,
    ) -> torch.Tensor:
        """Add the products of ``x`` [T, inputs] to ``y`` [T, outputs], whose parts have ``widths`` outputs.

        For each part, ``downs`` is [slots, 1, rank, inputs] and ``ups`` is [slots, 1, outputs, rank].
        """
        for part, down, up in zip(y.split(list(widths), 1), downs, ups, strict=True):
            part.add_((x @ down[0, 0].T) @ up[0, 0].T, alpha=scale)
        return y

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float, **_: Any
    ) -> torch.Tensor:
        """Add the LM head's products of ``x`` [T, inputs] to logits ``y``, which may end in padded columns."""
        return self.add_lora_linear(y[:, : up.shape[2]], x, (down,), (up,), scale, (up.shape[2],))


def add_adapter(module: Any, folder: Path, vllm_config: Any, hf_config: Any) -> None:
    """Add the adapter in ``folder`` to the layers of ``module``. Raise ModelLoadError if vLLM cannot add all of it."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.models import supports_lora

    adapted = _adapted_layers(folder, hf_config)
    if not supports_lora(module):
        raise ModelLoadError(f"lora_modules: vLLM adds no adapters to {type(module).__name__}")
    device = torch.device(vllm_config.device_config.device)
    try:
        vllm_config.lora_config = _lora_config(adapted, module, folder, vllm_config.model_config)
        worker = WorkerLoRAManager(vllm_config, device, getattr(module, "embedding_modules", {}))
        worker.create_lora_manager(module, vllm_config)
        worker.add_adapter(LoRARequest("adapter", 1, str(folder)))
    except (AssertionError, AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"lora_modules: vLLM refuses the adapter in {str(folder)!r}: {one_line(error)}") from error
    manager = worker._adapter_manager
    lora = manager.get_adapter(1)
    used = {id(manager._get_lora_layer_weights(lora, name)) for name in manager.modules}
    if strays := [name for name, each in lora.loras.items() if id(each) not in used]:
        raise ModelLoadError(other_model(folder, f"vLLM's code has no place for {strays[0]}, among {len(strays)}"))
    for layer in manager.modules.values():
        layer.set_mapping(AllRows())


def _lora_config(adapted: set[str], module: Any, folder: Path, model_config: Any) -> Any:
    """Return vLLM's configuration of one adapter of the layers ``adapted``; other layers stay as they are.

    vLLM makes a module without this configuration, since experts would otherwise use kernels for adapters of theirs.
    """
    from vllm.config.lora import LoRAConfig

    config, packed = adapter_config(folder), getattr(module, "packed_modules_mapping", {})
    joined = {part: whole for whole, parts in packed.items() for part in parts}
    names = {name.rpartition(".")[2] for name in adapted}
    needed = max([int(config.get("r", 8)), *(config.get("rank_pattern") or {}).values()])
    # vLLM allots memory for these ranks only, and refuses an adapter of more
    rank = next((each for each in (8, 16, 32, 64, 128, 256, 320) if each >= needed), 512)
    targets = sorted({joined.get(name, name) for name in names})
    found = LoRAConfig(max_lora_rank=rank, max_loras=1, target_modules=targets)
    found.verify_with_model_config(model_config)
    return found


def _adapted_layers(folder: Path, hf_config: Any) -> set[str]:
    """Return the names of the linear layers that the adapter changes.

    Raise ModelLoadError for a layer that the model lacks or that has another size: vLLM would leave it out or pad it.
    """
    with torch.device("meta"):
        layers = dict(auto_class(hf_config.model_type).from_config(hf_config).named_modules())
    names = set()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for tensor in file.keys():  # noqa: SIM118 (not a mapping)
            name, _, part = tensor.removeprefix("base_model.model.").partition(".lora_")
            layer, shape = layers.get(name), file.get_slice(tensor).get_shape()
            if part not in ("A.weight", "B.weight") or not isinstance(layer, torch.nn.Linear):
                raise ModelLoadError(other_model(folder, f"{tensor} belongs to no linear layer of the model"))
            if (shape[1] if part == "A.weight" else shape[0]) != layer.weight.shape[part == "A.weight"]:
                raise ModelLoadError(other_model(folder, f"{tensor} has another size than the layer"))
            names.add(name)
    if "lm_head" in names and hf_config.get_text_config().tie_word_embeddings:
        raise ModelLoadError("lora_modules: vLLM adds no adapter to an LM head that shares the embedding's weight")
    return names


def adapted_digest(digest: str, folder: Path) -> str:
    """Return a hash of the weights with ``digest`` and of the adapter in ``folder``."""
    adapter = (folder / "adapter_model.safetensors").read_bytes()
    return hashlib.sha256(f"{digest} {adapter_config(folder)}".encode() + adapter).hexdigest()
