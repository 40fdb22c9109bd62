"""The sizes of recurrent layers, which keep a state of fixed size per sequence instead of keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.kinds import Recurrent

STATE_ITEM_BYTES = 4
"""Bytes of an element of a state: float32. Matrices may have 16 bits."""


@dataclass(frozen=True)
class StateShape:
    """``num_layers`` recurrent layers, whose ``heads`` have a ``key_dim`` x ``value_dim`` matrix each.

    ``groups`` of heads share queries and keys. ``taps``: tokens of the convolution before the recurrence. ``decays`` of
    a head: 1, or one per key dim. A convolution alone has ``groups`` and ``key_dim`` 0. ``gates``: further projections
    as wide as the values. ``rates``: projected numbers per head. ``gate_rank``: inner width of low-rank projections for
    the decays and the output gate; 0 for none. ``by_channel``: each channel of the values has its own decay (Mamba-1,
    the RG-LRU), and the convolved values return before the recurrence. ``item_bytes``: of an element of the matrices.
    ``at_s_worker``: the S-worker keeps the states (``--state-on s``), and no row of these layers is sent. Names and
    formulas are those of rworker/state_spec.hpp.
    """

    num_layers: int
    heads: int
    value_dim: int
    groups: int = 0
    key_dim: int = 0
    taps: int = 4
    decays: int = 1
    gates: int = 1
    rates: int = 2
    gate_rank: int = 0
    by_channel: bool = False
    item_bytes: int = STATE_ITEM_BYTES
    at_s_worker: bool = field(default=False, compare=False)

    @property
    def wide(self) -> int:
        """Number of elements of a token's values in one recurrent layer."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of elements of a token's values, keys and queries in one recurrent layer."""
        return self.wide + 2 * self.groups * self.key_dim

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one sequence's states over all layers: the last inputs of convolutions, and matrices."""
        windows = (self.taps - 1) * (self.wide if self.by_channel else self.channels)
        return self.num_layers * (windows * STATE_ITEM_BYTES + self.key_dim * self.wide * self.item_bytes)

    @property
    def kind(self) -> Literal["delta", "scan", "window", "selective", "lru"]:
        """The name that R-workers have for this recurrence."""
        if not self.key_dim:
            return "window"
        if self.by_channel:
            return "selective" if self.groups else "lru"
        return "delta" if self.rates == 2 or self.decays > 1 else "scan"

    def layer_layout(self, model_item_bytes: int) -> Recurrent:
        """Return one layer's layout for R-workers; convolution filters are zero.
        ``model_item_bytes``: of an element of rows.

        With ``by_channel``, an engine has a separate layer for the convolution; this layout describes both as one.
        """
        numbers = (self.wide if self.by_channel else self.heads * (self.decays + 1)) if self.key_dim else 0
        factors = b"" if self.kind != "selective" else bytes(4 * self.key_dim * self.wide)
        filters = b"" if self.taps == 1 else bytes(4 * self.taps * self.channels)
        return Recurrent(
            self.heads, self.value_dim, 1.0, self.kind, self.groups, self.key_dim, self.taps,
            0 if self.by_channel or not numbers else self.decays,
            True, self.kind == "delta", self.channels + numbers * 4 // model_item_bytes, filters, factors=factors,
            dtype="float32" if self.item_bytes == STATE_ITEM_BYTES else "bfloat16",
        )  # fmt: skip

    def row_bytes(self, item_bytes: int) -> int:
        """Return the bytes of a token's row sent to an R-worker in one layer: channels; decays and rates as float32."""
        if self.by_channel:
            return (self.wide + self.channels) * item_bytes + 4 * self.wide
        return self.channels * item_bytes + (self.heads * (self.decays + 1) * 4 if self.key_dim else 0)

    def output_bytes(self, item_bytes: int) -> int:
        """Return the bytes of a token's o in one layer, and of a separate convolution's result."""
        return (2 if self.by_channel else 1) * self.wide * item_bytes

    def parameters(self, hidden_size: int) -> int:
        """Return how many parameters one layer's projections have, without filters and norms."""
        wide = self.wide
        if (
            self.by_channel
        ):  # keys, queries and time steps are projected from the values; each element of a state has a decay
            return (2 + self.gates) * hidden_size * wide + (2 * self.gate_rank + 3 * self.groups * self.key_dim) * wide
        low_rank = 2 * self.gate_rank * (hidden_size + wide)
        return (
            hidden_size * (self.channels + self.gates * wide + self.heads * self.rates) + low_rank + wide * hidden_size
        )


_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's ``hybrid_override_pattern``."""

RECURRENT = ("linear_attention", "mamba", "conv")
"""Types of recurrent layers."""

NONE_ATTENDS = "all layers are recurrent, so it has no KV cache to plan for, though an engine runs it"
"""The reason why a model with only recurrent layers is not planned."""

_ALONE = ("mlp", "moe")
"""Types of layers that consist of an MLP only."""


@dataclass(frozen=True)
class HybridLayers:
    """Counts of layers that R-workers compute, ``attending`` and ``recurrent``, and of those with an MLP."""

    attending: int
    recurrent: int
    mlps: int
    experts: bool = True


def read_hybrid_layers(config: Mapping[str, Any], name: str) -> HybridLayers | None:
    """Count the layers in a transformers configuration; return None if none is recurrent.

    Raise UnsupportedModelError for a hybrid that the equations do not cover.
    """
    kinds = Counter(_kinds(config))
    recurrent = sum(kinds[kind] for kind in RECURRENT)
    num_layers = kinds.total()
    if not recurrent:
        return None
    if config.get("model_type") == "falcon_h1":  # each layer has attention beside a recurrence, then an MLP
        return HybridLayers(num_layers, num_layers, num_layers)
    if config.get("model_type") == "zamba2":  # all layers are recurrent; some also attend and have an MLP
        return HybridLayers(kinds["hybrid"], num_layers, kinds["hybrid"])
    alone = sum(kinds[kind] for kind in _ALONE)
    if alone and kinds["mlp"] and kinds["moe"]:
        raise UnsupportedModelError(f"{name}: layers of one MLP beside layers of experts are not in the equations")
    attending = num_layers - recurrent - alone
    if not attending:
        raise UnsupportedModelError(f"{name}: {NONE_ATTENDS}")
    return HybridLayers(attending, recurrent, alone or num_layers, not alone or kinds["moe"] > 0)


def has_kinds(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` says which of the model's layers are recurrent."""
    return bool(_kinds(config))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    if pattern := config.get("hybrid_override_pattern"):
        return [_PATTERN.get(letter, letter) for letter in pattern]
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return list(kinds)
    if config.get("model_type") == "falcon_h1":
        return ["linear_attention"] * config["num_hidden_layers"]
    if config.get("model_type") == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        return [
            "full_attention" if layer % period == offset else "mamba" for layer in range(config["num_hidden_layers"])
        ]
    # RecurrentGemma's names of layers, and the usual names
    blocks = {"recurrent": "mamba", "attention": "full_attention"}
    if config.get("model_type") == "recurrent_gemma":  # the list of layers repeats a pattern
        pattern = config.get("block_types") or ("recurrent", "recurrent", "attention")
        return [blocks.get(pattern[layer % len(pattern)], "") for layer in range(config["num_hidden_layers"])]
    if config.get("model_type") == "bamba":
        attending = config.get("attn_layer_indices") or ()
        layers = range(config["num_hidden_layers"])
        return ["full_attention" if layer in attending else "mamba" for layer in layers]
    return []


def read_state_shape(config: Mapping[str, Any], num_layers: int, name: str) -> StateShape:
    """Return the ``num_layers`` recurrent layers in a transformers configuration.

    Raise KeyError for a missing size, UnsupportedModelError for a recurrence that the equations do not cover.
    """
    if config.get("model_type") == "minimax":  # lightning attention: no convolution, rates of 1
        heads, dim = config["num_attention_heads"], config.get("head_dim") or 0
        dim = dim or config["hidden_size"] // heads
        return StateShape(num_layers, heads, dim, heads, dim, taps=1, rates=0)
    if config.get("model_type") == "jamba":
        wide, rank = config["mamba_expand"] * config["hidden_size"], config["mamba_dt_rank"]
        rank = -(-config["hidden_size"] // 16) if rank == "auto" else rank
        taps = config["mamba_d_conv"]
        return StateShape(num_layers, 1, wide, 1, config["mamba_d_state"], taps, gate_rank=rank, by_channel=True)
    if config.get("model_type") == "recurrent_gemma":  # gates in blocks, one per head
        wide, rank = config["lru_width"], config["lru_width"] // config["num_attention_heads"]
        return StateShape(num_layers, 1, wide, 0, 1, config["conv1d_width"], gate_rank=rank, by_channel=True)
    if "linear_num_value_heads" in config:  # gated delta rule
        return StateShape(
            num_layers, config["linear_num_value_heads"], config["linear_value_head_dim"],
            config["linear_num_key_heads"], config["linear_key_head_dim"], config["linear_conv_kernel_dim"],
        )  # fmt: skip
    if "linear_num_heads" in config:  # Kimi's delta rule with a decay per channel
        heads, dim = config["linear_num_heads"], config["linear_head_dim"]
        taps = config["linear_conv_kernel_dim"]
        return StateShape(num_layers, heads, dim, heads, dim, taps, decays=dim, gates=0, rates=1, gate_rank=dim)
    if "mamba_n_heads" in config:  # Mamba-2
        return StateShape(
            num_layers, config["mamba_n_heads"], config["mamba_d_head"], config["mamba_n_groups"],
            config["mamba_d_state"], config["mamba_d_conv"], rates=1,
        )  # fmt: skip
    if "mamba_headdim" in config:  # Mamba-2 in Zamba2
        return StateShape(
            num_layers, config["n_mamba_heads"], config["mamba_headdim"], config["mamba_ngroups"],
            config["mamba_d_state"], config["mamba_d_conv"], rates=1,
        )  # fmt: skip
    if "mamba_num_heads" in config:  # Mamba-2 in Nemotron-H
        return StateShape(
            num_layers, config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"],
            config["ssm_state_size"], config["conv_kernel"], rates=1,
        )  # fmt: skip
    if "conv_L_cache" in config:  # gated short convolution: two gates besides the convolution
        return StateShape(num_layers, 1, config["hidden_size"], taps=config["conv_L_cache"], gates=2, rates=0)
    raise UnsupportedModelError(f"{name}: a recurrent state ({config.get('model_type')}) is not in the equations")
