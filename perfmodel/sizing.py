"""How many R-workers a GPU wants: FastDecode's equations (9) to (11).

Two meanings of "batch size" must not be mixed: ``mini_batch_size`` is B of the equations, one of the halves that
alternate; ``in_flight`` is all sequences, ``num_mini_batches`` times as many (two in the paper). T(B) is the S-part's
seconds of one layer and one mini-batch; R is one R-worker's seconds per cached token and layer.
"""

from __future__ import annotations

from fastdecode.errors import PlanError


def in_flight(mini_batch_size: int, num_mini_batches: int = 2) -> int:
    """Sequences decoding at once."""
    return mini_batch_size * num_mini_batches


def memory_r_workers(in_flight: float, mean_context: float, capacity_tokens: float) -> float:
    """R-workers that hold the cache, each ``capacity_tokens`` (C) over all layers, unrounded (eq. 9).

    The paper's B·S ≤ C·P is two mini-batches of mean length S/2: ``in_flight`` = 2·B, ``mean_context`` = S/2.
    """
    return in_flight * mean_context / capacity_tokens


def indivisible_seconds(r_part_seconds_per_token: float, shared_prefix_len: float, call_seconds: float) -> float:
    """Of a layer and mini-batch, what every R-worker takes however many there are."""
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
    """R-workers whose R-part takes as long as the slowest other stage: P ≈ B·S·R/(2T(B)) (eq. 11).

    It solves eq. 10, seconds of one layer and mini-batch on the R-workers: B·S·R/(2P) with ``mean_context`` = S/2.
    Beyond the paper every R-worker reads a shared prefix once for all its sequences, each call costs a fixed
    ``call_seconds``, and each row of it ``row_seconds``.

    ``stage_seconds`` is T(B), or the transport's seconds where that is overlapped and slower. PlanError where what no
    number of R-workers can divide (a shared prefix, the fixed cost of a call) takes longer already.
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
