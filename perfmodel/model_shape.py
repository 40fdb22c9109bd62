"""The sizes of a transformer that decide its speed: parameters, and bytes of cache and payload per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.errors import ConfigError
from fastdecode.types import ITEM_BYTES, KVLayout, LayerLayout


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer, dense or a mixture of experts; norms and biases (below 0.1 %) are left out.

    ``mlp_matrices``: 3 where the MLP is gated, else 2. ``num_experts`` copies of the MLP exist, of which each token
    visits ``experts_per_token``; ``shared_intermediate_size`` is the width of a further MLP that every token visits.
    ``dtype``: of the weights and of q, k, v, o.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp_matrices: int = 3
    tied_embeddings: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    shared_intermediate_size: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for field in (*sizes, "vocab_size", "mlp_matrices", "num_experts", "experts_per_token"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self.name}: {field} must be a whole number of at least 1, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{self.name}: experts_per_token ({self.experts_per_token}) is above num_experts ({self.num_experts})"
            )
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{self.name}: dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}")

    def with_kv_heads(self, num_kv_heads: int) -> ModelShape:
        """The same model with another number of KV heads."""
        return replace(self, num_kv_heads=num_kv_heads)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_parameters(self) -> int:
        """Of one layer's q, k, v and o projections: 2·D·H·(N + K) ("All About Transformer Inference", Question 1)."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one layer's MLP, one expert's where there are several: 3·D·F when gated (Question 1)."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all experts included (Question 5)."""
        return self.attention_parameters + self.num_experts * self.mlp_parameters + self._shared_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Of one layer, those that one token meets (Question 5)."""
        return self.attention_parameters + self.experts_per_token * self.mlp_parameters + self._shared_parameters

    @property
    def head_parameters(self) -> int:
        """Of the output projection, which every sampled row meets: D·V."""
        return self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """Of the whole model: L·D·(3F + 2H(N + K)) + D·V when dense, gated and tied (Question 1)."""
        return self.num_layers * self.layer_parameters + self._vocabulary_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, both embeddings counted (Question 5)."""
        return self.num_layers * self.active_layer_parameters + self._vocabulary_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes per weight, and per element of q, k, v, o."""
        return ITEM_BYTES[self.dtype]

    @property
    def layer_layout(self) -> LayerLayout:
        """One layer as an R-worker sees it."""
        return LayerLayout(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)

    def kv_layout(self, kv_dtype: str) -> KVLayout:
        """All layers as an R-worker sees them."""
        return KVLayout((self.layer_layout,) * self.num_layers, self.dtype, kv_dtype)

    @property
    def attending_row_bytes(self) -> int:
        """Bytes of q, k, v and o of one row and layer on the link: (2·N + 2·K)·H elements (FastDecode, section 3)."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.item_bytes

    @property
    def appending_row_bytes(self) -> int:
        """Bytes of k and v alone: a prompt's row that attends on the S-worker."""
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def _shared_parameters(self) -> int:
        return self.mlp_matrices * self.hidden_size * self.shared_intermediate_size

    @property
    def _vocabulary_parameters(self) -> int:
        return self.head_parameters * (1 if self.tied_embeddings else 2)
