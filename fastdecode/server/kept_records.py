"""Stores API requests in the engine's journal itself, for a journal in R-workers' memory, which has no folder."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.journal.journal import Journal
from fastdecode.server.engine_thread import EngineThread
from fastdecode.server.kept_files import KeptFiles, KeptRequest, RequestStore, decoded, encoded

MOST_STORED_BYTES = 1 << 25
"""Most bytes of stored answers: a quarter of an R-worker's limit for a journal."""

MOST_REQUEST_BYTES = 1 << 23
"""Most bytes of one request, so that the journal has room for others."""


class KeptRecords:
    """A ``RequestStore`` inside a journal. The engine's thread, which owns the journal, runs accesses between steps."""

    most_bytes: float = MOST_STORED_BYTES

    def __init__(self, journal: Journal, thread: Executor) -> None:
        """``thread``: runs calls in the thread of ``journal``."""
        self._journal = journal
        self.thread = thread

    def write(self, kept: KeptRequest) -> int:
        data = encoded(kept)
        if len(data) > MOST_REQUEST_BYTES:
            why = f"{len(data):,} bytes are more than R-workers keep of one request, {MOST_REQUEST_BYTES:,}"
            raise OSError(errno.EFBIG, why, f"request {kept.answer_id}")
        self._journal.keep(kept.answer_id, data)
        return len(data)

    def read(self, answer_id: str) -> KeptRequest | None:
        kept = self._journal.kept.get(answer_id)
        return decoded(kept.data, f"journal: request {answer_id}") if kept else None

    def delete(self, answer_id: str) -> None:
        self._journal.forget(answer_id)

    def ages(self) -> list[tuple[str, float, int]]:
        now = time.time()
        return [(each.name, now - each.seconds, len(each.data)) for each in self._journal.kept.values()]


class _Turns(Executor):
    """An executor that runs functions in the engine's thread, between two steps."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._engine_thread.call(partial(fn, *args, **kwargs))


def request_store(config: EngineConfig, engine_thread: EngineThread, journal: Journal) -> RequestStore | None:
    """Return the store of API requests that belongs to ``journal``, the journal of the engine in ``engine_thread``.

    Return None if ``journal`` is None. Raise ConfigError if the journal's folder cannot be written.
    """
    if config.journal is None:
        return None
    folder = config.journal_folder
    if folder is None:
        return KeptRecords(journal, _Turns(engine_thread))
    try:
        return KeptFiles(folder)
    except OSError as error:
        raise ConfigError(f"journal: {error.filename}: {error.strerror}") from None
