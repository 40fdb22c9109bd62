"""API requests on disk beside the journal: what was asked, until it is answered, and answers that are to be stored.

A file per request, written aside and renamed. The folder's name has a number, which each server raises: one that was
stopped while another took its place finds no folder, and so changes nothing any more.
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

FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Of an answer, and of a request as its client may name it."""

_SUFFIX = ".request"
_FOLDER = re.compile(r"requests-([0-9]{1,18})")

logger = logging.getLogger(__name__)


KeptLogprobs = list[dict[int, tuple[float, int, str | None]] | None]
"""Rank and text by token id, with the log-probability, per token; None of a token that has none."""


class KeptCompletion(msgspec.Struct, frozen=True, array_like=True):
    """A ``CompletionOutput`` that has ended; logprobs with rank and text, by token id."""

    text: str
    token_ids: list[int]
    text_ends: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: KeptLogprobs | None


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """What a request failed with, as it is answered."""

    status: int
    message: str
    kind: str


class KeptRequest(msgspec.Struct):
    """What was asked, and the token ids and text of its prompts; of a response the ``messages`` of its conversation.

    ``outputs``: per prompt, once all have ended, as ``prompt_logprobs`` where these were asked for;
    ``failure`` where it ended otherwise. ``created``: seconds of Unix.
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
        """True if nothing more comes of it."""
        return self.outputs is not None or self.failure is not None


_decoder = msgspec.msgpack.Decoder(KeptRequest)


def encoded(kept: KeptRequest) -> bytes:
    """As it is written."""
    return msgspec.msgpack.encode(kept)


def decoded(data: bytes, where: object) -> KeptRequest | None:
    """Return what ``encoded`` was given; None, with a line that names ``where``, for what is of another version."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        logger.warning("%s cannot be read: %s", where, error)
        return None


class RequestStore(Protocol):
    """Where API requests lie, beside a journal; its methods are called in ``thread``, in order. OSError.

    ``most_bytes``: of what may be stored there, math.inf where only settings say.
    """

    thread: Executor
    most_bytes: float

    def write(self, kept: KeptRequest) -> int:
        """Keep it; returns the bytes that it takes."""

    def read(self, answer_id: str) -> KeptRequest | None:
        """Return what is kept by that name; None if nothing is, or it cannot be read."""

    def delete(self, answer_id: str) -> None:
        """Keep it no longer."""

    def ages(self) -> list[tuple[str, float, int]]:
        """Of all, oldest first: answer, seconds since it was written, bytes."""


class KeptFiles:
    """``RequestStore`` in files beside a journal's own, for one server at a time."""

    most_bytes: float = math.inf

    def __init__(self, journal: str) -> None:
        """Take the folder in ``journal``, from the server before, if there was one. OSError."""
        self.thread: Executor = ThreadPoolExecutor(1, "requests")
        found = [(int(match[1]), path) for path in Path(journal).iterdir() if (match := _FOLDER.fullmatch(path.name))]
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
                path.unlink(missing_ok=True)  # a write that was broken off
        return sorted(found, key=lambda each: -each[1])

    def _path(self, answer_id: str) -> Path:
        return self._folder / f"{answer_id}{_SUFFIX}"


def kept_outputs(outputs: Sequence[RequestOutput | None]) -> list[list[KeptCompletion]]:
    """Return what is kept of the outputs of all prompts, which have ended."""
    return [[_kept(each) for each in output.outputs] for output in outputs if output is not None]


def _kept(completion: CompletionOutput) -> KeptCompletion:
    logprobs = _kept_logprobs(completion.logprobs)
    ends, reasons = list(completion.text_ends), (completion.finish_reason, completion.stop_reason)
    return KeptCompletion(completion.text, list(completion.tokens), ends, *reasons, logprobs or None)


def kept_prompt_logprobs(outputs: Sequence[RequestOutput | None]) -> list[KeptLogprobs | None]:
    """Return what is kept of the log-probabilities of prompts; nothing where none were asked for."""
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
    """Return the outputs again."""
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
        index, kept.text, kept.token_ids, kept.finish_reason, kept.stop_reason, rows or None, kept.text_ends
    )
