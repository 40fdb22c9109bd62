"""Keeps requests after their clients disconnect and, with a journal, after this process ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.settings import parse_bytes
from fastdecode.server.api_request import ApiRequest
from fastdecode.server.errors import ApiError, api_error
from fastdecode.server.exchanges import DisconnectedError, EngineDeadError, Exchange, ShutdownError
from fastdecode.server.kept_files import Failure, KeptRequest, RequestStore, kept_outputs, kept_prompt_logprobs
from fastdecode.server.server_settings import ServerSettings

CANCELLED = "cancelled"
"""The ``Failure.kind`` of a response that its client has cancelled."""

logger = logging.getLogger(__name__)


@dataclass
class _Held:
    """A request in memory. ``is_written``: its answer needs no further write. ``is_deleted``: it was deleted."""

    request: ApiRequest
    has_ended: bool = False
    is_written: bool = False
    is_deleted: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass
class _Stored:
    """Answer ids of ended requests in the store, oldest first, with the bytes of each answer."""

    num_bytes: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def add(self, answer_id: str, num_bytes: int) -> None:
        self.discard(answer_id)
        self.num_bytes[answer_id] = num_bytes
        self.total += num_bytes

    def discard(self, answer_id: str) -> None:
        self.total -= self.num_bytes.pop(answer_id, 0)


class Keeper:
    """Keeps each request until ``reconnect_seconds`` after its client has left.

    Answers that clients asked to store stay longer, within the limits of ``settings``. The event loop calls the keeper,
    and the keeper calls ``store`` in the store's own thread, in order.
    """

    def __init__(self, store: RequestStore, settings: ServerSettings, release: Callable[[Exchange], None]) -> None:
        """``release``: makes the engine abort an exchange's unfinished requests."""
        self._store, self._settings, self._release = store, settings, release
        self._most_bytes = min(parse_bytes("stored_bytes", settings.stored_bytes), store.most_bytes)
        self._held: dict[str, _Held] = {}
        self._stored = _Stored()
        self._closing = False

    @property
    def num_read(self) -> int:
        """The number of requests in memory whose clients are still reading."""
        return sum(held.request.exchange.num_readings > 0 for held in self._held.values())

    @property
    def num_stored(self) -> int:
        """The number of ended answers in the store, which outlive this server."""
        return len(self._stored.num_bytes)

    @property
    def stored_bytes(self) -> int:
        """The bytes that ended answers take in the store."""
        return self._stored.total

    def unfinished(self) -> list[KeptRequest]:
        """Return the previous server's unfinished requests, oldest first, and load the list of its stored answers."""
        found = []
        for answer_id, age, num_bytes in self._store.ages():
            kept = self._store.read(answer_id)
            if kept is None or (kept.ended and age > 3600 * self._settings.stored_hours):
                self._write(self._store.delete, answer_id)
            elif kept.ended:
                self._stored.add(answer_id, num_bytes)
            else:
                found.append(kept)
        return sorted(found, key=lambda kept: kept.created)

    def held(self, answer_id: str) -> ApiRequest | None:
        """Return the request in memory with this answer id; None if there is none."""
        held = self._held.get(answer_id)
        return held.request if held else None

    async def stored(self, answer_id: str) -> KeptRequest | None:
        """Return the ended request in the store with this answer id; None if there is none."""
        if answer_id not in self._stored.num_bytes:
            return None
        return await self._write(self._store.read, answer_id)

    def hold(self, request: ApiRequest) -> None:
        """Start keeping ``request`` in memory. Call this before the engine gets the request."""
        self._held[request.answer_id] = _Held(request)
        request.exchange.on_end = self._ended

    async def write(self, request: ApiRequest) -> None:
        """Write the request to the store, before any of its output is sent."""
        await self._write(self._store.write, request.kept())

    def left(self, request: ApiRequest) -> None:
        """Start the reconnect timeout of ``request``, unless it has a client, a background run or a pending write."""
        held = self._held.get(request.answer_id)
        if held is None or self._closing or request.exchange.num_readings:
            return
        if (request.in_background and not held.has_ended) or (held.has_ended and not held.is_written):
            return
        if held.timer:
            held.timer.cancel()
        loop = asyncio.get_running_loop()
        held.timer = loop.call_later(self._settings.reconnect_seconds, self._give_up, held)

    def cancel(self, request: ApiRequest) -> None:
        """End ``request`` as cancelled by its client. No effect if it has ended."""
        request.exchange.fail(ApiError(409, "the response was cancelled", CANCELLED))

    def delete(self, answer_id: str) -> None:
        """Remove the request with this answer id from memory and from the store."""
        held = self._held.pop(answer_id, None)
        if held:
            held.is_deleted = True
            if held.timer:
                held.timer.cancel()
            held.request.exchange.fail(DisconnectedError("the response was deleted"))
            self._release(held.request.exchange)
        self._stored.discard(answer_id)
        self._write(self._store.delete, answer_id)

    def close(self) -> None:
        """Stop, because the server ends. Unfinished requests stay in the store for the next server."""
        self._closing = True
        for held in self._held.values():
            if held.has_ended and not held.request.is_stored:
                self._store.thread.submit(_logging, self._store.delete, held.request.answer_id)
        self._store.thread.shutdown()

    def _ended(self, exchange: Exchange) -> None:
        """Handle the end of ``exchange``: all outputs came, or it failed.

        After ``close`` this does nothing: the next server continues the request.
        """
        held = self._held.get(exchange.exchange_id)
        if held is None or isinstance(exchange.error, EngineDeadError | ShutdownError):
            return
        held.has_ended = True
        self._release(exchange)
        if held.request.is_stored:
            kept = held.request.kept()
            if exchange.error is None:
                kept.outputs = kept_outputs(exchange.outputs)
                kept.cached_tokens = [output.num_cached_tokens or 0 for output in exchange.outputs if output]
                kept.prompt_logprobs = kept_prompt_logprobs(exchange.outputs)
            else:
                failed = api_error(exchange.error)
                kept.failure = Failure(failed.status, str(failed), failed.kind)
            self._write(self._store.write, kept).add_done_callback(lambda done: self._count_stored(held, done.result()))
            return
        held.is_written = True
        self.left(held.request)

    def _count_stored(self, held: _Held, num_bytes: int | None) -> None:
        """Count the stored answer's ``num_bytes`` (None: writing failed); delete the oldest answers above limits."""
        if held.is_deleted:
            return
        held.is_written = True
        if num_bytes is not None:
            self._stored.add(held.request.answer_id, num_bytes)
        most, most_bytes = self._settings.stored_responses, self._most_bytes
        while self.num_stored > most or self.stored_bytes > most_bytes:
            self.delete(next(iter(self._stored.num_bytes)))
        self.left(held.request)

    def _give_up(self, held: _Held) -> None:
        """Drop the request ``held``, whose client has not returned in time; abort what still runs."""
        request = held.request
        if request.exchange.num_readings or self._closing:
            return
        if held.has_ended and request.is_stored:
            del self._held[request.answer_id]
        else:
            self.delete(request.answer_id)

    def _write(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call ``function`` in the store's thread. If the call fails, log why; the result is then None."""
        return asyncio.get_running_loop().run_in_executor(self._store.thread, _logging, function, *args)


def _logging(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        logger.error("journal: %s: %s: the request continues without a journal", error.filename, error.strerror)
        return None
