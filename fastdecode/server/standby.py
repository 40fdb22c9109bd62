"""Answers 503 to all requests, also readiness probes, while a standby server waits for its session."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from fastdecode.server.answers import error_body
from fastdecode.server.errors import RETRY_SECONDS
from fastdecode.server.server_settings import ServerSettings

CLIENT_SECONDS = 5.0
"""Seconds after which the standby closes a connection."""

MOST_CLIENTS = 64
"""Most concurrent connections; further ones are closed."""


@contextlib.contextmanager
def standby_door(listener: socket.socket, settings: ServerSettings) -> Iterator[None]:
    """Within the context, answer 503 at the socket ``listener``; ``settings`` make this server a standby.

    Afterwards ``listener`` is unchanged, and new clients wait.
    """
    listener.listen(MOST_CLIENTS)
    door = _Door(listener, settings)
    poll_seconds = 0.05
    thread = threading.Thread(target=door.serve_forever, args=(poll_seconds,), name="standby", daemon=True)
    thread.start()
    print(f"fastdecode: stands by for session {settings.standby} at {settings.url_at(listener)}", flush=True)
    try:
        yield
    finally:
        door.shutdown()
        door.socket.close()


class _Door(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, settings: ServerSettings) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener.dup()
        self.message = f"this server stands by for session {settings.standby}, which another server has"
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)
        self._tls: ssl.SSLContext | None = None
        if settings.ssl_certfile:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            request.settimeout(CLIENT_SECONDS)
            wrapped = self._tls.wrap_socket(request, server_side=True) if self._tls else request
            super().process_request_thread(wrapped, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS

    def _refuse(self) -> None:
        message = self.server.message  # type: ignore[attr-defined]
        data = msgspec.json.encode(error_body(message, "server_error", 503))
        self.send_response(503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after", str(RETRY_SECONDS))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_DELETE = do_OPTIONS = do_PUT = _refuse

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since probes come all the time."""
