"""Adapter for Llama 4's layers without rotary embeddings, which scale queries by their positions.

The model's code counts positions up from the number of tokens in its cache. Here rows of many sequences are packed,
each at its own position, and the S-worker has no cache. So a stand-in for the cache gives each row an offset that makes
the counted position right.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama4 import modeling_llama4 as llama4


class _Places:
    """A stand-in for a forward's KV cache that keeps nothing. The rows are at ``positions`` [1, T]."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions[0]

    def get_seq_length(self, layer: int) -> torch.Tensor:
        """Return each row's position minus its index, int64 [T]."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``keys`` and ``values`` unchanged, as if the cache had been empty."""
        return keys, values


class Llama4TextDecoderLayer(llama4.Llama4TextDecoderLayer):
    """The model's own decoder layer, whose attention uses the given positions instead of counting."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the layer's output for ``hidden_states`` [1, T, hidden] at ``position_ids`` [1, T]."""
        places: Any = _Places(position_ids)
        return super().forward(hidden_states, attention_mask, position_ids, places, **kwargs)


def use_given_positions(model: torch.nn.Module) -> None:
    """Replace Llama 4's decoder layers in ``model`` by ``Llama4TextDecoderLayer``."""
    for module in model.modules():
        if type(module) is llama4.Llama4TextDecoderLayer:
            module.__class__ = Llama4TextDecoderLayer
