"""The service for users: time per token, time to first token, concurrent users, and limits on these."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError

DEFAULT_TPOT_SECONDS = 0.1
"""Default limit of the seconds per output token: ten tokens a second, faster than people read."""

CHUNK_TOKENS = 2048
"""Prompt rows per step: the engine's default ``max_num_batched_tokens``."""


@dataclass(frozen=True)
class ServiceLimits:
    """The longest time per output token, and the longest time to first token, that users accept."""

    tpot_seconds: float = math.inf
    ttft_seconds: float = math.inf

    def __post_init__(self) -> None:
        if not self.tpot_seconds > 0:
            raise ConfigError(f"tpot must be above 0 ms for each token, not {self.tpot_seconds * 1e3:g}")
        if not self.ttft_seconds > 0:
            raise ConfigError(f"ttft must be above 0 seconds to the first token, not {self.ttft_seconds:g}")

    def kept_by(self, tpot_seconds: float, ttft_seconds: float) -> bool:
        """Return whether both times, in seconds, are within these limits."""
        return tpot_seconds <= self.tpot_seconds and ttft_seconds <= self.ttft_seconds

    def __str__(self) -> str:
        parts = []
        if self.tpot_seconds < math.inf:
            parts.append(f"{self.tpot_seconds * 1e3:g} ms per token")
        if self.ttft_seconds < math.inf:
            parts.append(f"{self.ttft_seconds:g} s to the first token")
        return " and ".join(parts) or "no limit"


NO_LIMITS = ServiceLimits()


@dataclass(frozen=True)
class Service:
    """A service as its users see it. ``price_per_million_tokens``: None if a price is unknown.
    ``ttft_seconds``: time to first token of a request that starts at once, while no other prompt is computed.
    """

    users: int
    tokens_per_second: float
    tpot_seconds: float
    ttft_seconds: float
    price_per_million_tokens: float | None = None

    @property
    def tokens_per_second_per_user(self) -> float:
        """Output tokens per second that one user gets."""
        return 1.0 / self.tpot_seconds if self.tpot_seconds else 0.0


def prompt_chunks(num_tokens: float) -> list[tuple[float, float]]:
    """Return the steps that compute a prompt of ``num_tokens``: pairs (number of steps, rows per step)."""
    whole, rest = divmod(max(num_tokens, 1.0), CHUNK_TOKENS)
    return [(count, rows) for count, rows in ((whole, float(CHUNK_TOKENS)), (1.0, rest)) if count and rows]


def prompt_pairs(num_tokens: float, shared_tokens: float) -> float:
    """Return how many (query, key) pairs a prompt's attention computes after a cached prefix of ``shared_tokens``."""
    return num_tokens * (shared_tokens + num_tokens / 2.0)
