"""Attention weights as transformers' own attention computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


@torch.no_grad()
def attentions(model: Any, token_ids: Sequence[int]) -> list[np.ndarray]:
    """Return the weights of each attending layer, float32 [heads, tokens, tokens], without the sinks' column."""
    found = model(torch.tensor([list(token_ids)]), use_cache=False, output_attentions=True).attentions
    return [each[0].float().numpy()[..., : len(token_ids)] for each in found if each is not None]


def block_weights(layers: Sequence[np.ndarray], position: int, block: int) -> np.ndarray:
    """Return the weights of blocks for the row at ``position``: the mean over heads, then over ``layers``."""
    weights = np.mean([each[:, position, : position + 1].astype(np.float64).mean(0) for each in layers], axis=0)
    return np.add.reduceat(weights, np.arange(0, position + 1, block))


def told_weights(sources: Sequence[tuple[int, int, float]], num_tokens: int, block: int) -> np.ndarray:
    """Return the weights of all blocks that an output reports; they must cover ``num_tokens`` tokens."""
    weights = np.zeros(-(-num_tokens // block))
    for first, last, weight in sources:
        assert first % block == 0
        assert last == min(first + block, num_tokens) - 1
        assert weights[first // block] == 0, "each block once"
        weights[first // block] = weight
    assert [each[2] for each in sources] == sorted((each[2] for each in sources), reverse=True)
    return weights
