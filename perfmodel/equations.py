"""The papers' equations as functions: FastDecode's sizing and schedule, the roofline, Sarathi-Serve's budget.

Two meanings of "batch size" are kept apart. ``mini_batch_size`` is B of FastDecode's equations, one of the alternating
halves. ``in_flight`` is all sequences, ``num_mini_batches`` times as many (two in the paper). T(B) is the S-part's
seconds of one layer and mini-batch. R is one R-worker's seconds per cached token and layer. Load is the number of
cached tokens attended in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.protocols import StepTime

MOST_SEQUENCES = 1 << 20
"""Most sequences that a search for a batch considers."""

TILE_TOKENS = 128
"""Tile height of a GPU's matrix products, a power of two. A chunk of 257 cost 32 % more than one of 256."""


def in_flight(mini_batch_size: int, num_mini_batches: int = 2) -> int:
    """Return the number of sequences that decode at once."""
    return mini_batch_size * num_mini_batches


def memory_r_workers(in_flight: float, mean_context: float, capacity_tokens: float) -> float:
    """Return how many R-workers, each with memory for ``capacity_tokens`` (C), hold the cache; unrounded (eq. 9).

    This is the paper's B·S ≤ C·P for P R-workers: its two mini-batches of B sequences make ``in_flight`` = 2·B, and
    ``mean_context`` is S/2.
    """
    return in_flight * mean_context / capacity_tokens


def indivisible_seconds(r_part_seconds_per_token: float, shared_prefix_len: float, call_seconds: float) -> float:
    """Return the seconds of a layer's attention that more R-workers do not reduce: shared prefix and call overhead."""
    return r_part_seconds_per_token * shared_prefix_len + call_seconds


def balanced_r_workers(
    mini_batch_size: float,
    mean_context: float,
    r_part_seconds_per_token: float,
    stage_seconds: float,
    shared_prefix_len: float = 0.0,
    call_seconds: float = 0.0,
    row_seconds: float = 0.0,
) -> float:
    """Return how many R-workers make the R-part as fast as the slowest other stage: P ≈ B·S·R/(2T(B)) (eq. 11).

    This solves eq. 10, the R-part's seconds of one layer and mini-batch: B·S·R/(2P) with ``mean_context`` = S/2. Beyond
    the paper, every R-worker reads a shared prefix once for all its sequences, and a call costs a fixed
    ``call_seconds``, and ``row_seconds`` per row.

    ``stage_seconds``: T(B), or the transport's seconds if the transport overlaps and is slower. Raise PlanError if
    :func:`indivisible_seconds` alone exceed it.
    """
    indivisible = indivisible_seconds(r_part_seconds_per_token, shared_prefix_len, call_seconds)
    if indivisible >= stage_seconds:
        raise PlanError(
            f"no number of R-workers can keep up: their call's fixed cost and the shared prefix take "
            f"{indivisible * 1e3:.3g} ms of every layer, {(indivisible - stage_seconds) * 1e3:.3g} ms more than the "
            f"{stage_seconds * 1e3:.3g} ms of the other stages; take a larger mini-batch"
        )
    divisible = mini_batch_size * ((mean_context - shared_prefix_len) * r_part_seconds_per_token + row_seconds)
    return divisible / (stage_seconds - indivisible)


def micro_batch_size(in_flight: float, output_len: float, interval_steps: float) -> float:
    """Return M, the number of sequences that start together: ``in_flight`` · ``interval_steps`` / ``output_len``."""
    return in_flight * interval_steps / output_len


def peak_load_stabilized(in_flight: float, output_len: float, interval_steps: float, prompt_len: float = 0.0) -> float:
    """Return the largest number of cached tokens that one step of the load-stabilizing schedule attends to.

    The paper's W'_max = Σ_{k=1..S/F} M·k·F = B·(S + F)/2, plus ``in_flight`` · ``prompt_len``.
    """
    return in_flight * (prompt_len + (output_len + interval_steps) / 2.0)


def default_interval_steps(in_flight: float, output_len: float) -> int:
    """Return F, the steps from one micro-batch's start to the next: about ``output_len`` / 32.

    F = ``output_len``·M / ``in_flight``, where M, the sequences that start together, is a whole number of at least 1.
    """
    intervals_per_sequence = 32  # so that the peak load is 1/32 above the mean load, as in the paper
    together = max(1, round(in_flight / intervals_per_sequence))
    return max(1, round(output_len * together / in_flight))


def tokens_per_verification(num_drafts: float, acceptance_rate: float) -> float:
    """Return E(k, α) = (1 - α^(k+1)) / (1 - α): the expected accepted tokens of k drafts, plus the token after them.
    Each draft is accepted with probability α if its predecessors are: Leviathan et al., "Fast Inference from
    Transformers via Speculative Decoding" (2023), equation 1; "All About Transformer Inference", appendix D. With α = 1
    the result is k + 1.
    """
    if acceptance_rate >= 1.0:
        return num_drafts + 1.0
    return (1.0 - acceptance_rate ** (num_drafts + 1)) / (1.0 - acceptance_rate)


def roofline_step_seconds(
    batch_size: float,
    kv_bytes_per_sequence: float,
    active_parameters: float,
    parameter_bytes: float,
    flops_per_second: float,
    bytes_per_second: float,
) -> float:
    """Return the least seconds of a decode step of ``batch_size`` sequences; the rates are of all chips together.

    batch·KV/bandwidth + max(2·batch·parameters/FLOPs, parameter bytes/bandwidth): "All About Transformer Inference"
    (part 7 of the scaling book), "Theoretical Step Time (General)".
    """
    attention = batch_size * kv_bytes_per_sequence / bytes_per_second
    arithmetic = 2.0 * batch_size * active_parameters / flops_per_second
    return attention + max(arithmetic, parameter_bytes / bytes_per_second)


def roofline_max_batch_size(memory_bytes: float, parameter_bytes: float, kv_bytes_per_sequence: float) -> int:
    """Return how many sequences' KV caches fit in ``memory_bytes`` together with the weights.

    Return 0 if the weights alone do not fit ("All About Transformer Inference", "What about memory?").
    """
    return max(math.floor((memory_bytes - parameter_bytes) / kv_bytes_per_sequence), 0)


def largest(meets: Callable[[int], bool], most: int = MOST_SEQUENCES) -> int:
    """Return the largest integer up to ``most`` for which ``meets`` is true; search by doubling and bisection.
    ``meets`` must be true for 0 and for all integers below the result.
    """
    high = 1
    while high <= most and meets(high):
        high *= 2
    low = high // 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def token_budget(
    step_time: StepTime,
    target_seconds: float,
    tile_tokens: int = TILE_TOKENS,
    most_tokens: int = 1 << 20,
) -> int:
    """Return τ, in tokens: the largest multiple of ``tile_tokens`` whose step takes at most ``target_seconds``.

    ``target_seconds`` is the time between tokens. ``step_time`` must not fall with more tokens. Raise PlanError if
    one tile is already too slow.
    """
    if tile_tokens < 1 or most_tokens < tile_tokens:
        raise ConfigError(f"no token budget is a multiple of {tile_tokens} and at most {most_tokens} tokens")
    least = step_time(tile_tokens, 0)
    if least > target_seconds:
        raise PlanError(
            f"a step of one tile ({tile_tokens} tokens) takes {least:.3g} s, {least - target_seconds:.3g} s more than "
            f"the target of {target_seconds:.3g} s between tokens"
        )
    most_tiles = most_tokens // tile_tokens
    return tile_tokens * largest(lambda tiles: step_time(tiles * tile_tokens, 0) <= target_seconds, most_tiles)
