"""The engine in its own thread. The event loop submits exchanges (API requests), and gets outputs once per step."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import ConfigError, RequestError, SupersededError, WorkerLostError
from fastdecode.engine.engine import LLMEngine
from fastdecode.server.exchanges import EngineDeadError, Exchange
from fastdecode.server.observer import EngineWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """A function that the engine's thread calls between two steps, and the future for its result."""

    function: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)

    def make(self) -> None:
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.function())
            except Exception as error:
                self.done.set_exception(error)
                if isinstance(error, SupersededError):
                    raise

    def drop(self) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(None)


class EngineThread:
    """Makes, uses and closes an ``LLMEngine`` in one thread, which owns the engine's cores and threads.

    ``start`` loads the engine. The other methods are for the event loop and never wait. ``observer`` sees every step.
    """

    def __init__(self, config: EngineConfig, observer: EngineWatch) -> None:
        self._config = config
        self.observer = observer
        self._inbox: queue.SimpleQueue[Exchange | Sequence[str] | _Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outbox: dict[str, RequestOutput | Exception] = {}
        self._delivering = False
        self._waiting: dict[str, tuple[Exchange, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded = threading.Event()
        self._engine: LLMEngine | None = None
        self._ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> LLMEngine:
        """Load the engine in its thread, wait until it is loaded, and return it. Raise what loading raises.

        The caller may use only the engine's constant parts, since the engine runs in its own thread.
        """
        self._thread.start()
        try:
            self._loaded.wait()
        except BaseException:
            self.stop()
            self._interrupt_loading()
            self._thread.join()
            raise
        if self._engine is None:
            raise self.error or EngineDeadError("the engine was not loaded")
        return self._engine

    def _interrupt_loading(self) -> None:
        """Raise KeyboardInterrupt in the engine's thread too, at its next line of Python.

        Ctrl-C and SIGTERM reach only the main thread, and loading may wait forever for R-workers to join.
        """
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))

    def attach(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        """Deliver outputs to ``loop``; ``on_death`` is called there if the engine fails."""
        self._loop, self._on_death = loop, on_death

    @property
    def dead(self) -> bool:
        """True once the engine has failed or was stopped."""
        return self._ended

    def submit(self, exchange: Exchange) -> None:
        """Queue the requests of ``exchange``.

        ``exchange.put`` receives the outputs, ``exchange.fail`` a refusal or the engine's end.
        """
        for index, request_id in enumerate(exchange.request_ids):
            self._waiting[request_id] = (exchange, index)
        self._inbox.put(exchange)
        if self.dead:
            self._bury()

    def release(self, exchange: Exchange) -> None:
        """Abort the unfinished requests of ``exchange``. The engine frees their KV cache before the next step."""
        ids = [each for each in exchange.request_ids if self._waiting.pop(each, None)]
        if ids and not exchange.finished:
            self._inbox.put(ids)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue ``function`` for the engine's thread, which runs queued functions in order before its next step.

        The returned future's result is None if the engine has ended.
        """
        call = _Call(function)
        self._inbox.put(call)
        if self.dead:
            self._drop_calls()
        return call.done

    def stop(self) -> None:
        """Close the engine after the present step."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the engine is closed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._engine = LLMEngine(self._config)
            self.observer.attach(self._engine)
        except BaseException as error:
            self.error = error
            self._loaded.set()
            return
        self._loaded.set()
        try:
            while self._read_inbox(self._engine):
                self._step(self._engine)
        except BaseException as error:
            logger.error("the engine has failed: %s", error, exc_info=not isinstance(error, WorkerLostError))
            self.error = error
        finally:
            self._engine.close()
            self._tell_the_end()

    def _read_inbox(self, engine: LLMEngine) -> bool:
        """Process submissions, releases and calls in the inbox; an idle engine waits for one. Return False to stop."""
        wait = not engine.has_unfinished_requests()
        # Seconds after which an idle engine looks for R-workers that have come or gone
        idle_seconds = 1.0
        while True:
            try:
                asked = self._inbox.get(block=wait, timeout=idle_seconds)
            except queue.Empty:
                if wait:
                    engine.look_around()
                return True
            if asked is None:
                return False
            if wait:
                engine.world.clock.restart()  # the time spent waiting for work belongs to no step
            if isinstance(asked, Exchange):
                self._add(engine, asked)
            elif isinstance(asked, _Call):
                asked.make()
            else:
                engine.abort_request(asked)
            wait = False

    def _add(self, engine: LLMEngine, exchange: Exchange) -> None:
        """Add one engine request per prompt of ``exchange``. If the engine refuses one, abort all of them."""
        added: list[str] = []
        try:
            for request_id, prompt in zip(exchange.request_ids, exchange.prompts, strict=True):
                engine.add_request(request_id, prompt.for_engine(), exchange.params, exchange.arrival_seconds)
                added.append(request_id)
        except (RequestError, ConfigError) as error:
            engine.abort_request(added)
            self._send({exchange.request_ids[0]: error})

    def _step(self, engine: LLMEngine) -> None:
        outputs = engine.step()
        if outputs:
            self._send({output.request_id: output for output in outputs})
        self.observer.after_step(engine, outputs)

    def _send(self, found: dict[str, RequestOutput | Exception]) -> None:
        """Pass the outputs ``found`` to the event loop. Newer outputs replace those not yet delivered."""
        with self._lock:
            self._outbox |= found
            if self._delivering:
                return
            self._delivering = True
        self._call(self._deliver)

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            logger.debug("the event loop has ended before the engine")

    def _deliver(self) -> None:
        """Store the pending outputs in their exchanges, in the event loop. Skip released exchanges."""
        with self._lock:
            found, self._outbox = self._outbox, {}
            self._delivering = False
        for request_id, output in found.items():
            exchange, index = self._waiting.get(request_id, (None, 0))
            if exchange is None:
                continue
            if isinstance(output, RequestOutput):
                exchange.put(index, output)
            else:
                exchange.fail(output)

    def _tell_the_end(self) -> None:
        self._ended = True
        self._drop_calls()
        self._call(self._bury)
        if self.error is not None and self._loop is not None:
            self._call(self._on_death)

    def _drop_calls(self) -> None:
        """Resolve all queued calls with None, since the engine has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._inbox.get_nowait()
                if isinstance(asked, _Call):
                    asked.drop()

    def _bury(self) -> None:
        """Fail all waiting exchanges, in the event loop."""
        for exchange, _ in set(self._waiting.values()):
            exchange.fail(
                EngineDeadError(f"the engine has failed: {self.error}" if self.error else "the engine has ended")
            )
