"""The roofline of decoding on accelerators alone: "All About Transformer Inference" (part 7 of the scaling book)."""

from __future__ import annotations

import math


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: float) -> float:
    """Bytes of K and V one token takes over all layers, without scales: 2·bytes·H·K·L ("What about memory?")."""
    return 2 * bytes_per_element * head_dim * num_kv_heads * num_layers


def weight_load_seconds(parameter_bytes: float, bytes_per_second: float, num_chips: int = 1) -> float:
    """Seconds to read every weight once: the least a step can take (Question 3)."""
    return parameter_bytes / (num_chips * bytes_per_second)


def step_seconds(
    batch_size: float,
    kv_bytes_per_sequence: float,
    active_parameters: float,
    parameter_bytes: float,
    flops_per_second: float,
    bytes_per_second: float,
) -> float:
    """The least seconds one decode step of ``batch_size`` sequences can take; rates are of all chips together.

    batch·KV/bandwidth + max(2·batch·parameters/FLOPs, parameter bytes/bandwidth) ("Theoretical Step Time (General)").
    """
    attention = batch_size * kv_bytes_per_sequence / bytes_per_second
    arithmetic = 2.0 * batch_size * active_parameters / flops_per_second
    return attention + max(arithmetic, weight_load_seconds(parameter_bytes, bytes_per_second))


def max_batch_size(memory_bytes: float, parameter_bytes: float, kv_bytes_per_sequence: float) -> int:
    """Sequences whose KV fits beside the weights; 0 where not even the weights fit ("What about memory?")."""
    return max(math.floor((memory_bytes - parameter_bytes) / kv_bytes_per_sequence), 0)
