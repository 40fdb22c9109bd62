"""The printed assumptions of a plan: figures of machines with their sources, and costs of the model's tokens."""

from __future__ import annotations

import math
from dataclasses import fields

from fastdecode.perfmodel.hardware import CpuHost, Figure, Gpu
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.rank_costs import RankGroup
from fastdecode.perfmodel.stages import PROMPT_ROWS_PER_STATE


def figures(preset: Gpu | CpuHost) -> tuple[str, ...]:
    """Return one text line per figure of a preset machine, with its efficiency and source."""
    values = {field.name: getattr(preset, field.name) for field in fields(preset)}
    return tuple(f"{preset.name} {name}: {value}" for name, value in values.items() if isinstance(value, Figure))


def rank_lines(group: RankGroup) -> tuple[str, ...]:
    """Return text lines with the assumptions about the ranks' collectives."""
    if group.size == 1 or group.link is None:
        return ()
    link = group.link
    return (
        f"{group.size} ranks, {link.name} bytes_per_second: {link.bytes_per_second}",
        f"{link.name}: {link.step_seconds * 1e6:g} us for each message of an all-reduce (assumed)",
    )


def token_lines(shape: ModelShape, kv_dtype: str, planner: Planner) -> tuple[str, ...]:
    """Return text lines on what a cached token costs R-workers: memory, reading, arithmetic."""
    layer = shape.layer_layout
    operations = f"{2 * layer.multiply_adds() / layer.token_bytes(kv_dtype):.3g}"
    held, ranks = planner.kv_bytes_per_token or 0, planner.num_ranks
    each = f" for each of {ranks} ranks ({ranks * held:,} in all)" if ranks > 1 else ""
    return (
        f"a cached token: {held:,} bytes held over all layers{each}, {planner.kv_bytes_read_per_token:,.0f} of them "
        f"read in a step; {operations} operation{'s' * (operations != '1')} per byte",
    )


def absorption_lines(shape: ModelShape) -> tuple[str, ...]:
    """Return text lines on which side multiplies latents with their K and V projections, and on the cost."""
    if shape.latent is None:
        return ()
    row = f"{shape.num_layers * shape.attending_row_bytes / 1e6:.3g} MB of a token on the link"
    if not shape.latent.at_r_workers:
        return (f"the S-worker multiplies K and V of latents (--latent-absorption s): {row}",)
    weights = shape.kv_layout(shape.dtype).weight_bytes
    return (f"R-workers multiply K and V of latents, {weights / 1e9:.3g} GB each (--latent-absorption r): {row}",)


def window_lines(shape: ModelShape, planner: Planner) -> tuple[str, ...]:
    """Return text lines on how much less R-workers read, thanks to sliding windows or a sparse-attention index."""
    windows = sorted({window for window in shape.windows if window})
    if not windows:
        return ()
    count, tokens = sum(map(bool, shape.windows)), " or ".join(map(str, windows))
    if shape.index:
        return (
            f"{count} of {len(shape.windows)} layers read {tokens} tokens, which an index in {shape.index.num_layers} "
            f"layers picks by a scan of all: a step reads {planner.read_share:.1%} of the bytes that it holds",
        )
    seen = "chunks of " * shape.chunked + f"{tokens} tokens"
    return (
        f"{count} of {len(shape.windows)} layers see {seen}: the mean layer reads {planner.read_share:.0%} of "
        f"a context; R-workers keep all of it, the GPU alone what it reads",
    )


def state_lines(shape: ModelShape, planner: Planner) -> tuple[str, ...]:
    """Return text lines on the memory of recurrent states, and on whether the S-worker or R-workers keep them."""
    if not shape.state:
        return ()
    size = shape.state_bytes_per_sequence
    context = planner.workload.mean_context * shape.kv_bytes_per_token(shape.dtype)
    return (
        f"{shape.state.num_layers} of {shape.num_layers} layers are recurrent: {size / 1e6:.4g} MB of states for each "
        f"sequence, read and written in each step, beside {context / 1e6:.4g} MB of cache for a mean context; of a "
        f"prompt once for {PROMPT_ROWS_PER_STATE} tokens",
        _state_place(planner),
    )


def _state_place(planner: Planner) -> str:
    if not planner.states:
        return "R-workers keep states (--state-on r)"
    places = planner.states.num_places
    room = "its memory is not checked (--state-memory)" if places == math.inf else f"it has room for {places:.0f}"
    return f"the S-worker keeps states (--state-on s): {room}"
