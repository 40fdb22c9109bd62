"""Detects lost ranks: each rank has a connection to rank 0, which closes when either process ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from fastdecode.core.errors import RankLostError

logger = logging.getLogger(__name__)


class Lifelines:
    """Rank 0's end of the connection to each other rank; a connection that closes shows that its rank is lost."""

    def __init__(self, host: str) -> None:
        """Listen at a free port of ``host``."""
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.lost: list[str] = []
        self._lines: list[socket.socket] = []
        self._closed = False

    def accept(self, count: int, timeout_seconds: float) -> None:
        """Wait until the ``count`` other ranks have connected."""
        self._listener.settimeout(timeout_seconds)
        most_name_bytes = 512
        for _ in range(count):
            line, _ = self._listener.accept()
            line.settimeout(None)
            name = line.recv(most_name_bytes).decode(errors="replace")
            self._lines.append(line)
            threading.Thread(target=self._watch, args=(line, name), name=f"lifeline {name}", daemon=True).start()
        self._listener.close()

    def describe(self, error: Exception | None = None) -> str:
        """Return a message that names the ranks whose connections have closed."""
        # After an error of torch.distributed, wait at most so many seconds until the lost rank's connection closes too
        naming_seconds = 1.0
        deadline = time.monotonic() + naming_seconds
        while not self.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.lost:
            return f"{self.lost[0]} of tensor parallelism is lost, so the job ends: start it again"
        return f"tensor parallelism has failed, and the job with it: start it again ({error or 'it failed before'})"

    def close(self) -> None:
        """Tell the other ranks that the job ends normally; may be called twice."""
        self._closed = True
        self._listener.close()
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _watch(self, line: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            line.recv(1)
        if self._closed:
            return
        self.lost.append(name)
        # Rank 0 may be stuck in a layer once another rank is lost. This thread ends rank 0 if it has not ended by
        # itself after so many seconds, which suffice on a busy machine.
        first_ending_seconds = 20.0
        time.sleep(first_ending_seconds)
        if not self._closed:
            print(f"fastdecode: error: {self.describe()}", flush=True)
            os._exit(1)


def hold_on(host: str, port: int, name: str) -> Callable[[], None]:
    """Watch rank 0 from a thread, which ends this process when rank 0's process ends; return a function that stops it.

    Raise RankLostError if rank 0 cannot be reached.
    """
    try:
        line = socket.create_connection((host, port))
    except OSError as error:
        raise RankLostError(f"rank 0 cannot be reached at {host}:{port}: {error}") from None
    line.sendall(name.encode())
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            line.recv(1)
        # Seconds that this rank may take to end by itself once rank 0 is lost
        ending_seconds = 3.0
        if not over.wait(ending_seconds):
            os._exit(1)

    def let_go() -> None:
        over.set()
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        line.close()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    return let_go
