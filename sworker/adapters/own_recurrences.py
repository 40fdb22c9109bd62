"""Adapters for recurrences that are methods of modules: lightning attention (MiniMax) and the RG-LRU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastdecode.sworker.adapters.states import Recurrence, advance, as_heads, convolved, payload, replace


def _lightning_attention(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Let the R-worker compute MiniMax's linear attention: a scan with a constant decay per head."""
    heads, dim = self.num_attention_heads, self.head_dim
    rows = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * dim))
    query, key, value = rows.split(dim, -1)
    decays = -self.slope_rate.flatten().expand(1, len(rows[0]), heads)
    out = advance(
        payload((value, key, query), (decays, torch.ones_like(decays))),
        Recurrence("scan", None, heads, dim, heads, dim, 1),
    )
    out = self.norm(out.flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


def _linear_recurrence(
    self: Any, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Let the R-worker compute the RG-LRU of ``hidden_states`` [1, T, channels]; ``recurrent_gate`` sets decays."""
    heads, dim = as_heads(hidden_states.shape[2])
    rows = payload((hidden_states,), (recurrent_gate,))
    return advance(rows, Recurrence("lru", None, heads, dim, 0, 1)).flatten(2), None


class _Convolved(nn.Module):
    """A depthwise convolution [1, channels, T] whose forward sends rows to R-workers, which convolve them."""

    def __init__(self, own: nn.Conv1d) -> None:
        super().__init__()
        self.weight, self.bias = own.weight, own.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return convolved(hidden_states, self.weight.squeeze(1), self.bias)


def use_own_recurrences(model: nn.Module) -> bool:
    """Let R-workers compute recurrences that ``model``'s modules implement as methods; return False if it has none."""
    # By class name in transformers: the method that computes a recurrence, and our replacement of the method
    methods = {
        "MiniMaxLightningAttention": ("forward", _lightning_attention),
        "RecurrentGemmaRglru": ("_rnn_scan", _linear_recurrence),
    }
    # By class name in transformers: the attribute that holds a convolution
    convolutions = {"RecurrentGemmaRecurrentBlock": "conv_1d"}
    found = [each for each in model.modules() if type(each).__name__ in {*methods, *convolutions}]
    for each in found:
        name = type(each).__name__
        if name in methods:
            replace(type(each), *methods[name])
        else:
            setattr(each, convolutions[name], _Convolved(getattr(each, convolutions[name])))
    return bool(found)
