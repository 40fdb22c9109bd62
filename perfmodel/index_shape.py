"""The sizes of a trained index, which picks the rows that a layer's queries read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode.kinds import Index


@dataclass(frozen=True)
class IndexShape:
    """The sizes of a trained index: in ``num_layers`` layers, ``num_heads`` query heads score one key per cached token.
    The key has ``head_dim`` elements. Each query then attends to the ``top_tokens`` tokens with the best scores.
    ``q_rank``: width of the latent from which the index's queries are made; 0 if they are made from the hidden state.
    ``weighs_heads``: the heads' scores are added with weights from one more projection, and single tokens are picked.
    Otherwise each head picks blocks of ``block`` tokens.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    top_tokens: int
    q_rank: int = 0
    weighs_heads: bool = True
    block: int = 128

    def parameters(self, hidden_size: int) -> int:
        """Return how many parameters the index's projections have in one layer."""
        weighing = hidden_size * self.num_heads if self.weighs_heads else 0
        return (self.q_rank or hidden_size) * self.num_heads * self.head_dim + hidden_size * self.head_dim + weighing

    @property
    def layer_layout(self) -> Index:
        """The layout of one layer's index as R-workers receive it."""
        block = 0 if self.weighs_heads else self.block
        return Index(self.num_heads, self.head_dim, 1.0, self.top_tokens // max(block, 1), block)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of one token's index keys over all layers, stored as ``dtype``, the model's."""
        return self.num_layers * self.layer_layout.token_bytes(dtype)


INDEXED, BLOCK_SPARSE = "indexed_attention", "minimax_m3_sparse"
"""Types of layers with an index: one that picks single tokens, and one that picks blocks."""


def with_transformers_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` with the keys of MiniMax-M3's published file renamed as in transformers."""
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, Mapping):
        return config
    sparse_names = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
                     "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks"}  # fmt: skip
    named = {name: sparse[own] for name, own in sparse_names.items() if own in sparse}
    if "sparse_attention_freq" in sparse:
        named["layer_types"] = [BLOCK_SPARSE if each else "full_attention" for each in sparse["sparse_attention_freq"]]
    if "moe_layer_freq" in config:
        named["mlp_layer_types"] = ["sparse" if each else "dense" for each in config["moe_layer_freq"]]
    return {**config, **named}


def read_index_shape(config: Mapping[str, Any], num_layers: int) -> IndexShape | None:
    """Return the sizes of the index in a transformers ``config``; None for a model without an index.

    Raise KeyError for a missing size.
    """
    if config.get("index_topk"):
        top_tokens, q_rank = config["index_topk"], config.get("q_lora_rank") or 0
        num_owners = _num_owners(config, num_layers)
        return IndexShape(num_owners, config["index_n_heads"], config["index_head_dim"], top_tokens, q_rank)
    if num_sparse := list(config.get("layer_types") or []).count(BLOCK_SPARSE):
        top_tokens = config["index_topk_blocks"] * config["index_block_size"]
        return IndexShape(num_sparse, config["index_n_heads"], config["index_head_dim"], top_tokens, 0, False,
                          config["index_block_size"])  # fmt: skip
    return None


def _num_owners(config: Mapping[str, Any], num_layers: int) -> int:
    """Return how many of ``num_layers`` layers have their own index; the other layers use an earlier layer's picks."""
    if kinds := config.get("indexer_types") or config.get("index_topk_pattern"):
        return sum(each in ("full", "F") for each in kinds)
    every, first = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return sum(max(layer - first + 1, 0) % every == 0 for layer in range(num_layers))
