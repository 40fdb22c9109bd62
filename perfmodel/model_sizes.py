"""The sizes of a transformer, and the numbers of parameters and bytes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.index_shape import IndexShape
from fastdecode.perfmodel.latent_shape import LatentShape
from fastdecode.perfmodel.state_shape import StateShape

FORMATS = {
    "fp8": 8.02,
    "mxfp4": 4.25,
    "awq": 4.16,
    "gptq": 4.16,
    "int8": 8.06,
    "gguf-q8_0": 8.5,
    "gguf-q6_k": 6.56,
    "gguf-q5_k_m": 5.7,
    "gguf-q4_k_m": 4.85,
    "gguf-q4_0": 4.5,
}
"""Bits per stored weight by quantization format, with the scales.

Scales are per block of 128 x 128 (fp8) or 32 (mxfp4), per group of 128 (awq, gptq), or per row (int8). GGUF's are
llama.cpp's. Embeddings and head keep the model's dtype.
"""

KEPT_PACKED = frozenset(("fp8", "mxfp4", "awq", "gptq", "int8"))
"""Formats that an S-worker on one GPU keeps packed (`sworker/model/packing.py`); it unpacks GGUF while reading."""


def format_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the key of FORMATS that a ``quantization_config`` means; None for a format that FORMATS lacks."""
    method = str(quantization.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, Mapping)}
        return "int8" if bits == {8} else "gptq" if bits == {4} else None
    if method in ("awq", "gptq") and quantization.get("bits", 4) != 4:
        return "int8" if quantization.get("bits") == 8 else None
    return method if method in FORMATS else None


@dataclass(frozen=True)
class ModelSizes:
    """A decoder-only transformer, dense or with mixtures of experts. Norms and biases (below 0.1 %) are left out.

    ``mlp_matrices``: 3 if the MLP is gated, else 2. ``num_experts``: copies of the MLP, of which each token uses
    ``experts_per_token``. ``shared_intermediate_size``: width of a further MLP for every token. ``dtype``: of the
    weights and of q, k, v, o. ``windows``: tokens that a query sees in each layer, 0 for all; if ``chunked``, lengths
    of chunks: a query sees its own chunk up to itself; empty if all layers see all. ``latent``: the sizes of latent
    attention, whose rows are the keys of one KV head. ``index``: the index that picks the tokens which queries see; its
    picks count as windows. ``dense_layers``: layers with one MLP of ``dense_intermediate_size`` instead of experts.
    ``state``: the recurrent layers, which count in ``num_layers``; the others attend, and have the windows.
    ``mlp_layers``: the number of MLPs, if not every layer has one. ``gated_attention``: queries are projected twice,
    for a gate of the output. ``beside_attention``: parameters of an attending layer beyond its projections and MLP.
    ``max_context``: the longest context that the model was made for; 0 if unknown. ``weight_bits``: bits of a stored
    weight; 0 for those of ``dtype``. ``multiplies_int8``: linear layers multiply int8 codes, so times measured
    with ``dtype`` do not apply.
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
    windows: tuple[int, ...] = ()
    chunked: bool = False
    latent: LatentShape | None = None
    dense_layers: int = 0
    dense_intermediate_size: int = 0
    index: IndexShape | None = None
    state: StateShape | None = None
    mlp_layers: int = 0
    gated_attention: bool = False
    beside_attention: int = 0
    max_context: int = 0
    weight_bits: float = 0.0
    multiplies_int8: bool = False

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for field in (*sizes, "vocab_size", "mlp_matrices", "num_experts", "experts_per_token"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self.name}: {field} must be a whole number of at least 1, not {value!r}")
        if not all(isinstance(each, int) and each >= 0 for each in self.windows):
            raise ConfigError(f"{self.name}: a window must be a whole number of tokens, not {self.windows!r:.80}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{self.name}: experts_per_token ({self.experts_per_token}) is above num_experts ({self.num_experts})"
            )
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{self.name}: dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}")

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of the mean layer's attention projections: 2·D·H·(N + K) for q, k, v and o.

        D: hidden size; H: head size; N, K: query and KV heads ("All About Transformer Inference", question 1).
        Projections of latents, of an index and of recurrent layers are included.
        """
        if self.latent:
            own = self.latent.parameters(self.hidden_size, self.num_heads)
        else:
            heads = self.num_heads * (3 if self.gated_attention else 2) + 2 * self.num_kv_heads
            own = self.hidden_size * self.head_dim * heads
        of_layers = self.attention_layers * (own + self.beside_attention)
        for beside in (self.index, self.state):
            of_layers += beside.num_layers * beside.parameters(self.hidden_size) if beside else 0
        return of_layers // self.num_layers

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters of one layer's MLP, or of one expert: 3·D·F if gated, with hidden size D and width F."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer with all its experts."""
        return self.attention_parameters + self._of_mlps(self.num_experts * self.mlp_parameters)

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of one layer that one token uses."""
        return self.attention_parameters + self._of_mlps(self.experts_per_token * self.mlp_parameters)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, which every sampled row uses: hidden size times vocabulary size."""
        return self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model: L·D·(3F + 2H(N + K)) + D·V if it is dense and gated, with tied embeddings."""
        return self._all_layers(self.layer_parameters) + self._vocabulary_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, with both embeddings."""
        return self._all_layers(self.active_layer_parameters) + self._vocabulary_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all the model's weights as stored."""
        vocabulary = self._vocabulary_parameters * self.item_bytes
        return vocabulary + round((self.parameters - self._vocabulary_parameters) * self.layer_item_bytes)

    @property
    def layer_item_bytes(self) -> float:
        """Bytes per stored weight in a layer, with the scales of quantization."""
        return self.weight_bits / 8 if self.weight_bits else self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes per element of the model's dtype: of unquantized weights, and of q, k, v and o."""
        return ITEM_BYTES[self.dtype]

    @property
    def attention_layers(self) -> int:
        """The number of layers that attend; the other layers are recurrent."""
        return self.num_layers - (self.state.num_layers if self.state else 0)

    def _all_layers(self, layer_parameters: int) -> int:
        """Return the number of parameters of all layers if each layer that is not dense has ``layer_parameters``."""
        dense = self.attention_parameters + self.mlp_matrices * self.hidden_size * self.dense_intermediate_size
        return (self.num_layers - self.dense_layers) * layer_parameters + self.dense_layers * dense

    def _of_mlps(self, parameters: int) -> int:
        """Return the mean layer's MLP parameters if one MLP has ``parameters``; the shared MLP is added."""
        shared = self.mlp_matrices * self.hidden_size * self.shared_intermediate_size
        return (parameters + shared) * (self.mlp_layers or self.num_layers) // self.num_layers

    @property
    def _vocabulary_parameters(self) -> int:
        return self.head_parameters * (1 if self.tied_embeddings else 2)
