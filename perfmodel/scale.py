"""From a model cut to a few layers to the whole one."""

from __future__ import annotations


def full_model_decode(
    step_seconds: float, tokens_per_step: float, num_layers_run: int, num_layers: int
) -> dict[str, float | int]:
    """Decode figures of ``num_layers`` from a run of ``num_layers_run``.

    Every part of the step is scaled by the layers, the head and the host's work too, so the estimate is a lower bound
    on speed. Seconds and tokens per second.
    """
    full_step_seconds = step_seconds * num_layers / num_layers_run
    return {
        "num_hidden_layers": num_layers,
        "num_hidden_layers_run": num_layers_run,
        "decode_step_seconds": full_step_seconds,
        "decode_tokens_per_second": tokens_per_step / full_step_seconds if full_step_seconds else 0.0,
    }
