"""Runs the server's process: starts it, serves, and drains it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.optional import optional
from fastdecode.server.app import make_app
from fastdecode.server.connection import LimitedProtocol
from fastdecode.server.engine_thread import EngineThread
from fastdecode.server.guards import with_cors
from fastdecode.server.observer import EngineWatch
from fastdecode.server.server_settings import ServerSettings
from fastdecode.server.service import Service

LAST_WORDS_SECONDS = 2.0
"""Seconds in which a server with a failed engine still reports that, and sends complete answers."""


def serve(config: EngineConfig, settings: ServerSettings) -> int:
    """Serve until a signal or a failed engine ends the server; return the exit status.

    Return 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine failed; raise what prevents the start.
    """
    _raise_file_limit()
    settings.check_certificate()
    with contextlib.closing(_listen(settings)) as listener:
        name = settings.model_names(config.lora[0] if config.lora else config.model)[0]
        endpoint = settings.otlp_traces_endpoint
        tracer = optional("request tracer").RequestTracer(endpoint, name) if endpoint else None
        engine_thread = EngineThread(config, EngineWatch(name))
        waiting = optional("standby").standby_door(listener, settings) if settings.standby else contextlib.nullcontext()
        with waiting:
            service = Service(config, settings, engine_thread, tracer)
        try:
            return _Server(service, config, settings).run_on(listener)
        finally:
            service.close()
            engine_thread.stop()
            engine_thread.join()
            if tracer:
                tracer.close()


class _Server(uvicorn.Server):
    """uvicorn's server with an orderly end: accepted requests may finish, and new ones get 503."""

    def __init__(self, service: Service, config: EngineConfig, settings: ServerSettings) -> None:
        # Longer than clients keep an idle connection open (httpx 5 s, aiohttp 15 s, nginx 60 s):
        # a request is lost if the server closes the connection while the client sends the request
        keep_alive_seconds = 75
        super().__init__(
            uvicorn.Config(
                with_cors(make_app(service), settings),
                http=type("Protocol", (LimitedProtocol,), {"timeout_seconds": settings.request_timeout or 1e9}),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
                log_level=settings.uvicorn_log_level,
                **_clients_certificates(settings),
                timeout_keep_alive=keep_alive_seconds,
                timeout_graceful_shutdown=LAST_WORDS_SECONDS,  # type: ignore[arg-type]
            )
        )
        self._service, self._settings = service, settings
        self._ending: asyncio.Task[None] | None = None
        self._status = 0

    def run_on(self, listener: socket.socket) -> int:
        """Serve clients of the socket ``listener`` until the end; return the process's exit status."""
        backlog = 4096
        listener.listen(backlog)
        self.run([listener])
        return self._status

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGINT and SIGTERM within the context; a second Ctrl-C ends at once."""
        loop = asyncio.get_running_loop()
        self._service.engine_thread.attach(loop, self._died)
        numbers = {signal.SIGTERM: 0, signal.SIGINT: 130}
        before = {number: signal.getsignal(number) for number in numbers}
        for number, status in numbers.items():
            loop.add_signal_handler(number, self._told_to_end, status)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Resume the previous server's unfinished requests, and print that the server is ready."""
        self._service.restore()
        await super().startup(sockets)
        service, settings = self._service, self._settings
        where = settings.url_at((sockets or [])[0])
        guard = "with an API key" if settings.api_key else "without an API key"
        count = f"{service.num_r_workers} R-worker{'s' if service.num_r_workers > 1 else ''}"
        print(f"fastdecode: serves {', '.join(service.model.names)} at {where} ({guard}; {count})", flush=True)
        service.read_vocabulary_soon()

    def _told_to_end(self, status: int) -> None:
        if self._ending is not None:
            self._service.fail_all()
            return
        self._status = status
        self._service.draining = True
        self._say(f"ends: {self._service.num_requests} requests have {self._settings.shutdown_timeout:g} s to finish")
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Answer new requests with 503 until the last accepted one has ended."""
        deadline = time.monotonic() + self._settings.shutdown_timeout
        poll_seconds = 0.05
        while self._service.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(poll_seconds)
        self._service.fail_all()
        self.should_exit = True

    def _died(self) -> None:
        self._status = 1
        self._say(f"error: the engine has failed: {self._service.engine_thread.error}")
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._exit)

    def _exit(self) -> None:
        self.should_exit = True

    def _say(self, text: str) -> None:
        print(f"fastdecode: {text}", file=sys.stderr, flush=True)


def _clients_certificates(settings: ServerSettings) -> dict[str, Any]:
    """Return uvicorn's arguments for client certificates and ciphers; {} if ``settings`` have none."""
    ciphers = {"ssl_ciphers": settings.ssl_ciphers} if settings.ssl_ciphers else {}
    return {"ssl_ca_certs": settings.ssl_ca_certs, "ssl_cert_reqs": settings.ssl_cert_reqs, **ciphers}


def _listen(settings: ServerSettings) -> socket.socket:
    """Return a bound socket. Raise ConfigError if the port is in use; this runs before the model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen at {settings.host}:{settings.port}: {error.strerror or error}") from None
    return listener


def _raise_file_limit() -> None:
    """Raise this process's limit of open files, since every client's connection counts as one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
