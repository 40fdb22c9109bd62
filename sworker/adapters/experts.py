"""Mixtures of experts on the CPU: transformers' grouped products, padded so that each expert gets enough rows.

torch's product rounds a row differently if an expert has few rows, and routing decides how many rows an expert has.
Without padding, a sequence's bits would thus depend on the other sequences in the batch. So each expert gets rows of
zeros, up to a number of rows at which a trial found the same bits as with many.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

EXPERTS_NAME = "fastdecode"
"""The ``experts_implementation`` under which models call :func:`experts_forward`."""


def use_padded_experts(model: torch.nn.Module) -> None:
    """Make the experts of ``model`` use :func:`experts_forward` in place of transformers' grouped products."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = EXPERTS_NAME


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return each row's weighted sum of its experts' outputs, [rows, hidden]; ``top_k_index``: int64 [rows, k]."""
    k = top_k_index.shape[1]
    counts = torch.bincount(top_k_index.reshape(-1), minlength=experts.num_experts)
    sizes = tuple(next(experts.parameters()).shape[-2:])
    least, multiple = row_counts(hidden_states.dtype, sizes, torch.get_num_threads())
    wanted = (counts.clamp(min=least) + multiple - 1) // multiple * multiple
    added = torch.repeat_interleave(torch.arange(len(counts)), (wanted - counts) * (counts > 0))
    if not len(added):
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    # Each padding row needs k experts, so k must divide the number of entries: the last expert gets additional ones
    rest = next(number for number in range(0, multiple * k, multiple) if (len(added) + number) % k == 0)
    added = torch.cat([added, added[-1:].expand(rest)]).reshape(-1, k)
    output = grouped_mm_experts_forward(
        experts,
        torch.cat([hidden_states, hidden_states.new_zeros(len(added), hidden_states.shape[1])]),
        torch.cat([top_k_index, added]),
        torch.cat([top_k_weights, top_k_weights.new_zeros(added.shape)]),
    )
    return output[: len(hidden_states)]


@functools.cache
def row_counts(dtype: torch.dtype, sizes: tuple[int, int], num_threads: int) -> tuple[int, int]:
    """Return (least, multiple): products of n · ``multiple`` ≥ ``least`` rows give each row the same bits, for any n.

    ``sizes``: shape of the weight. Threads share the rows; in float32, a thread with fewer than 4 rounds differently.
    """
    generator = torch.Generator()
    most = 40  # most rows to try; with more, each thread has enough rows
    rows = torch.randn(4 * most, sizes[0], generator=generator).to(dtype)
    weight = torch.randn(sizes, generator=generator).to(dtype)
    found = rows @ weight
    repeats = [torch.equal(rows[:count].contiguous() @ weight, found[:count]) for count in range(most)]
    ways = ((8, 1), (8, 4), (16, 1), (16, 8), (32, 1))
    return next((way for way in ways if all(repeats[way[0] :: way[1]])), ways[0])
