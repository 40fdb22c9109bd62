"""Loads of the sequence-level load-stabilizing schedule (FastDecode, section 3.2 and Solution 2).

``in_flight`` sequences of ``output_len`` new tokens, each after a prompt of ``prompt_len``; a micro-batch starts every
``interval_steps`` steps. Load is the number of cached tokens attended in one step; the paper has no prompts.
"""

from __future__ import annotations

import math

INTERVALS_PER_SEQUENCE = 32
"""Micro-batches in flight unless asked otherwise: the peak load is then 1/32 above the mean (the paper's F = 32 of
S = 1024)."""


def micro_batch_size(in_flight: float, output_len: float, interval_steps: float) -> float:
    """Sequences that start together: M = B·F/S."""
    return in_flight * interval_steps / output_len


def peak_load_stabilized(in_flight: float, output_len: float, interval_steps: float, prompt_len: float = 0.0) -> float:
    """Tokens attended in the worst step of the schedule: W'_max = Σ_{k=1..S/F} M·k·F = B·(S + F)/2, plus prompts."""
    return in_flight * (prompt_len + (output_len + interval_steps) / 2.0)


def default_interval_steps(in_flight: float, output_len: float) -> int:
    """F: a 32nd of a sequence's steps, or as many as it takes for a micro-batch to hold one sequence."""
    return max(round(output_len / INTERVALS_PER_SEQUENCE), math.ceil(output_len / in_flight), 1)
