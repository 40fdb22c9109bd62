"""What a request returns, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the raw logits, and its rank among them (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # not frozen, which would take three times as long to make: one is made per token
class CompletionOutput:
    """One of a request's ``n`` texts, so far or finished.

    ``finish_reason``: "stop" (``stop_reason`` says which string or token id, None for end of text), "length",
    "abort", "error" (the model gave no finite logits), or None while it runs. ``logprobs``: per token, by token id.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request in seconds of ``time.perf_counter``: its arrival, each step that gave it tokens, and the
    beginning of the first step that computed its prompt."""

    arrival_seconds: float
    token_seconds: tuple[float, ...] = ()
    started_seconds: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request with everything it has produced so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
