"""Bounds of what a plan or a simulation is asked: a model's context, and the memory and time that a run would take."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.model_shape import ModelShape

MOST_BYTES = 1 << 30
MOST_SECONDS = 60.0
"""Memory and time of one simulation."""

BYTES_PER_TOKEN = 45.0
"""Memory of a prompt's token in a simulation: an object and a place in a list."""

BYTES_PER_REQUEST = 2000.0
STEP_SECONDS, SEQUENCE_SECONDS, R_WORKER_SECONDS = 5e-4, 2.5e-6, 8e-6
"""Time of a simulated step: once, for each sequence in it, for each R-worker."""

MANY_STEPS = 20_000
"""Steps that a run with few R-workers has the time for."""

MOST_R_WORKERS = 100_000
"""R-workers of a plan."""


def check_context(shape: ModelShape | None, tokens: float, name: str) -> None:
    """Raise ConfigError if a context is longer than the model's."""
    if shape and shape.max_context and tokens > shape.max_context:
        raise ConfigError(
            f"{name}: {tokens:,.0f} tokens of prompt and output are beyond the {shape.max_context:,} of {shape.name}"
        )


def check_r_workers(number: int | None) -> None:
    """Raise ConfigError for more R-workers than a plan counts."""
    if number is not None and number > MOST_R_WORKERS:
        raise ConfigError(f"num_r_workers must be at most {MOST_R_WORKERS:,}, not {number:,}")


def check_simulated_memory(num_prompts: int, prompt_tokens: float) -> None:
    """ConfigError, with the number that fits, where ``num_prompts`` of ``prompt_tokens`` each take too much memory."""
    each = BYTES_PER_REQUEST + BYTES_PER_TOKEN * prompt_tokens
    if each > MOST_BYTES:
        fits = int((MOST_BYTES - BYTES_PER_REQUEST) / BYTES_PER_TOKEN)
        raise ConfigError(
            f"prompts of {prompt_tokens:,.0f} tokens: one alone takes a simulation more than 1 GiB; up to {fits:,} "
            f"tokens fit"
        )
    if num_prompts * each > MOST_BYTES:
        raise ConfigError(
            f"num_prompts: {num_prompts:,} prompts of {prompt_tokens:,.0f} tokens take a simulation "
            f"{num_prompts * each / 2**30:,.3g} GiB; up to {int(MOST_BYTES / each):,} fit 1 GiB"
        )


def check_simulated_time(
    prompt_lens: Sequence[float],
    output_lens: Sequence[float],
    seats: int,
    batch_tokens: int,
    num_r_workers: int,
    runs: int = 1,
) -> None:
    """ConfigError, with the number that fits, where ``runs`` of these requests would take more than a minute."""
    count = len(output_lens)
    if not count:
        return
    seats = max(1, min(seats, count))
    steps = max(sum(output_lens) / seats, max(output_lens)) + sum(prompt_lens) / max(batch_tokens, 1)
    of_step = STEP_SECONDS + SEQUENCE_SECONDS * seats + R_WORKER_SECONDS * num_r_workers
    seconds = runs * steps * of_step
    if seconds <= MOST_SECONDS:
        return
    if R_WORKER_SECONDS * num_r_workers > of_step / 2 and steps < MANY_STEPS:
        most = int(num_r_workers * MOST_SECONDS / seconds)
        fits = f"up to {most:,} R-workers are simulated fast enough"
    else:
        most = int(count * MOST_SECONDS / seconds)
        fits = f"up to {most:,} such requests fit (--num-prompts)" if most else "give shorter outputs"
    raise ConfigError(
        f"num_prompts: {count:,} requests are {steps:,.0f} steps, which take {seconds:,.0f} s to simulate, more than "
        f"{MOST_SECONDS:g} s; {fits}"
    )
