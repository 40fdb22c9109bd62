"""Checks that a plan stays within the model's context, and a simulation within 1 GiB and a minute."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.model_shape import ModelShape


def check_context(shape: ModelShape | None, tokens: float, name: str) -> None:
    """Raise ConfigError if ``tokens`` exceeds the model's longest context. ``name``: the setting to blame."""
    if shape and shape.max_context and tokens > shape.max_context:
        raise ConfigError(
            f"{name}: {tokens:,.0f} tokens of prompt and output are beyond the {shape.max_context:,} of {shape.name}"
        )


def check_r_workers(number: int | None) -> None:
    most_r_workers = 100_000
    if number is not None and number > most_r_workers:
        raise ConfigError(f"num_r_workers must be at most {most_r_workers:,}, not {number:,}")


def check_simulated_memory(num_prompts: int, prompt_tokens: float) -> None:
    """Raise ConfigError, with the number that fits, if ``num_prompts`` prompts need too much memory."""
    # Memory of a simulated prompt token: a Python object, and an entry in a list
    bytes_per_token = 45.0
    bytes_per_request = 2000.0
    each = bytes_per_request + bytes_per_token * prompt_tokens
    most_bytes = 1 << 30
    if each > most_bytes:
        fits = int((most_bytes - bytes_per_request) / bytes_per_token)
        raise ConfigError(
            f"prompts of {prompt_tokens:,.0f} tokens: a simulation needs more than 1 GiB for each; up to {fits:,} "
            f"tokens fit"
        )
    if num_prompts * each > most_bytes:
        raise ConfigError(
            f"num_prompts: {num_prompts:,} prompts of {prompt_tokens:,.0f} tokens need "
            f"{num_prompts * each / 2**30:,.3g} GiB in a simulation; up to {int(most_bytes / each):,} fit 1 GiB"
        )


def check_simulated_time(
    prompt_lens: Sequence[float],
    output_lens: Sequence[float],
    seats: int,
    batch_tokens: int,
    num_r_workers: int,
    runs: int = 1,
) -> None:
    """Raise ConfigError, with the number that fits, if ``runs`` simulations of these requests take over a minute."""
    count = len(output_lens)
    if not count:
        return
    seats = max(1, min(seats, count))
    steps = max(sum(output_lens) / seats, max(output_lens)) + sum(prompt_lens) / max(batch_tokens, 1)
    # Seconds that simulating one step takes: a fixed part, a part per sequence, and one per R-worker
    step_seconds, sequence_seconds, r_worker_seconds = 5e-4, 2.5e-6, 8e-6
    of_step = step_seconds + sequence_seconds * seats + r_worker_seconds * num_r_workers
    seconds = runs * steps * of_step
    # Longest time of a simulation
    most_seconds = 60.0
    if seconds <= most_seconds:
        return
    # In a simulation with fewer steps than this, many R-workers, not many requests, cost the time
    many_steps = 20_000
    if r_worker_seconds * num_r_workers > of_step / 2 and steps < many_steps:
        most = int(num_r_workers * most_seconds / seconds)
        fits = f"up to {most:,} R-workers are simulated fast enough"
    else:
        most = int(count * most_seconds / seconds)
        fits = f"up to {most:,} such requests fit (--num-prompts)" if most else "give shorter outputs"
    raise ConfigError(
        f"num_prompts: {count:,} requests are {steps:,.0f} steps, which take {seconds:,.0f} s to simulate, more than "
        f"{most_seconds:g} s; {fits}"
    )
