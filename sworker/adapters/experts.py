"""Mixtures of experts on the CPU: transformers' grouped products, with enough rows for each expert.

torch's product rounds a row differently among fewer than 8 rows, and routing decides how many an expert gets. So a
sequence's bits would depend on the others in the batch. Experts with fewer rows get rows of zeros added.
"""

from __future__ import annotations

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
    min_expert_rows = 8
    missing = (min_expert_rows - counts).clamp(min=0) * (counts > 0)
    added = torch.repeat_interleave(torch.arange(len(counts)), missing)
    if not len(added):
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    added = torch.cat([added, added[-1:].expand(-len(added) % k)]).reshape(-1, k)
    output = grouped_mm_experts_forward(
        experts,
        torch.cat([hidden_states, hidden_states.new_zeros(len(added), hidden_states.shape[1])]),
        torch.cat([top_k_index, added]),
        torch.cat([top_k_weights, top_k_weights.new_zeros(added.shape)]),
    )
    return output[: len(hidden_states)]
