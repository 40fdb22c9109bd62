"""What a request returns, in vLLM's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, overload

from fastdecode.core.weighing import AttentionSource

Item = TypeVar("Item")


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the raw logits, and its rank among them (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Grown(Sequence[Item]):
    """The first ``count`` items of a list that only ever grows, at no cost per item; later ones are not seen.

    One is made of each list of a request in every step, and most are never looked at.
    """

    __slots__ = ("_count", "_items")

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self._count = items, len(items)

    def __len__(self) -> int:
        """Items when this was made."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """One item, or those of a slice, as a tuple, at the cost of what it holds."""
        if isinstance(index, slice):
            return tuple(self._items[place] for place in range(*index.indices(self._count)))
        return self._items[range(self._count)[index]]


class _Snapshot:
    """Compares and shows itself as a dataclass of the fields ``SEEN`` would."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    SEEN: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        """Whether all that a user sees is the same."""
        return self._seen() == other._seen() if isinstance(other, _Snapshot) else NotImplemented

    def __repr__(self) -> str:
        """Its type and all fields."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._seen().items())})"

    def to_dict(self) -> dict[str, Any]:
        """All that a user sees, as JSON takes it."""
        return _plain(self._seen())

    def _seen(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.SEEN}


class CompletionOutput(_Snapshot):
    """One of a request's ``n`` texts, so far or finished; it does not change as the text grows.

    ``finish_reason``: "stop" (``stop_reason`` says which string or token id, None for end of text), "length",
    "abort", "error" (``stop_reason`` says why), or None while it runs. ``tokens``, ``all_logprobs``, ``all_sources``:
    what ``token_ids``, ``logprobs`` and ``attention_sources`` are made of when they are read. ``text_ends``: characters
    that could be shown after each token.
    """

    __slots__ = (
        "_logprobs", "_token_ids", "all_logprobs", "all_sources", "finish_reason", "index", "stop_reason", "text",
        "text_ends", "tokens",
    )  # fmt: skip
    SEEN = (
        "index", "text", "token_ids", "cumulative_logprob", "finish_reason", "stop_reason", "logprobs",
        "attention_sources",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[dict[int, Logprob]] | None = None,
        text_ends: Sequence[int] = (),
        attention_sources: Sequence[tuple[AttentionSource, ...] | None] | None = None,
    ) -> None:
        self.index, self.text, self.text_ends = index, text, text_ends
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.tokens, self.all_logprobs, self.all_sources = token_ids, logprobs, attention_sources
        self._token_ids: tuple[int, ...] | None = None
        self._logprobs: tuple[dict[int, Logprob], ...] | None = None

    def after(self, num_tokens: int) -> CompletionOutput:
        """The same as it was after its first ``num_tokens``, while more were to come."""
        num_shown = self.text_ends[num_tokens - 1] if num_tokens and self.text_ends else 0
        logprobs = None if self.all_logprobs is None else self.all_logprobs[:num_tokens]
        sources = None if self.all_sources is None else self.all_sources[:num_tokens]
        text, ends = self.text[:num_shown], self.text_ends[:num_tokens]
        return CompletionOutput(self.index, text, self.tokens[:num_tokens], None, None, logprobs, ends, sources)

    def cut(self) -> CompletionOutput:
        """The same without its tokens, ended as it is by their number."""
        ended = self.finish_reason if self.finish_reason in (None, "error", "abort") else "length"
        reason = self.stop_reason if ended == "error" else None
        return CompletionOutput(self.index, "", (), ended, reason, None if self.all_logprobs is None else ())

    @property
    def attention_sources(self) -> tuple[tuple[AttentionSource, ...] | None, ...] | None:
        """Per token the blocks of context with the most attention, the strongest first; None where not asked for.

        None of a token that came before this engine, or whose R-worker was lost right after it.
        """
        return None if self.all_sources is None else tuple(self.all_sources)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output's tokens."""
        if self._token_ids is None:
            self._token_ids = tuple(self.tokens)
        return self._token_ids

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of its tokens; None where they were not asked for."""
        if self.logprobs is None:
            return None
        return math.fsum(found[token].logprob for token, found in zip(self.token_ids, self.logprobs, strict=True))

    def finished(self) -> bool:
        """Return whether it has ended, as vLLM's method does."""
        return self.finish_reason is not None

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        """Per token, by token id; None where they were not asked for."""
        if self._logprobs is None and self.all_logprobs is not None:
            self._logprobs = tuple(self.all_logprobs)
        return self._logprobs


class RequestMetrics(_Snapshot):
    """Moments of a request in seconds of ``time.perf_counter``: its arrival, each step that gave it tokens, and the
    beginning of the first step that computed its prompt. ``moments``: what ``token_seconds`` is made of."""

    __slots__ = ("_token_seconds", "arrival_seconds", "moments", "started_seconds")
    SEEN = ("arrival_seconds", "token_seconds", "started_seconds")

    def __init__(
        self, arrival_seconds: float, token_seconds: Sequence[float] = (), started_seconds: float | None = None
    ) -> None:
        self.arrival_seconds, self.started_seconds = arrival_seconds, started_seconds
        self.moments = token_seconds
        self._token_seconds: tuple[float, ...] | None = None

    @property
    def token_seconds(self) -> tuple[float, ...]:
        """Of each step that gave it tokens."""
        if self._token_seconds is None:
            self._token_seconds = tuple(self.moments)
        return self._token_seconds


@dataclass(slots=True)
class RequestOutput:
    """A request with everything it has produced so far. ``prompt_logprobs``: per token of the prompt, where they were
    asked for; None of the first one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return _plain({each.name: getattr(self, each.name) for each in fields(self)})


def _plain(value: Any) -> Any:
    """``value`` in lists, dictionaries, numbers and texts."""
    if isinstance(value, _Snapshot | RequestOutput):
        return value.to_dict()
    if isinstance(value, Logprob):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
