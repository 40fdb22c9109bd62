"""The sizes of a transformer that decide its speed, by name or from a transformers ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.core.types import ITEM_BYTES, KVLayout, LayerLayout
from fastdecode.perfmodel.latent_shape import LatentShape, read_latent_shape

_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size",),
}

_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

_PLAIN_MLP = {
    "opt",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "phi",
    "starcoder2",
    "falcon",
    "bloom",
    "mpt",
    "gptj",
}
"""Model types whose MLP has two matrices; all others are taken as gated."""

_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Model types whose layers attend in a window but for each second, fourth, sixth, where the file does not say."""

_RECURRENT = ("mamba_", "ssm_", "linear_conv", "conv_L_cache", "state_size", "attention_hidden_size", "lru_width")
"""Beginnings of keys that recurrent models have, and hybrids of them."""

_RECURRENT_KINDS = ("rwkv", "xlstm", "recurrent_gemma")

_ENCODERS = ("bert", "electra", "mpnet", "clip")
"""Parts of the types of models that attend in both directions, unless they say that they are decoders."""

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes that generate text."""

_TIED = {"opt", "gpt2", "gpt_bigcode", "gpt_neo", "gemma", "gemma2", "gemma3", "gemma3_text", "falcon", "bloom", "mpt"}
"""Model types that tie input and output embeddings where the file does not say."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer, dense or a mixture of experts; norms and biases (below 0.1 %) are left out.

    ``mlp_matrices``: 3 where the MLP is gated, else 2. ``num_experts`` copies of the MLP exist, of which each token
    visits ``experts_per_token``; ``shared_intermediate_size`` is the width of a further MLP that every token visits.
    ``dtype``: of the weights and of q, k, v, o. ``windows``: tokens that a query sees in each layer, 0 for all; empty
    where all layers see all. ``latent``: the sizes of latent attention, whose rows are the keys of one KV head.
    ``dense_layers`` of the layers have one MLP of ``dense_intermediate_size`` in place of experts.
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
    latent: LatentShape | None = None
    dense_layers: int = 0
    dense_intermediate_size: int = 0

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

    def with_kv_heads(self, num_kv_heads: int) -> ModelShape:
        """Return this model with another number of KV heads."""
        return replace(self, num_kv_heads=num_kv_heads)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_parameters(self) -> int:
        """One layer's q, k, v and o projections have 2·D·H·(N + K) ("All About Transformer Inference", Question 1)."""
        if self.latent:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """One layer's MLP, or one of several experts, has 3·D·F when gated (Question 1)."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """One layer has these parameters with all its experts (Question 5)."""
        return self.attention_parameters + self.num_experts * self.mlp_parameters + self._shared_parameters

    @property
    def active_layer_parameters(self) -> int:
        """One token meets these parameters of one layer (Question 5)."""
        return self.attention_parameters + self.experts_per_token * self.mlp_parameters + self._shared_parameters

    @property
    def head_parameters(self) -> int:
        """The output projection, which every sampled row meets, has D·V."""
        return self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """The whole model has L·D·(3F + 2H(N + K)) + D·V when dense, gated and tied (Question 1)."""
        return self._all_layers(self.layer_parameters) + self._vocabulary_parameters

    @property
    def active_parameters(self) -> int:
        """One token meets these parameters, both embeddings counted (Question 5)."""
        return self._all_layers(self.active_layer_parameters) + self._vocabulary_parameters

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
        """One layer as an R-worker sees it, with a cache of the model's dtype."""
        return self.layer_in(self.dtype)

    def layer_in(self, kv_dtype: str) -> LayerLayout:
        """One layer as an R-worker with a cache of ``kv_dtype`` sees it."""
        if self.latent:
            return self.latent.layer_layout(self.num_heads, kv_dtype)
        return LayerLayout(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)

    def kv_layout(self, kv_dtype: str) -> KVLayout:
        """All layers as an R-worker sees them."""
        return KVLayout((self.layer_in(kv_dtype),) * self.num_layers, self.dtype, kv_dtype)

    @property
    def attending_row_bytes(self) -> int:
        """Bytes of q, k, v and o of one row and layer on the link: (2·N + 2·K)·H elements (FastDecode, section 3)."""
        layer = self.layer_layout
        return (
            layer.num_heads * (layer.key_head_dim + layer.value_head_dim) * self.item_bytes + self.appending_row_bytes
        )

    @property
    def appending_row_bytes(self) -> int:
        """Bytes of k and v alone: a prompt's row that attends on the S-worker."""
        return self.layer_layout.kv_elements_per_token * self.item_bytes

    def _all_layers(self, layer_parameters: int) -> int:
        """Parameters of all layers, of which all but the dense ones have so many."""
        dense = self.attention_parameters + self.mlp_matrices * self.hidden_size * self.dense_intermediate_size
        return (self.num_layers - self.dense_layers) * layer_parameters + self.dense_layers * dense

    @property
    def _shared_parameters(self) -> int:
        return self.mlp_matrices * self.hidden_size * self.shared_intermediate_size

    @property
    def _vocabulary_parameters(self) -> int:
        return self.head_parameters * (1 if self.tied_embeddings else 2)


_LLAMA_7B = ModelShape("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, dtype="float16")
_LLAMA_70B = ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, dtype="float16")
_MISTRAL_7B = ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000)
_OPT_175B = ModelShape("opt-175b", 96, 12288, 49152, 96, 96, 128, 50272, 2, True, dtype="float16")

_DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", 61, 7168, 2048, 128, 1, 576, 129280, num_experts=256, experts_per_token=8,
    shared_intermediate_size=2048, latent=LatentShape(512, 1536, 128, 64, 128), dense_layers=3,
    dense_intermediate_size=18432,
)  # fmt: skip
"""config.json of deepseek-ai/DeepSeek-V3, and of R1; weights in bfloat16 (published in FP8)."""

_KIMI_K2 = replace(_DEEPSEEK_V3, name="kimi-k2", num_heads=64, vocab_size=163840, num_experts=384, dense_layers=1)
"""config.json of moonshotai/Kimi-K2-Instruct, likewise."""

BUILT_IN = {
    shape.name: shape
    for shape in (
        _LLAMA_7B,
        ModelShape("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, dtype="float16"),
        ModelShape("llama-65b", 80, 8192, 22016, 64, 64, 128, 32000, dtype="float16"),
        _LLAMA_70B,
        ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        replace(_LLAMA_70B, name="llama-3-70b", vocab_size=128256, dtype="bfloat16"),
        _MISTRAL_7B,
        replace(_MISTRAL_7B, name="mixtral-8x7b", num_experts=8, experts_per_token=2),
        ModelShape("yi-34b", 60, 7168, 20480, 56, 8, 128, 64000),
        ModelShape("falcon-7b", 32, 4544, 18176, 71, 1, 64, 65024, 2, True),
        ModelShape("falcon-40b", 60, 8192, 32768, 128, 8, 64, 65024, 2, True),
        ModelShape("falcon-180b", 80, 14848, 59392, 232, 8, 64, 65024, 2, True),
        ModelShape("opt-6.7b", 32, 4096, 16384, 32, 32, 128, 50272, 2, True, dtype="float16"),
        _OPT_175B,
        _DEEPSEEK_V3,
        _KIMI_K2,
    )
}
"""The models of the papers, and the sizes one meets most."""


def find_shape(name_or_path: str) -> ModelShape:
    """The shape of a built-in name, a model folder or a ``config.json``; ModelLoadError when there is none."""
    built_in = BUILT_IN.get(name_or_path.lower())
    if built_in:
        return built_in
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelLoadError(
            f"{name_or_path}: no such model folder or config.json, and not one of the names known here "
            f"({', '.join(BUILT_IN)})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return read_shape(config, name_or_path)


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape a transformers configuration describes.

    ModelLoadError names a missing key; UnsupportedModelError a kind of attention or weights the equations do not know.
    """
    whole, config = config, config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"{name}: text_config must be a JSON object, not {config!r}")
    if unknown := _unknown_kind(whole) or _unknown_kind(config):
        raise UnsupportedModelError(f"{name}: {unknown}")
    _check_layer_types(config, name)
    sizes = {field: _first(config, keys, name) for field, keys in _KEYS.items()}
    num_experts = next((config[key] for key in _EXPERTS if config.get(key)), 1)
    kind = config.get("model_type", "")
    try:
        latent = read_latent_shape(config, name)
        dense_layers = _dense_layers(config) if num_experts > 1 else 0
        return ModelShape(
            name=name,
            **sizes,
            num_kv_heads=1 if latent else _num_kv_heads(config, sizes["num_heads"]),
            head_dim=latent.row_dim if latent else _head_dim(config, sizes),
            intermediate_size=_intermediate_size(config, sizes["hidden_size"], num_experts > 1),
            mlp_matrices=2 if kind in _PLAIN_MLP else 3,
            tied_embeddings=config.get("tie_word_embeddings", kind in _TIED),
            num_experts=num_experts,
            experts_per_token=config.get("num_experts_per_tok") or config.get("experts_per_token") or 1,
            shared_intermediate_size=_shared_intermediate_size(config),
            dtype=_dtype(config),
            windows=_windows(config, sizes["num_layers"]),
            latent=latent,
            dense_layers=dense_layers,
            dense_intermediate_size=config["intermediate_size"] if dense_layers else 0,
        )
    except (TypeError, KeyError, ZeroDivisionError, ConfigError) as error:
        raise ModelLoadError(f"{name}: the configuration cannot be right: {error}") from None


def _unknown_kind(config: Mapping[str, Any]) -> str | None:
    """Return why the equations do not know a model, None where nothing says so."""
    kind, classes = str(config.get("model_type") or "model"), config.get("architectures") or ()
    has_state = kind in _RECURRENT_KINDS or any(key.startswith(_RECURRENT) for key in config)
    if has_state and "layer_types" not in config:
        return f"a recurrent state ({kind}) is not in the equations"
    if config.get("is_encoder_decoder"):
        return "encoder–decoder is not in the equations"
    if classes and not any(str(each).endswith(_GENERATES) for each in classes):
        return f"{classes[0]} generates no text, so it has no KV cache to plan for"
    if not classes and any(part in kind for part in _ENCODERS) and not config.get("is_decoder"):
        return f"{kind} generates no text, so it has no KV cache to plan for"
    if config.get("num_kv_shared_layers"):
        return "layers that share a cache (num_kv_shared_layers) are not in the equations"
    if config.get("quantization_config"):
        return "quantized weights are not in the equations; plan with the plain model"
    return None


def _check_layer_types(config: Mapping[str, Any], name: str) -> None:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list | tuple) or not all(isinstance(each, str) for each in layer_types):
        raise ModelLoadError(f"{name}: layer_types must be a list of names, one per layer, not {layer_types!r}")
    if kinds := set(layer_types) - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise UnsupportedModelError(f"{name}: {', '.join(sorted(kinds))} is not in the equations")


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer, where one has any; a chunk counts as a window of its length."""
    window = (config.get("use_sliding_window") is not False and config.get("sliding_window")) or 0
    sees = {"sliding_attention": window, "chunked_attention": config.get("attention_chunk_size") or 0}
    every = config.get("sliding_window_pattern") or _PATTERNS.get(config.get("model_type", ""), num_layers + 1)
    first = config.get("max_window_layers") or 0
    windows = [0 if index < first or (index + 1) % every == 0 else window for index in range(num_layers)]
    if config.get("layer_types"):
        windows = [sees.get(each, 0) for each in config["layer_types"]]
    return tuple(windows) if any(windows) else ()


def _first(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        if config.get(key):
            return config[key]
    raise ModelLoadError(f"{name}: the configuration has no {' or '.join(keys)}")


def _head_dim(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    return config.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Layers without experts in a model that has them elsewhere."""
    kinds = config.get("mlp_layer_types")
    return list(kinds).count("dense") if kinds else config.get("first_k_dense_replace") or 0


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """Falcon's new architecture has groups of queries, whatever its ``multi_query`` says."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or num_heads


def _intermediate_size(config: Mapping[str, Any], hidden_size: int, has_experts: bool) -> int:
    if has_experts and config.get("moe_intermediate_size"):
        return config["moe_intermediate_size"]
    given = next((config[key] for key in _INTERMEDIATE if config.get(key)), None)
    return given or config.get("expansion_ratio", 4) * hidden_size


def _shared_intermediate_size(config: Mapping[str, Any]) -> int:
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    return config.get("shared_expert_intermediate_size") or shared


def _dtype(config: Mapping[str, Any]) -> str:
    """The file's dtype; bfloat16 where it names none that the S-worker can have."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ITEM_BYTES else "bfloat16"
