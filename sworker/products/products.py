"""int8 products of a whole model: weights are quantized at loading, and packed once they are on their device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fastdecode.sworker.model.kept import KeptLinear
from fastdecode.sworker.model.packed_weight import PackedWeight
from fastdecode.sworker.products.codes import codes_of
from fastdecode.sworker.products.experts import pack_experts, quantize_experts
from fastdecode.sworker.products.gated import GatedLayers
from fastdecode.sworker.products.layers import LayersInTwoCalls
from fastdecode.sworker.products.linears import IntegerLinears, expert_counts, num_attention_heads, quantize_linears
from fastdecode.sworker.products.loading import ExpertsConfig
from fastdecode.sworker.products.ordered import order_products


def loading_arguments(hf_config: Any) -> dict[str, Any]:
    """Return arguments for ``from_pretrained`` that quantize experts as they are read; {} for a model without."""
    return {"quantization_config": ExpertsConfig()} if expert_counts(hf_config) else {}


def quantize(
    model: torch.nn.Module,
    hf_config: Any,
    published: Mapping[str, Any],
    dtype: torch.dtype,
    keeps_plain: bool = False,
) -> None:
    """Quantize the linear layers and experts of ``model`` to int8.

    ``published``: the checkpoint's own int8 weights. ``dtype``: that to which packed weights are first unpacked.
    ``keeps_plain``: see ``quantize_linears``.
    """
    restore_linears(model, dtype)
    quantize_linears(model, hf_config, published, keeps_plain)
    unpack_unquantized(model)
    quantize_experts(model, num_attention_heads(hf_config))


class IntegerProducts:
    """Packs the int8 weights of a quantized model, and lets its small float products add in a fixed order."""

    def __init__(self, model: torch.nn.Module, hf_config: Any) -> None:
        self._model, self._linears = model, IntegerLinears(model)
        if pack_experts(model) or self._linears.num_layers:
            order_products(model, hf_config)

    def replaced_layers(self) -> list[GatedLayers | LayersInTwoCalls]:
        """Replace the ``forward`` of gated layers, then of whole decoder layers; return what can restore them.

        The norms and rotary embeddings of the model must have been replaced before.
        """
        gated = GatedLayers(self._model, self._linears.products)
        return [gated, LayersInTwoCalls(self._model, self._linears, gated)]


def restore_linears(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replace every ``KeptLinear`` by an ``nn.Linear`` of ``dtype`` that still holds only the packed weight.

    Each read of ``weight`` unpacks it.
    """
    for name, kept in [each for each in model.named_modules() if isinstance(each[1], KeptLinear)]:
        with torch.device("meta"):
            linear = torch.nn.Linear(kept.in_features, kept.out_features, bias=False, dtype=dtype)
        linear.weight = PackedWeight.of(linear.weight, partial(kept.unpacked, dtype))
        linear.bias = kept.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, linear.eval())


def unpack_unquantized(model: torch.nn.Module) -> None:
    """Unpack the weights of linear layers that stay unquantized."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, PackedWeight) and not codes_of(module):
            module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
