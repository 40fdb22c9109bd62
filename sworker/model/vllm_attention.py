"""Lets the attention layers of a vLLM module call our attention.

Each attention layer gets another ``forward``, which passes q, k and v of the packed rows to our attention, with the
arguments of transformers' attention functions. Layers of other kinds are refused by the name of their class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fastdecode.core.errors import ConfigError
from fastdecode.sworker.adapters.latents import LatentRows
from fastdecode.sworker.model.prepack import PROOF_ROWS, equal_within_rounding
from fastdecode.sworker.model.vllm_refusals import refuse
from fastdecode.sworker.run.pipeline import attend


class Latents(LatentRows):
    """The K and V projections of vLLM's latent attention (MLA), which vLLM's loader made from ``kv_b_proj``."""

    def __init__(self, layer: Any) -> None:
        self.kv_lora_rank, self.v_head_dim = layer.kv_lora_rank, layer.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = layer.qk_nope_head_dim, layer.qk_rope_head_dim
        self._weights = torch.cat((layer.W_UK_T, layer.W_UV.mT), 1)
        layer.W_UK_T = layer.W_UV = None  # only vLLM's own attention reads them, and it never runs

    def _heads(self) -> torch.Tensor:
        return self._weights

    @torch.no_grad()
    def expand_as(self, projection: Any) -> bool:
        """Return whether vLLM's ``kv_b_proj``, given as ``projection``, expands random latents to the same K and V."""
        rows = torch.randn(PROOF_ROWS, self.kv_lora_rank, generator=torch.Generator())
        rows = rows.to(self._weights.device, self._weights.dtype)
        wanted = projection(rows)[0].unflatten(-1, (len(self._weights), -1)).transpose(0, 1)
        return equal_within_rounding(rows @ self._weights.mT, wanted)


def hand_over_attention(vllm_config: Any, hf_config: Any, r_workers_absorb: bool) -> None:
    """Make every attention layer call our attention. Raise UnsupportedModelError for a layer of another kind.

    ``r_workers_absorb``: R-workers multiply queries and outputs by the K and V projections of latents.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    found = vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in found.values() if isinstance(layer, AttentionLayerBase)]
    for layer in layers:
        if type(layer) is Attention and not (what := _unknown_rule(layer)):
            layer.forward = partial(_attention, layer, _rule(layer))
        elif type(layer) is MLAAttention and not (what := _unknown_latents(layer)):
            layer.forward = partial(_latent_attention, layer, _latents(layer, hf_config, not r_workers_absorb))
        else:
            other = f"has layers of vLLM's class {type(layer).__name__}"
            refuse(hf_config, other if type(layer) not in (Attention, MLAAttention) else what)
    if r_workers_absorb and not any(type(layer) is MLAAttention for layer in layers):
        what = f"vLLM's code of {hf_config.model_type} keeps no latents"
        raise ConfigError(f"latent_absorption: r needs latent attention (MLA), and {what}")


def _unknown_rule(layer: Any) -> str:
    """Return the feature of ``layer`` that our attention calls cannot express; "" if there is none."""
    if layer.kv_sharing_target_layer_name is not None:
        return "reads keys and values of another layer"
    if str(layer.attn_type) not in ("decoder", "AttentionType.DECODER"):
        return f"has attention of the type {layer.attn_type}"
    return "takes the square root of ALiBi's slopes" if getattr(layer, "use_alibi_sqrt", None) else ""


def _unknown_latents(layer: Any) -> str:
    """Return the feature of MLA layer ``layer`` that our attention calls cannot express; "" if there is none."""
    if layer.indexer is not None or layer.use_sparse:
        return "picks the latents that it attends to with vLLM's indexer (DSA)"
    if not (hasattr(layer, "W_UK_T") and hasattr(layer, "W_UV")):
        return "has latents whose weights vLLM packs for its own kernels on this processor"
    return ""


def _latents(layer: Any, hf_config: Any, absorbs_here: bool) -> Latents:
    """Return the K and V projections of ``layer``. Raise UnsupportedModelError if ``kv_b_proj`` differs from them."""
    latents = Latents(layer)
    if not latents.expand_as(layer.kv_b_proj):
        refuse(hf_config, "expands latents in another way than its weights of each head say")
    latents.absorbs_here = absorbs_here
    return latents


def _rule(layer: Any) -> dict[str, Any]:
    """Return the scoring rule of ``layer``, as named arguments of transformers' attention functions."""
    impl = layer.impl
    slopes = getattr(impl, "alibi_slopes", None)
    return {
        "scaling": impl.scale,
        "sliding_window": layer.sliding_window,
        "softcap": getattr(impl, "logits_soft_cap", None) or None,
        "s_aux": getattr(impl, "sinks", None),
        "alibi_slopes": () if slopes is None else tuple(torch.as_tensor(slopes).tolist()),
    }


@contextlib.contextmanager
def _own_context() -> Iterator[None]:
    """Restore vLLM's global forward context at the end, since other forwards set it while this one waits."""
    from vllm import forward_context

    own = forward_context._forward_context
    try:
        yield
    finally:
        forward_context._forward_context = own


def _attention(
    layer: Any, rule: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Replace ``Attention.forward``: return o [T, heads · value dim] for ``query`` [T, heads · dim], key, value."""
    counts = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
    q, k, v = (
        rows.reshape(len(rows), count, -1).transpose(0, 1)[None]
        for rows, count in zip((query, key, value), counts, strict=True)
    )
    with _own_context():
        o, _none = attend(layer, q, k, v, None, **rule)
    return o.reshape(len(query), -1)


def _latent_attention(
    layer: Any, latents: Latents, query: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Replace ``MLAAttention.forward``: return o [T, heads · value dim].

    ``query`` is [T, heads, nope + rope], ``latent`` [T, rank], ``rotary`` [T, 1, rope].
    """
    q = query.reshape(len(query), layer.num_heads, -1).transpose(0, 1)[None]
    rows, none = latents.expand_kv(latent[None, None], rotary.reshape(1, 1, len(query), -1))
    with _own_context():
        o, _none = attend(latents, q, rows, none, None, scaling=layer.scale, sliding_window=layer.sliding_window)
    return o.reshape(len(query), -1)
