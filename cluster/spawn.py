"""R-workers as processes that this one starts and that end with it: the pool for one machine, or one NUMA node each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastdecode.cluster.frames import Frame, Kind
from fastdecode.cluster.local import RWorkerSize
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.shared import SharedPath, make_memory
from fastdecode.cluster.stream import StreamChannel

END_SECONDS = 10.0
"""How long an R-worker may take to end once it was told to; then it is killed."""

EXIT_SECONDS = 0.1
"""From a process's closing its socket to its end."""


class SpawnBackend(PoolBackend):
    """``AttentionBackend`` over one process per entry of ``sizes``; payload goes through shared memory."""

    def __init__(self, sizes: Sequence[RWorkerSize], block_size: int) -> None:
        super().__init__(
            [
                RemoteWorker(name, partial(_SpawnedPath, name, size), block_size)
                for name, size in ((f"spawn-{index}", size) for index, size in enumerate(sizes))
            ]
        )


class _SpawnedPath(SharedPath):
    """The path to a process of our own, which starts with it and ends with it."""

    def __init__(self, name: str, size: RWorkerSize) -> None:
        mine, theirs = socket.socketpair()
        memory = make_memory()
        super().__init__(StreamChannel(mine), memory, is_s_worker=True)
        with theirs:
            self._process = subprocess.Popen(
                _command(size, theirs.fileno(), memory),
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",  # `-m` puts the current folder on the path, and a checkout is not the installed package
                start_new_session=True,  # Ctrl-C is the S-worker's, which then says goodbye
            )

    def next(self, timeout_seconds: float) -> Frame | None:
        """See ``Path.next``; how the process ended is said where it did. One that is lost never speaks again."""
        try:
            return super().next(timeout_seconds)
        except ConnectionError as error:
            raise self._gone(error) from None

    def send(self, kind: Kind, *parts: Any) -> None:
        """See ``Path.send`` and ``next``."""
        try:
            super().send(kind, *parts)
        except ConnectionError as error:
            raise self._gone(error) from None

    def close(self) -> None:
        """See ``Path.close``; the process ends, for it sees its socket close."""
        super().close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
            return
        self._process.kill()
        self._process.wait()

    def _gone(self, error: ConnectionError) -> ConnectionError:
        how_it_ended = self._how_it_ended()
        self._process.kill()
        return ConnectionError(how_it_ended or str(error))

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        return f"its process was killed by {signal.Signals(-status).name}" if status < 0 else f"it exited with {status}"


def _command(size: RWorkerSize, control: int, memory: int) -> list[str]:
    command = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--control-fd", str(control)]
    command += ["--memory-fd", str(memory), "--kv-cache-memory", str(size.kv_cache_bytes)]
    command += ["--threads", str(size.num_threads)]
    if size.cores:
        command += ["--cores", ",".join(map(str, sorted(set(size.cores))))]
    if threading.current_thread() is threading.main_thread():
        # Linux sends the signal when the thread that started the process ends; only the main one lasts for sure.
        command += ["--parent", str(os.getpid())]
    return command
