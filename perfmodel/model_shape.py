"""The sizes of a transformer that decide its speed, and those of the models that are known by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.errors import ConfigError
from fastdecode.core.types import ITEM_BYTES, KVLayout, LayerLayout
from fastdecode.perfmodel.index_shape import IndexShape
from fastdecode.perfmodel.latent_shape import LatentShape


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer, dense or a mixture of experts; norms and biases (below 0.1 %) are left out.

    ``mlp_matrices``: 3 where the MLP is gated, else 2. ``num_experts`` copies of the MLP exist, of which each token
    visits ``experts_per_token``; ``shared_intermediate_size`` is the width of a further MLP that every token visits.
    ``dtype``: of the weights and of q, k, v, o. ``windows``: tokens that a query sees in each layer, 0 for all; empty
    where all layers see all. ``latent``: the sizes of latent attention, whose rows are the keys of one KV head.
    ``index``: of the index that picks the tokens which queries see; these count as windows. ``dense_layers`` of the
    layers have one MLP of ``dense_intermediate_size`` in place of experts.
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
    index: IndexShape | None = None

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
        """The mean layer's projections have 2·D·H·(N + K) ("All About Transformer Inference", Question 1): q, k, v, o.

        What latents are projected by and what an index has is counted too.
        """
        of_index = self.index.num_layers * self.index.parameters(self.hidden_size) if self.index else 0
        if self.latent:
            return self.latent.parameters(self.hidden_size, self.num_heads) + of_index // self.num_layers
        heads = self.num_heads + self.num_kv_heads
        return 2 * self.hidden_size * self.head_dim * heads + of_index // self.num_layers

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
        """One layer as an R-worker sees it."""
        if self.latent:
            return self.latent.layer_layout(self.num_heads)
        return LayerLayout(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)

    def kv_layout(self, kv_dtype: str) -> KVLayout:
        """All layers as an R-worker sees them."""
        return KVLayout((self.layer_layout,) * self.num_layers, self.dtype, kv_dtype)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes that one token takes in the cache over all layers, the keys of an index included."""
        return self.kv_layout(kv_dtype).kv_bytes_per_token + self._index_bytes

    def read_share(self, kv_dtype: str, row_share: float) -> float:
        """Return the part of the cache's bytes that a step reads, of whose rows the mean layer reads ``row_share``.

        An index scans all of its keys.
        """
        rows = self.kv_layout(kv_dtype).kv_bytes_per_token
        return (row_share * rows + self._index_bytes) / (rows + self._index_bytes)

    @property
    def attending_row_bytes(self) -> int:
        """Bytes of q, k, v and o of one row and layer on the link: (2·N + 2·K)·H elements (FastDecode, section 3).

        Of the mean layer, with the queries and the key of an index.
        """
        layer, of_index = self.layer_layout, 0
        if self.index:
            of_index = self.index.num_layers * self.index.num_heads * self.index.head_dim // self.num_layers
        queries = layer.num_heads * (layer.key_head_dim + layer.value_head_dim) + of_index
        return queries * self.item_bytes + self.appending_row_bytes

    @property
    def appending_row_bytes(self) -> int:
        """Bytes of k and v alone: a prompt's row that attends on the S-worker."""
        return self.layer_layout.kv_elements_per_token * self.item_bytes + self._index_bytes // self.num_layers

    @property
    def _index_bytes(self) -> int:
        return self.index.kv_bytes_per_token(self.dtype) if self.index else 0

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
_LLAMA_3_70B = replace(_LLAMA_70B, name="llama-3-70b", vocab_size=128256, dtype="bfloat16")
_MISTRAL_7B = ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000)
_OPT_175B = ModelShape("opt-175b", 96, 12288, 49152, 96, 96, 128, 50272, 2, True, dtype="float16")

_DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", 61, 7168, 2048, 128, 1, 576, 129280, num_experts=256, experts_per_token=8,
    shared_intermediate_size=2048, latent=LatentShape(512, 1536, 128, 64, 128), dense_layers=3,
    dense_intermediate_size=18432,
)  # fmt: skip
"""transformers' DeepseekV3Config, and so of R1; weights in bfloat16 (published in FP8)."""

_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3, name="deepseek-v3.2", windows=(2048,) * 61, index=IndexShape(61, 64, 128, 2048, 1536)
)
"""transformers' DeepseekV32Config."""

_KIMI_K2 = replace(_DEEPSEEK_V3, name="kimi-k2", num_heads=64, vocab_size=163840, num_experts=384, dense_layers=1)
"""config.json of moonshotai/Kimi-K2-Instruct, from memory."""

_GLM_5 = ModelShape(
    "glm-5", 78, 6144, 2048, 64, 1, 576, 154880, num_experts=256, experts_per_token=8, shared_intermediate_size=2048,
    latent=LatentShape(512, 2048, 192, 64, 256), dense_layers=3, dense_intermediate_size=12288, windows=(2048,) * 78,
    index=IndexShape(78, 32, 128, 2048, 2048),
)  # fmt: skip
"""transformers' GlmMoeDsaConfig, which is the technical report's table; every layer has an index of its own."""

_MINIMAX_M3 = ModelShape(
    "minimax-m3", 60, 6144, 3072, 64, 4, 128, 200064, num_experts=128, experts_per_token=4,
    shared_intermediate_size=3072, dense_layers=3, dense_intermediate_size=12288, windows=(0,) * 3 + (2048,) * 57,
    index=IndexShape(57, 4, 128, 2048, weighs_heads=False),
)  # fmt: skip
"""transformers' MiniMaxM3VLTextConfig; that its first three layers are dense and see all is from memory."""

_QWEN3_235B = ModelShape("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 128, 151936, num_experts=128, experts_per_token=8)
"""THUDM/slime, scripts/models/qwen3-235B-A22B.sh."""

_GPT_OSS_120B = ModelShape(
    "gpt-oss-120b", 36, 2880, 2880, 64, 8, 64, 201088, num_experts=128, experts_per_token=4, windows=(128, 0) * 18
)
"""transformers' GptOssConfig; weights in bfloat16 (published in MXFP4)."""

_LLAMA_4_SCOUT = ModelShape(
    "llama-4-scout", 48, 5120, 8192, 40, 8, 128, 202048, num_experts=16, shared_intermediate_size=8192,
    windows=(8192, 8192, 8192, 0) * 12,
)  # fmt: skip
"""transformers' Llama4TextConfig; Maverick is the same with experts in every other layer, from memory."""

BUILT_IN = {
    shape.name: shape
    for shape in (
        _LLAMA_7B,
        ModelShape("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, dtype="float16"),
        ModelShape("llama-65b", 80, 8192, 22016, 64, 64, 128, 32000, dtype="float16"),
        _LLAMA_70B,
        ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        _LLAMA_3_70B,
        replace(_LLAMA_3_70B, name="llama-3.3-70b"),
        _MISTRAL_7B,
        replace(_MISTRAL_7B, name="mixtral-8x7b", num_experts=8, experts_per_token=2),
        ModelShape("mistral-small", 40, 5120, 32768, 32, 8, 128, 131072),  # 3.x, 24B: transformers' Mistral3Config
        ModelShape("yi-34b", 60, 7168, 20480, 56, 8, 128, 64000),
        ModelShape("falcon-7b", 32, 4544, 18176, 71, 1, 64, 65024, 2, True),
        ModelShape("falcon-40b", 60, 8192, 32768, 128, 8, 64, 65024, 2, True),
        ModelShape("falcon-180b", 80, 14848, 59392, 232, 8, 64, 65024, 2, True),
        ModelShape("opt-6.7b", 32, 4096, 16384, 32, 32, 128, 50272, 2, True, dtype="float16"),
        _OPT_175B,
        ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),  # from memory
        _QWEN3_235B,
        _LLAMA_4_SCOUT,
        replace(
            _LLAMA_4_SCOUT, name="llama-4-maverick", num_experts=128, dense_layers=24, dense_intermediate_size=16384
        ),
        _GPT_OSS_120B,
        _DEEPSEEK_V3,
        _DEEPSEEK_V32,
        _KIMI_K2,
        _GLM_5,
        _MINIMAX_M3,
    )
}
"""The models of the papers, and the sizes one meets most."""
