"""What a token takes in a KV cache: layers, their states and dtypes, and how floats travel between the sides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fastdecode.core.absorption import Absorption, weight_bytes

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of each model dtype."""

KV_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
"""Bits per element of each KV dtype, scales apart."""

INT4_GROUP_DIMS = 64
"""Dims of a token and head that share one int4 scale and zero."""

INT4_FIFTH_BIT_DIMS = 32
"""Dims of an int4 key whose codes' fifth bits share a word of 4 bytes: keys lose more by their rounding than values."""

MAX_HEAD_DIM = 1088
"""Most elements of a key, or a value, in one head."""


def is_quantized(kv_dtype: str) -> bool:
    """Say whether caches of ``kv_dtype`` ("auto" is the model's own) hold codes with scales."""
    return KV_BITS.get(kv_dtype, 16) < 16


KV_ROTATION: dict[str, Literal["", "hadamard"]] = {"int4": "hadamard"}
"""By which matrix caches of a dtype rotate keys, values and queries (rworker_cpp/src/kernels/rotate.hpp), if by any."""

WIRE_DTYPE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}
"""How numpy carries each dtype over the seam: 16-bit floats travel as their bits."""

STATE_KINDS = ("delta", "scan", "window", "selective", "lru")
"""Recurrences that R-workers know: gated delta rule, Mamba-2's scan, a convolution alone, Mamba-1's scan, and a linear
recurrence of each channel by itself."""


@dataclass(frozen=True)
class StateLayout:
    """A recurrent layer, in place of attention: what R-workers do with its rows, see rworker/state_spec.hpp.

    ``groups`` of heads share queries and keys of ``key_dim`` (0 and 0 for a "window", 0 and 1 for an "lru").
    ``taps``: tokens of the convolution before the recurrence. ``decays`` of a head: 1, or one per key dim. ``silu``:
    after the convolution; ``norm``: queries and keys have length 1. ``row_elements``: elements of the model's dtype
    that a row of the payload has, float32 numbers as their bits. ``filters``, ``bias``, ``skip`` and ``factors`` are
    float32 as bytes: [taps, channels] or none (one tap of 1), [channels] or none, [heads] or none, [key_dim, heads,
    value_dim] ("selective").
    ``kept_rows``: rows of a step, at most, that TRUNCATE may take back after it. ``dtype``: of the matrices, which are
    rounded to it after each token; windows of convolutions are float32. ``keeps_single``: a sequence's only row of a
    step counts among the rows that may be taken back where it attends, too.
    """

    kind: Literal["delta", "scan", "window", "selective", "lru"]
    groups: int
    key_dim: int
    taps: int
    decays: int
    silu: bool
    norm: bool
    row_elements: int
    filters: bytes = field(repr=False)
    bias: bytes = field(repr=False, default=b"")
    skip: bytes = field(repr=False, default=b"")
    factors: bytes = field(repr=False, default=b"")
    kept_rows: int = 0
    dtype: str = "float32"
    keeps_single: bool = False


@dataclass(frozen=True)
class LayerLayout:
    """Shape and scoring rule of one attention layer, or, with ``state``, of a recurrent one.

    ``window`` counts the tokens a query sees, itself included (0: all); where they are ``chunked`` it is the length of
    chunks, and a query sees those of its own from the chunk's first token on. ``soft_cap`` is 0 when absent.
    ``sinks`` holds one extra logit per query head, or is empty. ``alibi_slopes`` holds one slope per query head, or is
    empty: a score, scaled and capped, gains slope · (position of the key - position of the query).
    ``values_in_keys``: values are the first ``value_head_dim`` elements of the keys, and are neither sent nor stored;
    in caches of int8 and int4 these have codes, and the keys' other elements 16 bits.

    An index layer, which has ``picks``, does not attend; its o says nothing. It keeps index keys, in caches of int8 and
    int4 as bfloat16, and each of its
    queries picks the tokens that the layers after it see, those that name it, by its number, as ``picked_by`` (-1: a
    layer that sees all): at most ``picks`` tokens, by the sum of relu(scale · q · k) · weight over its heads; a weight
    is a float32 in the place of two more elements of q. Or, with ``pick_block``, each head, for the KV head of its
    number, picks ``picks`` blocks of so many tokens, by its largest q · k in each: first the query's own and those
    before it, ``pick_local`` blocks in all. Of a sequence in ranges each answers with the ranks of its best; which of
    these are the best of all it is told before the next layer (``PoolWorker.share``).

    ``absorption``: of a latent layer whose R-workers multiply K and V; None where the S-worker absorbs its queries and
    expands its outputs. It changes no token's keys and values, so layers are equal with and without it.
    """

    num_heads: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: tuple[float, ...] = ()
    alibi_slopes: tuple[float, ...] = ()
    values_in_keys: bool = False
    chunked: bool = False
    picks: int = 0
    pick_block: int = 0
    pick_local: int = 0
    picked_by: int = -1
    absorption: Absorption | None = field(default=None, compare=False, repr=False)

    state: StateLayout | None = None

    @property
    def query_dim(self) -> int:
        """Elements of q that travel for a token and head."""
        if self.absorption:
            return self.absorption.nope_dim + self.key_head_dim - self.value_head_dim
        return self.key_head_dim + (2 if self.picks and not self.pick_block else 0)

    @property
    def output_dim(self) -> int:
        """Elements of o that travel for a token and head."""
        return self.absorption.value_dim if self.absorption else self.value_head_dim

    @property
    def row_shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a row of q, k, v and o; a recurrent layer's rows travel as k."""
        output = self.num_heads, self.output_dim
        if self.state:
            return (1, 0), (1, self.state.row_elements), (1, 0), output
        key = self.num_kv_heads, self.key_head_dim
        return (self.num_heads, self.query_dim), key, (self.num_kv_heads, self.stored_value_dim), output

    @property
    def partial_shape(self) -> tuple[int, int]:
        """Shape of a row of partial results, float32; those of an index layer are the ranks of scores, uint32 as bits,
        of each head that picks by itself, the best first."""
        if self.picks:
            return (self.num_heads if self.pick_block else 1), self.picks
        return self.num_heads, 2 + self.output_dim

    @property
    def stored_value_dim(self) -> int:
        """Elements of V that travel and are stored for a token and KV head."""
        return 0 if self.values_in_keys else self.value_head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V one cached token holds in this layer."""
        return 0 if self.state else self.num_kv_heads * (self.key_head_dim + self.stored_value_dim)

    @property
    def products_per_element(self) -> float:
        """Multiply-adds of one query row for each cached element: query heads per KV head where K and V are stored."""
        return self.num_heads * (self.key_head_dim + self.value_head_dim) / self.kv_elements_per_token

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of K, V and their scales one cached token takes in this layer."""
        return 0 if self.state else self.num_kv_heads * sum(self.head_bytes(kv_dtype))

    def head_bytes(self, kv_dtype: str) -> tuple[int, int]:
        """Bytes of one cached token's K, and of its V, of one head, each with its scales."""
        if self.picks and is_quantized(kv_dtype):
            return 2 * self.key_head_dim, 0
        if self.values_in_keys and is_quantized(kv_dtype):
            return _row_bytes(self.value_head_dim, kv_dtype) + 2 * (self.key_head_dim - self.value_head_dim), 0
        fifth_bits = 4 * -(-self.key_head_dim // INT4_FIFTH_BIT_DIMS) if kv_dtype == "int4" else 0
        return _row_bytes(self.key_head_dim, kv_dtype) + fifth_bits, _row_bytes(self.stored_value_dim, kv_dtype)


@dataclass(frozen=True)
class KVLayout:
    """Everything an R-worker must know about a model: its layers and the dtypes of payload and cache.

    ``isa``: the instruction set in whose arithmetic it is to attend, one of ``ISAS``; "auto": the R-worker's fastest.
    ``kv_port``: whether it opens a KV port for prefill workers: "" (no), "loopback" (for those of its machine), "any".
    """

    layers: tuple[LayerLayout, ...]
    model_dtype: str
    kv_dtype: str
    isa: str = "auto"
    kv_port: Literal["", "loopback", "any"] = ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of K and V that an R-worker keeps beside its cache, over all layers that absorb there."""
        return sum(weight_bytes(layer, ITEM_BYTES[self.model_dtype]) for layer in self.layers)

    @property
    def absorbed(self) -> KVLayout:
        """The same, with queries that come absorbed, as those of prefill workers do."""
        return replace(self, layers=tuple(replace(layer, absorption=None) for layer in self.layers))

    @property
    def chunk_tokens(self) -> int:
        """Tokens of which ranges must be whole multiples, so that chunks begin alike in each; 1 without chunks."""
        return math.lcm(*(layer.window for layer in self.layers if layer.chunked))

    @property
    def has_states(self) -> bool:
        """True for a hybrid: some layers keep a state per sequence in place of keys and values."""
        return any(layer.state for layer in self.layers)

    def state_bytes(self, layer: int) -> int:
        """Bytes of the state of one sequence in recurrent layer ``layer``, as R-workers lay it in rows: see
        rworker/state_places.hpp."""
        spec, state = self.layers[layer], self.layers[layer].state
        if state is None:
            return 0
        wide = self._state_row_bytes
        taps = 2 * state.groups * -(-4 * state.key_dim // wide) + spec.num_heads * -(-4 * spec.value_head_dim // wide)
        return wide * ((state.taps - 1) * taps + spec.num_heads * state.key_dim)

    @property
    def state_dtype(self) -> str:
        """The dtype of states' matrices."""
        return next((layer.state.dtype for layer in self.layers if layer.state), "float32")

    def with_state_dtype(self, dtype: str) -> KVLayout:
        """The same with states' matrices in ``dtype``, a key of ``WIRE_DTYPE``."""
        return self._with_states(dtype=dtype)

    def keeping(self, num_rows: int) -> KVLayout:
        """The same, where states can go back behind rows of a step with 2 to ``num_rows`` of a sequence, second copies
        behind a single one too."""
        return self._with_states(kept_rows=num_rows)

    def outliving(self) -> KVLayout:
        """The same, where the states of sequences that decode can go back behind each step, and are not spoilt by one
        that was not ended."""
        rows = max(layer.state.kept_rows for layer in self.layers if layer.state) if self.has_states else 0
        return self._with_states(kept_rows=max(1, rows), keeps_single=True)

    def _with_states(self, **fields: Any) -> KVLayout:
        layers = (
            replace(layer, state=replace(layer.state, **fields)) if layer.state else layer for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K, V and their scales one token takes in the cache, over all layers."""
        return sum(layer.kv_bytes_per_token(self.kv_dtype) for layer in self.layers)

    @property
    def room_bytes_per_token(self) -> int:
        """Bytes that a block has for each of its tokens: where no layer attends, those of a row of states (see
        rworker/state_places.hpp)."""
        return self.kv_bytes_per_token or self._state_row_bytes

    @property
    def _state_row_bytes(self) -> int:
        """Bytes of a row of states: whole lines of 64."""
        return max(
            -(-layer.value_head_dim * WIRE_DTYPE[layer.state.dtype].itemsize // 64) * 64
            for layer in self.layers
            if layer.state
        )


def _row_bytes(dim: int, kv_dtype: str) -> int:
    """One token's keys or values of one head: int8 has a float32 scale, int4 a bfloat16 scale and zero per group."""
    scales = {"int8": 4 * (dim > 0), "int4": 4 * -(-dim // INT4_GROUP_DIMS)}.get(kv_dtype, 0)
    return -(-dim * KV_BITS[kv_dtype] // 8) + scales


def to_wire(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 ``values`` rounded to ``dtype``, to nearest even: float32, or uint16 bits of float16 or bfloat16."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_wire(payload: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of a payload; the inverse of :func:`to_wire`."""
    if dtype == "float32":
        return payload
    if dtype == "float16":
        return payload.view(np.float16).astype(np.float32)
    return (payload.astype(np.uint32) << 16).view(np.float32)
