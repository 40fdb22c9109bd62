"""API requests on disk next to the journal: bodies of unanswered requests, and stored answers.

Each request is one file, written under a temporary name and renamed. The folder's name has a number that each server
increments. If another server took over while this one was suspended, this one finds no folder and changes nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fastdecode.api.outputs import CompletionOutput, Logprob, RequestOutput
from fastdecode.core.weighing import AttentionSource

FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Matches the file names that are valid: answer ids, and the names that clients give their requests."""

_SUFFIX = ".request"

logger = logging.getLogger(__name__)


KeptLogprobs = list[dict[int, tuple[float, int, str | None]] | None]
"""Per token: log-probability, rank and text by token id; None for a token without them."""


class KeptCompletion(msgspec.Struct, frozen=True, array_like=True):
    """A finished ``CompletionOutput`` as stored. Log-probabilities are a ``KeptLogprobs``."""

    text: str
    token_ids: list[int]
    text_ends: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: KeptLogprobs | None
    sources: list[tuple[AttentionSource, ...] | None] | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The error that a failed request's client receives: HTTP status, message and kind."""

    status: int
    message: str
    kind: str


class KeptRequest(msgspec.Struct):
    """A request as stored: its body, the token ids and texts of its prompts, and a response's ``messages``.

    ``outputs`` and, if requested, ``prompt_logprobs``: an entry per prompt, set at the request's end. ``failure``: why
    a request failed. ``created``: when the request arrived, in Unix seconds.
    """

    answer_id: str
    route: str
    body: dict[str, Any]
    created: int
    prompts: list[tuple[list[int], str | None]]
    messages: list[dict[str, Any]] = []
    outputs: list[list[KeptCompletion]] | None = None
    prompt_logprobs: list[KeptLogprobs | None] = []
    cached_tokens: list[int] = []
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """True if the request has finished or failed, so that no more output will come."""
        return self.outputs is not None or self.failure is not None


_decoder = msgspec.msgpack.Decoder(KeptRequest)


def encoded(kept: KeptRequest) -> bytes:
    """Return ``kept`` as the bytes that a store writes."""
    return msgspec.msgpack.encode(kept)


def decoded(data: bytes, where: object) -> KeptRequest | None:
    """Return the request that ``encoded`` wrote. For bytes of another version, log ``where`` and return None."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        logger.warning("%s cannot be read: %s", where, error)
        return None


class RequestStore(Protocol):
    """Stores API requests beside a journal. Methods are called in ``thread``, in order, and may raise OSError.

    ``most_bytes``: the store's own limit of the bytes of stored answers; math.inf for none.
    """

    thread: Executor
    most_bytes: float

    def write(self, kept: KeptRequest) -> int:
        """Store the request; return the number of bytes stored."""

    def read(self, answer_id: str) -> KeptRequest | None:
        """Return the stored request; None if there is none, or it cannot be read."""

    def delete(self, answer_id: str) -> None:
        """Delete the stored request."""

    def ages(self) -> list[tuple[str, float, int]]:
        """Return answer id, seconds since it was written, and number of bytes of each stored request, oldest first."""


class KeptFiles:
    """A ``RequestStore`` in files next to a journal's files, for one server at a time."""

    most_bytes: float = math.inf

    def __init__(self, journal: str) -> None:
        """Take over the folder in ``journal`` from a previous server, if any. Raise OSError on failure."""
        self.thread: Executor = ThreadPoolExecutor(1, "requests")
        folder = re.compile(r"requests-([0-9]{1,18})")
        found = [(int(match[1]), path) for path in Path(journal).iterdir() if (match := folder.fullmatch(path.name))]
        number, before = max(found, default=(0, None))
        self._folder = Path(journal) / f"requests-{number + 1}"
        if before is None:
            self._folder.mkdir(mode=0o700)
        else:
            before.rename(self._folder)

    def write(self, kept: KeptRequest) -> int:
        data = encoded(kept)
        aside = self._folder / f"{kept.answer_id}.new"
        aside.write_bytes(data)
        os.replace(aside, self._path(kept.answer_id))  # noqa: PTH105 (of two names, not of a Path)
        return len(data)

    def read(self, answer_id: str) -> KeptRequest | None:
        path = self._path(answer_id)
        try:
            return decoded(path.read_bytes(), path)
        except OSError:
            return None

    def delete(self, answer_id: str) -> None:
        self._path(answer_id).unlink(missing_ok=True)

    def ages(self) -> list[tuple[str, float, int]]:
        now, found = time.time(), []
        for path in self._folder.iterdir():
            if path.suffix == _SUFFIX:
                told = path.stat()
                found.append((path.name.removesuffix(_SUFFIX), now - told.st_mtime, told.st_size))
            else:
                path.unlink(missing_ok=True)  # left by an interrupted write
        return sorted(found, key=lambda each: -each[1])

    def _path(self, answer_id: str) -> Path:
        return self._folder / f"{answer_id}{_SUFFIX}"


def kept_outputs(outputs: Sequence[RequestOutput | None]) -> list[list[KeptCompletion]]:
    """Return the ended outputs, one per prompt, as ``KeptCompletion`` lists for ``KeptRequest.outputs``."""
    return [[_kept(each) for each in output.outputs] for output in outputs if output is not None]


def _kept(completion: CompletionOutput) -> KeptCompletion:
    logprobs = _kept_logprobs(completion.logprobs)
    ends, reasons = list(completion.text_ends), (completion.finish_reason, completion.stop_reason)
    sources = None if completion.all_sources is None else list(completion.all_sources)
    return KeptCompletion(completion.text, list(completion.tokens), ends, *reasons, logprobs or None, sources)


def kept_prompt_logprobs(outputs: Sequence[RequestOutput | None]) -> list[KeptLogprobs | None]:
    """Return each prompt's log-probabilities for ``KeptRequest.prompt_logprobs``; None if not requested."""
    found = [_kept_logprobs(output.prompt_logprobs) for output in outputs if output is not None]
    return found if any(found) else []


def _kept_logprobs(rows: Sequence[dict[int, Logprob] | None] | None) -> KeptLogprobs | None:
    if not rows:
        return None
    return [
        None if row is None else {token: (each.logprob, each.rank, each.decoded_token) for token, each in row.items()}
        for row in rows
    ]


def outputs_of(kept: KeptRequest) -> list[RequestOutput]:
    """Return one ``RequestOutput`` per prompt, restored from the stored request ``kept``."""
    return [
        RequestOutput(
            f"{kept.answer_id}-{number}", text, token_ids, [_completion(*each) for each in enumerate(completions)],
            True, num_cached_tokens=kept.cached_tokens[number] if kept.cached_tokens else None,
            prompt_logprobs=_logprobs(kept.prompt_logprobs[number]) if kept.prompt_logprobs else None,
        )
        for number, ((token_ids, text), completions) in enumerate(zip(kept.prompts, kept.outputs or (), strict=True))
    ]  # fmt: skip


def _logprobs(rows: KeptLogprobs | None) -> list[dict[int, Logprob] | None] | None:
    if rows is None:
        return None
    return [None if row is None else {token: Logprob(*found) for token, found in row.items()} for row in rows]


def _completion(index: int, kept: KeptCompletion) -> CompletionOutput:
    rows = [row or {} for row in _logprobs(kept.logprobs) or ()]
    return CompletionOutput(
        index, kept.text, kept.token_ids, kept.finish_reason, kept.stop_reason, rows or None, kept.text_ends,
        kept.sources,
    )  # fmt: skip
