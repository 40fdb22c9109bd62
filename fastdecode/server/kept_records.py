"""API requests in the engine's journal: where R-workers keep that in memory, there is no folder for files."""

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
"""Of answers that are stored: a quarter of what an R-worker keeps of a journal."""

MOST_REQUEST_BYTES = 1 << 23
"""Of one request: the journal, which is for all, must have room for it."""


class KeptRecords:
    """``RequestStore`` in a journal, which belongs to the engine's thread: that does all this, between two steps."""

    most_bytes: float = MOST_STORED_BYTES

    def __init__(self, journal: Journal, thread: Executor) -> None:
        """``thread``: calls in that of ``journal``."""
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
    """Calls in the engine's thread."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._engine_thread.call(partial(fn, *args, **kwargs))


def request_store(config: EngineConfig, engine_thread: EngineThread, journal: Journal) -> RequestStore | None:
    """Return what keeps API requests beside ``journal``, that of the engine in ``engine_thread``; None without one.

    ConfigError if the journal's folder cannot be written.
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
