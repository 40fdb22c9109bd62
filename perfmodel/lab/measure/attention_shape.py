"""The shape of one row of ``bench attention``: heads, lengths, dtype, threads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fastdecode.core.dtypes import is_quantized
from fastdecode.core.errors import ConfigError
from fastdecode.kinds import Dense, Index, Latent, Layer
from fastdecode.kinds.kind import MAX_HEAD_DIM
from fastdecode.kinds.layout import KVLayout

BLOCK_SIZE = 64
"""Tokens per block of the measured cache."""

MAX_BATCH_SIZE = 1 << 20
"""Largest batch size; a higher one is taken for a typing error, and "auto" stops here."""


@dataclass(frozen=True)
class ContextLen:
    """Tokens that a sequence attends to, drawn uniformly from ``low`` to ``high``.

    Both are equal for a fixed length.
    """

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> ContextLen:
        """Return the length of "1024", or the range of "1-8192"."""
        match = re.fullmatch(r"([1-9]\d{0,11})(?:-([1-9]\d{0,11}))?", text.strip())
        found = cls(int(match[1]), int(match[2] or match[1])) if match else None
        if found is None or found.low > found.high:
            raise ConfigError(f"context_len must be a number of tokens, or LOW-HIGH such as 1-8192, not {text!r}")
        return found

    @property
    def label(self) -> int | str:
        """The length as the user wrote it: a number, or "LOW-HIGH"."""
        return self.low if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention call in one layer.

    ``context_len`` includes the ``q_len`` new tokens of each sequence. ``batch_size``: None to choose it.
    ``shared_prefix_len``: first tokens that all sequences share. ``latent_dim``: width of a value that is the first
    part of its key and not stored; 0 means stored values as wide as keys. ``index_picks``: tokens that a
    sparse-attention index picks; 0 for ordinary attention.
    """

    isa: str
    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: ContextLen
    batch_size: int | None
    q_len: int
    threads: int
    shared_prefix_len: int = 0
    latent_dim: int = 0
    index_picks: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "q_len", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.batch_size is not None and not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise ConfigError(f"batch_size must be 1 to {MAX_BATCH_SIZE}, not {self.batch_size}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.index_picks and (self.num_kv_heads > 1 or self.latent_dim):
            raise ConfigError(f"index_picks {self.index_picks}: an index has num_kv_heads 1 and latent_dim 0")
        is_bounded = is_quantized(self.kv_cache_dtype) and not (self.latent_dim or self.index_picks)
        # R-workers accept head sizes up to this for int8 and int4
        max_quantized_head_dim = 512
        most = max_quantized_head_dim if is_bounded else MAX_HEAD_DIM
        if self.head_dim > most:
            raise ConfigError(f"head_dim must be at most {most}, not {self.head_dim}")
        if self.latent_dim > self.head_dim:
            raise ConfigError(f"latent_dim must be at most head_dim ({self.head_dim}), not {self.latent_dim}")
        if not 0 <= self.shared_prefix_len <= self.context_len.low - self.q_len:
            raise ConfigError(
                f"context_len {self.context_len.label} must hold q_len ({self.q_len}) new tokens after "
                f"shared_prefix_len ({self.shared_prefix_len})"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def beside(self) -> AttentionShape | None:
        """This shape with a bfloat16 cache, for comparison; None if the cache is bfloat16 already."""
        return None if self.kv_cache_dtype == "bfloat16" else replace(self, kv_cache_dtype="bfloat16")

    @property
    def model_dtype(self) -> str:
        """The dtype of q, k, v and o: the cache's if it is a float, else bfloat16."""
        return "bfloat16" if is_quantized(self.kv_cache_dtype) else self.kv_cache_dtype

    @property
    def arithmetic_dtype(self) -> str:
        """The dtype of attention's multiply-adds.

        It is the cache's dtype for keys and values, and the model's for latents and for an index.
        """
        return self.model_dtype if self.latent_dim or self.index_picks else self.kv_cache_dtype

    @property
    def layout(self) -> KVLayout:
        """The cache layout of the single layer that is measured."""
        return KVLayout((self._layer,), self.model_dtype, self.kv_cache_dtype)

    @property
    def _layer(self) -> Layer:
        dim, heads, kv_heads = self.head_dim, self.num_heads, self.num_kv_heads
        if self.index_picks:
            return Index(heads, dim, dim**-0.5, self.index_picks)
        if self.latent_dim:
            return Latent(heads, kv_heads, dim, self.latent_dim, dim**-0.5)
        return Dense(heads, kv_heads, dim, dim, dim**-0.5)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's keys and values in one KV head, which are contiguous."""
        return self.layout.kv_bytes_per_token * BLOCK_SIZE // self.num_kv_heads

    @property
    def shared_tokens(self) -> int:
        """Prefix tokens in blocks that all sequences share. A prefix's last, partial block is copied instead."""
        return self.shared_prefix_len // BLOCK_SIZE * BLOCK_SIZE

    @property
    def multiply_adds_per_token(self) -> int:
        """Multiply-adds of one query token and one cached token over all heads.

        They are of key and value; an index has only a key.
        """
        return self._layer.multiply_adds()

    def lengths(self, cache_bytes: int, seed: int) -> np.ndarray:
        """Return the tokens of each sequence, int64 [batch_size].

        Without ``batch_size``, as many sequences are returned as fill ``cache_bytes`` without a shared prefix.
        """
        rng = np.random.default_rng(seed)
        low, high = self.context_len.low, self.context_len.high
        if self.batch_size is not None:
            return rng.integers(low, high + 1, self.batch_size)
        wanted = -(-cache_bytes // self.layout.kv_bytes_per_token)
        drawn = rng.integers(low, high + 1, min(-(-wanted // low), MAX_BATCH_SIZE))
        return drawn[: int(np.searchsorted(np.cumsum(drawn), wanted)) + 1]

    def tokens_needed(self, lengths: np.ndarray) -> int:
        """Return how many cached tokens one call must read; tokens of a shared prefix count once."""
        return int(lengths.sum()) - self.shared_tokens * (len(lengths) - 1)


def sweep(values: Mapping[str, Sequence[Any]]) -> list[AttentionShape]:
    """Return the cross product of all fields' values; isa and threads vary slowest, as each pair needs a set-up."""
    outer = ("isa", "threads")
    names = [*outer, *(field.name for field in fields(AttentionShape) if field.name not in outer)]
    products = itertools.product(*(values[name] for name in names))
    return [AttentionShape(**dict(zip(names, product, strict=True))) for product in products]
