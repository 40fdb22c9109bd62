"""GGUF: one file with the weights, configuration and tokenizer of a model, which transformers unpacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, GgufHeader
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging as transformers_logging

from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.files import gguf_rope
from fastdecode.sworker.files.gguf_config import complete
from fastdecode.sworker.files.weight_files import weights_place
from fastdecode.sworker.model.packing import unpacked


def weights_source(model: str) -> tuple[str, dict[str, Any]]:
    """Return ``weights_place``, and for a GGUF file also arguments that make transformers unpack the weights.

    transformers could keep them packed, but its layers for packed weights bring their own attention and products.
    """
    name, named = weights_place(model)
    return name, named | ({"quantization_config": GgufConfig(dequantize=True)} if named else {})


def check_all_taken(model: Any, name: str) -> None:
    """Raise ModelLoadError if the GGUF file ``name`` has a tensor for which the model has no parameter.

    transformers silently drops such tensors.
    """
    header = GgufHeader.from_file(name)
    if header.architecture in GGUF_CONFIG_ARCHS:  # transformers itself reports these models' unused tensors
        return
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config={})
    # By architecture, tensors that transformers uses and does not list in its map of weights
    taken_aside = {"gpt2": ("output.weight",)}
    taken = {
        *get_gguf_hf_weights_map(model, processor),
        *gguf_rope.TENSORS,
        *taken_aside.get(header.architecture, ()),
    }
    taken |= {f"{each}.weight" for each in taken}  # transformers' map names experts' parameters without this ending
    # Endings of names of tensors that old files contain although the configuration determines them
    computed = ("attn_rot_embd.weight", "rope_freqs.weight")
    left = [each for each in header.ggml_types if each not in taken and not each.endswith(computed)]
    if left:
        raise ModelLoadError(
            f"cannot load {name!r}: transformers' {model.config.model_type} has no parameter for {len(left)} of the "
            f"file's tensors, {left[0]} first, which changes the text: give the folder that the file was made from"
        )


def save_as_safetensors(file: Path, folder: Path) -> None:
    """Save a GGUF file in ``folder`` as a transformers model in bfloat16."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        name, named = weights_place(str(file))
        AutoTokenizer.from_pretrained(name, **named).save_pretrained(folder)
        name, named = weights_source(str(file))
        hf_config = AutoConfig.from_pretrained(name, gguf_file=file.name)
        complete(hf_config, file)
        loaded = AutoModelForCausalLM.from_pretrained(name, config=hf_config, dtype=torch.float32, **named)
        unpacked(loaded).to(torch.bfloat16).save_pretrained(folder)
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
