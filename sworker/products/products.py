"""Integer products of a whole model: quantised while it is loaded, and packed once it is cut and placed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastdecode.sworker.products.experts import pack_experts, quantize_experts
from fastdecode.sworker.products.gated import GatedLayers
from fastdecode.sworker.products.linears import IntegerLinears, num_attention_heads, quantize_linears
from fastdecode.sworker.products.ordered import order_products


def quantize(model: torch.nn.Module, hf_config: Any, published: Mapping[str, Any]) -> None:
    """Give the linear layers and experts of ``model`` integer codes; ``published``: the checkpoint's own codes."""
    quantize_linears(model, hf_config, published)
    quantize_experts(model, num_attention_heads(hf_config))


class IntegerProducts:
    """The packed integer products of a quantised model, whose small float products multiply in one order."""

    def __init__(self, model: torch.nn.Module, hf_config: Any) -> None:
        self._model, self._linears = model, IntegerLinears(model)
        if pack_experts(model) or self._linears.num_layers:
            order_products(model, hf_config)

    def gated_layers(self) -> GatedLayers:
        """Replace gated layers by two calls each; return the replaced layers."""
        return GatedLayers(self._model, self._linears)
