"""Computes the R-part's seconds from the nominal figures of a host."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.core.dtypes import is_quantized
from fastdecode.kinds import Layer
from fastdecode.perfmodel.hardware import CpuHost, kernel_bytes_per_second, products_per_second
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.stages import PROMPT_ROWS_PER_STATE, RPart


def host_r_part(
    shape: ModelShape, kv_dtype: str, host: CpuHost, row_share: float = 1.0, prompt_context: float = 0.0
) -> RPart:
    """Return the times of attention (the R-part) on ``host``, computed from nominal rates.
    ``row_share``: the fraction of the cached tokens that the mean attending layer reads. The keys of an index are all
    read. Reading tokens and scanning an index each take the time of memory or of arithmetic, whichever is longer. A
    token's bytes include the scales of a quantized cache. A recurrent layer reads and writes a sequence's state once
    per decode row, and once per several prompt rows. Models with such layers attend to prompts on R-workers too: the
    mean prompt row attends to ``prompt_context`` tokens, which many rows read together. If R-workers multiply latents
    with the K and V projections, a call reads these weights once and multiplies them with each row.
    """
    attending = row_share * shape.attention_layers / shape.num_layers
    parts = [_token_r_part(shape.layer_layout, kv_dtype, host, shape.dtype).times(attending)]
    if shape.index:
        owners = shape.index.num_layers / shape.num_layers
        parts.append(_token_r_part(shape.index.layer_layout, shape.dtype, host, shape.dtype).times(owners))
    slowest = max(parts, key=lambda part: part.seconds_per_token)
    sent = shape.sent_states
    state_bytes = 2.0 * sent.bytes_per_sequence / shape.num_layers if sent else 0.0
    row_seconds = state_bytes / host.read_bytes_per_second.achieved
    call_seconds, absorbing_seconds = _absorption_seconds(shape, host)
    product = attending * _product_seconds(shape.layer_layout, kv_dtype, host, shape.dtype)
    return replace(
        slowest,
        seconds_per_token=sum(part.seconds_per_token for part in parts),
        call_seconds=call_seconds,
        row_seconds=row_seconds + absorbing_seconds,
        prompt_row_seconds=row_seconds / PROMPT_ROWS_PER_STATE + (prompt_context * product if shape.state else 0.0),
    )


def _absorption_seconds(shape: ModelShape, host: CpuHost) -> tuple[float, float]:
    """Return the mean layer's seconds, per call and per row, to multiply by the K and V projections of latents.
    A call reads heads * rank * (nope + value) weights, and each row takes as many multiply-adds (DeepSeek-V2, section
    2.1.2: W_UK absorbed into the query, W_UV into the output).
    """
    if shape.latent is None or not shape.latent.at_r_workers:
        return 0.0, 0.0
    products = shape.latent.absorbing_products(shape.num_heads) * shape.attention_layers / shape.num_layers
    reading = products * shape.item_bytes / host.read_bytes_per_second.achieved
    return reading, products / products_per_second(host.cores)


def _token_r_part(layer: Layer, kv_dtype: str, host: CpuHost, model_dtype: str) -> RPart:
    """Return the seconds of attention per cached token in ``layer``. Quantized latents are used in ``model_dtype``."""
    reading = layer.token_bytes(kv_dtype) / host.read_bytes_per_second.achieved
    computing = _product_seconds(layer, kv_dtype, host, model_dtype)
    bound_by = "reads" if reading >= computing else "arithmetic"
    return RPart(max(reading, computing), bound_by=bound_by, arithmetic_over_reads=computing / reading)


def _product_seconds(layer: Layer, kv_dtype: str, host: CpuHost, model_dtype: str) -> float:
    """Return the seconds of the multiply-adds of one query row with one cached token in ``layer``."""
    computed = model_dtype if layer.values_in_keys and is_quantized(kv_dtype) else kv_dtype
    return layer.token_bytes(computed) / kernel_bytes_per_second(
        computed, layer.multiply_adds() / layer.kv_elements, host.cores
    )
