"""The sizes of multi-head latent attention (MLA), for which R-workers keep one latent row per token and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.kinds import Absorption, Latent


@dataclass(frozen=True)
class LatentShape:
    """Dims of one head's query and key (``nope``, and the rotated ``rope``) and of its ``value``.

    ``kv_rank``, ``q_rank``: of the latents of keys and values, and of queries; with ``q_rank`` 0, queries are made from
    the hidden state. ``gated``: outputs are multiplied by a projection of their own width (Hunyuan 4).
    ``at_r_workers``: R-workers multiply K and V with queries and outputs (``--latent-absorption r``), so the link
    carries queries and outputs in the model's own sizes.
    """

    kv_rank: int
    q_rank: int
    nope: int
    rope: int
    value: int
    gated: bool = False
    at_r_workers: bool = False

    @property
    def row_dim(self) -> int:
        """Number of elements of a cached row: the latent, and the rotary key that all heads share."""
        return self.kv_rank + self.rope

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return how many parameters one layer's attention projections have, those of K and V of latents included."""
        query, expanded = num_heads * (self.nope + self.rope), num_heads * (self.nope + self.value)
        queries = self.q_rank * (hidden_size + query) if self.q_rank else hidden_size * query
        outputs = (2 if self.gated else 1) * num_heads * self.value * hidden_size
        return queries + hidden_size * self.row_dim + self.kv_rank * expanded + outputs

    def shared_parameters(self, hidden_size: int) -> int:
        """Return how many parameters of one layer produce the latents. All heads share these."""
        return hidden_size * (self.q_rank + self.row_dim)

    def layer_layout(self, num_heads: int) -> Latent:
        """Return the layout of one layer's cache on R-workers: latent rows with one KV head."""
        scale = (self.nope + self.rope) ** -0.5
        absorption = Absorption(self.nope, self.value) if self.at_r_workers else None
        return Latent(num_heads, 1, self.row_dim, self.kv_rank, scale, absorption=absorption)

    def absorbing_products(self, num_heads: int) -> int:
        """Return the multiply-adds per row and layer to multiply queries with K and outputs with V of latents."""
        return num_heads * self.kv_rank * (self.nope + self.value)


def read_latent_shape(config: Mapping[str, Any], name: str) -> LatentShape | None:
    """Return the sizes of latent attention in a transformers ``config``; None for models with other attention.

    Raise UnsupportedModelError for a variant that the equations do not cover.
    """
    if not config.get("kv_lora_rank"):
        return None
    if config.get("model_type") == "longcat_flash":
        raise UnsupportedModelError(f"{name}: layers with two attentions (longcat_flash) are not in the equations")
    if str(config.get("model_type")).startswith("dots3_note"):
        raise UnsupportedModelError(f"{name}: latents of several widths (dots3_note) are not in the equations")
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    gated = config.get("model_type") == "hy_v4"
    return LatentShape(config["kv_lora_rank"], config.get("q_lora_rank") or 0, nope, rope, value, gated)
