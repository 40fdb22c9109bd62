"""An R-worker's health port for probes: /health, /live and /metrics over HTTP, in its own threads."""

from __future__ import annotations

import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from fastdecode.cluster.r_worker.vitals import Vitals
from fastdecode.core.errors import ConfigError

CLIENT_SECONDS = 5.0
"""Seconds after which the port closes any connection."""

MOST_BYTES = 1 << 13
"""Most bytes of a request's line and header; a probe sends some hundred."""

POLL_SECONDS = 0.1
"""Seconds between two checks for connections that take too long."""

MOST_CLIENTS = 16
"""Most concurrent connections; further ones are closed."""


class HealthPort(ThreadingHTTPServer):
    """Answers GET /health, /live (200, or 503 with the reason) and /metrics until ``close``.

    /live tells whether the process works; /health also tells whether it can be given work.

    Clients cannot harm the R-worker, since their time, bytes and number are limited. Raise ConfigError if ``host`` and
    ``port`` (0: any) are not available.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, vitals: Vitals) -> None:
        self.vitals = vitals
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, float] = {}
        try:
            super().__init__(("" if host == "*" else host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"health_listen: cannot listen at {host}:{port}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name="health", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The "host:port" of this health port."""
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without ``HTTPServer``'s look-up of this machine's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "fastdecode", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether to serve the client; False closes the connection, since MOST_CLIENTS are connected."""
        with self._lock:
            if len(self._clients) >= MOST_CLIENTS:
                return False
            self._clients[request] = time.monotonic() + CLIENT_SECONDS
        return True

    def service_actions(self) -> None:
        """End connections that take too long, every POLL_SECONDS."""
        now = time.monotonic()
        with self._lock:
            late = [client for client, deadline in self._clients.items() if now > deadline]
        for client in late:
            self._end(client)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its answer."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that leaves in the middle of its answer."""

    @staticmethod
    def _end(client: socket.socket) -> None:
        try:
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class _Limited:
    """Limits what the handler reads from a connection: after MOST_BYTES in all, it raises ConnectionError."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, MOST_BYTES
        self.close = file.close

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionError(f"more than {MOST_BYTES} bytes of header")
        return line


class _Handler(BaseHTTPRequestHandler):
    """One connection with one answer."""

    server: HealthPort
    server_version, sys_version = "fastdecode", ""
    timeout = CLIENT_SECONDS

    def setup(self) -> None:
        """Limit the bytes that are read from this connection."""
        super().setup()
        self.rfile = _Limited(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        vitals = self.server.vitals
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        if path == "/metrics":
            self._answer(HTTPStatus.OK, vitals.metrics(), content_type)
        elif path in ("/health", "/live"):
            wrong = vitals.complaint() if path == "/health" else vitals.illness()
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK, f"{wrong or 'ok'}\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there are /health, /live and /metrics\n")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since probes come every few seconds."""
