"""The outputs of a request, in vLLM's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """A read-only view of the first ``count`` items of a growing list. Items appended later are not visible.

    A view costs the same for any length. Every step makes one per list of a request, and most are never read.
    """

    __slots__ = ("_count", "_items")

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self._count = items, len(items)

    def __len__(self) -> int:
        """Return the number of items in the view."""
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order. Iterating over a copy is about twice as fast as reading items one by one."""
        return iter(self._items[: self._count])

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """Return one item, or a tuple of the items of a slice."""
        if isinstance(index, slice):
            return tuple(self._items[: self._count][index])
        return self._items[range(self._count)[index]]


class _Snapshot:
    """Base of outputs: compares and prints like a dataclass whose fields are the names in ``SEEN``."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    SEEN: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` has the same type and equal values of all fields in ``SEEN``."""
        return self._seen() == other._seen() if isinstance(other, _Snapshot) else NotImplemented

    def __repr__(self) -> str:
        """Return the type's name and all fields in ``SEEN``, as a dataclass prints itself."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._seen().items())})"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in ``SEEN`` as a dict of JSON values."""
        return _plain(self._seen())

    def _seen(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.SEEN}


class CompletionOutput(_Snapshot):
    """One of a request's ``n`` texts, growing or finished. This snapshot does not change as the text grows.

    ``finish_reason``: "stop", "length", "abort", "error", or None while it runs. ``stop_reason``: the stop string or
    token id, None for end of text, or the reason of an error. ``token_ids``, ``logprobs`` and
    ``attention_sources`` are made from ``tokens``, ``all_logprobs`` and ``all_sources`` when read. ``text_ends``: for
    each token, the number of characters that could be shown after it.
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
        """Return an earlier snapshot of this completion: its first ``num_tokens`` tokens, unfinished."""
        num_shown = self.text_ends[num_tokens - 1] if num_tokens and self.text_ends else 0
        logprobs = None if self.all_logprobs is None else self.all_logprobs[:num_tokens]
        sources = None if self.all_sources is None else self.all_sources[:num_tokens]
        text, ends = self.text[:num_shown], self.text_ends[:num_tokens]
        return CompletionOutput(self.index, text, self.tokens[:num_tokens], None, None, logprobs, ends, sources)

    def cut(self) -> CompletionOutput:
        """Return a copy without tokens and text, for ``max_tokens=0``; a finish reason "stop" becomes "length"."""
        ended = self.finish_reason if self.finish_reason in (None, "error", "abort") else "length"
        reason = self.stop_reason if ended == "error" else None
        return CompletionOutput(self.index, "", (), ended, reason, None if self.all_logprobs is None else ())

    @property
    def attention_sources(self) -> tuple[tuple[AttentionSource, ...] | None, ...] | None:
        """Per token, the blocks of context with the most attention, strongest first; None if not requested.

        A token's entry is None if an earlier engine made the token, or if an R-worker with its context was lost.
        """
        return None if self.all_sources is None else tuple(self.all_sources)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of this completion."""
        if self._token_ids is None:
            self._token_ids = tuple(self.tokens)
        return self._token_ids

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if they were not requested."""
        if self.logprobs is None:
            return None
        return math.fsum(found[token].logprob for token, found in zip(self.token_ids, self.logprobs, strict=True))

    def finished(self) -> bool:
        """Return whether this completion has ended. vLLM has a method of this name."""
        return self.finish_reason is not None

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        """One dictionary per token, from token id to ``Logprob``; None if they were not requested."""
        if self._logprobs is None and self.all_logprobs is not None:
            self._logprobs = tuple(self.all_logprobs)
        return self._logprobs


class RequestMetrics(_Snapshot):
    """Times of a request in ``time.perf_counter`` seconds: arrival, first prompt step, and each step with tokens.

    ``moments``: the growing list that ``token_seconds`` copies.
    """

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
        """The time at which each step that gave the request tokens ended, in seconds."""
        if self._token_seconds is None:
            self._token_seconds = tuple(self.moments)
        return self._token_seconds


@dataclass(slots=True)
class RequestOutput:
    """A request with everything it has produced so far.

    ``prompt_logprobs``: one entry per prompt token, None for the first; None if they were not requested.
    """

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
        """Return all fields as JSON values."""
        return _plain({each.name: getattr(self, each.name) for each in fields(self)})


def _plain(value: Any) -> Any:
    """Return ``value`` converted to JSON values: lists, dictionaries, numbers and strings."""
    if isinstance(value, _Snapshot | RequestOutput):
        return value.to_dict()
    if isinstance(value, Logprob):
        return asdict(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
