"""A model's first layers, norm and head as a separate model that shares all weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastdecode.core.errors import ConfigError, UnsupportedModelError
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.support import probe_layers


def first_layers(code: ModelCode, hf_config: Any, layout: KVLayout, num_layers: int) -> ModelCode:
    """Return the code of a model that has only the first ``num_layers`` layers of ``code``, with its norm and head.

    ``code`` is not changed. ``layout``: the whole model's. Raise ConfigError if the model has at most ``num_layers``
    layers. Raise UnsupportedModelError if its layers cannot be found, or do not run without the later ones.
    """
    most = int(hf_config.get_text_config().num_hidden_layers)
    if num_layers >= most:
        what = f"must be from 1 to {most - 1} for this model, which has {most} layers" if most > 1 else "has no place"
        raise ConfigError(f"speculative_config: num_layers {what}, not {num_layers}")
    places = [
        name
        for name, module in code.module.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == most
    ]
    probed = layout.with_state_dtype(
        "float32"
        # The layers as a trial forward finds them, with float32 states. Each is an attention call, not a decoder layer.
    ).layers
    for name in places:
        view = code.of(_cut(code.module, name.split("."), num_layers))
        try:
            found = probe_layers(view, hf_config)
        except UnsupportedModelError:
            continue  # list ``name`` holds modules other than decoder layers, or the model needs all of its layers
        if 0 < len(found) < len(probed) and found == probed[: len(found)]:
            return view
    raise UnsupportedModelError(
        f"speculative_config: early_exit finds no list of {most} layers in {hf_config.model_type} of which the first "
        f"{num_layers} run alone; use ngram or draft_model"
    )


def _cut(module: torch.nn.Module, path: list[str], num_layers: int) -> torch.nn.Module:
    view = copy.copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    if path:
        view._modules[path[0]] = _cut(getattr(module, path[0]), path[1:], num_layers)
    else:
        view.__dict__["_modules"] = dict(list(module._modules.items())[:num_layers])
    return view
