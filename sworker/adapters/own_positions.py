"""Llama 4's layers without rotary embeddings, which scale their queries by positions that they count themselves.

They count from the tokens that their cache says it holds. Rows of many sequences lie side by side here, each at its own
position, and the S-worker holds no cache: so a stand-in for one tells what makes the count come to those positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama4 import modeling_llama4 as llama4


class _Places:
    """Stands in for the cache of a forward whose rows are at ``positions`` [1, T]; it keeps nothing."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions[0]

    def get_seq_length(self, layer: int) -> torch.Tensor:
        """Return what each row's number lacks of its position, int64 [T]."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' own."""
        return keys, values


class Llama4TextDecoderLayer(llama4.Llama4TextDecoderLayer):
    """The model's own, whose attention counts to the positions that it was given."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """``hidden_states`` [1, T, hidden] at ``position_ids`` [1, T] → the same, through the layer."""
        places: Any = _Places(position_ids)
        return super().forward(hidden_states, attention_mask, position_ids, places, **kwargs)


def use_given_positions(model: torch.nn.Module) -> None:
    """Give the layers of a loaded model their adapter."""
    for module in model.modules():
        if type(module) is llama4.Llama4TextDecoderLayer:
            module.__class__ = Llama4TextDecoderLayer
