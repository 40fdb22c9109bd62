"""``fastdecode plan --list-models``: the models known by name, with their relevant sizes."""

from __future__ import annotations

from collections.abc import Iterator

from fastdecode.perfmodel.known_models import BUILT_IN


def model_lines() -> Iterator[str]:
    """Yield a line per model: parameters, weights, a token's cache, and the longest context."""
    yield f"{'model':20s} {'parameters':>11s} {'active':>8s} {'weights':>9s} {'KV of a token':>14s} {'context':>10s}"
    for name, shape in BUILT_IN.items():
        context = f"{shape.max_context:,}" if shape.max_context else "-"
        yield (
            f"{name:20s} {shape.parameters / 1e9:9.1f} B {shape.active_parameters / 1e9:6.1f} B "
            f"{shape.weight_bytes / 1e9:6.0f} GB {shape.kv_bytes_per_token(shape.dtype):12,} B {context:>10s}"
        )
    yield "Weights and cache in 16 bits. --model also takes a folder with config.json, or a hub's id: Qwen/Qwen3-32B."
