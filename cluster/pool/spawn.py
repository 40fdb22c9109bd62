"""R-workers as processes on this machine that the S-worker starts and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from fastdecode.cluster.links.link import SILENCE_SECONDS
from fastdecode.cluster.links.shared_memory import SharedMemoryLink, SilenceError, make_memory
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.remote import RemoteWorker
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.own_folder import leave_folder, make_folder
from fastdecode.core.parent import parent_flags
from fastdecode.core.parked import ParkPlace
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout


class SpawnBackend(PoolBackend):
    """An ``AttentionBackend`` over one process per entry of ``sizes``, with payload in shared memory."""

    def __init__(
        self,
        sizes: Sequence[RWorkerSize],
        block_size: int,
        key_file: str | None = None,
        security: str | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        park: ParkPlace | None = None,
    ) -> None:
        """``key_file``, ``security`` (see ``TcpBackend``): for the R-workers' KV ports, if the layout asks for ports.

        ``silence_seconds``: an R-worker silent for this long is lost and killed. ``park``: where it parks prefixes.
        """
        flags = _security_flags(key_file, security)
        self._park = park.folder if park else None
        places = [park.of(index).flags() if park else [] for index in range(len(sizes))]
        super().__init__(
            [
                RemoteWorker(
                    f"spawn-{index}", partial(_SpawnedLink, size, [*flags, *place], silence_seconds), block_size
                )
                for index, (size, place) in enumerate(zip(sizes, places, strict=True))
            ]
        )

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        if self._park:
            with contextlib.suppress(OSError):  # an R-worker reports why it cannot make its folder
                make_folder(self._park)
        return super().open(layout)

    def close(self) -> None:
        super().close()
        if self._park:
            leave_folder(self._park)

    def _anew(self, gone: PoolWorker, is_last: bool) -> Callable[[], RemoteWorker] | None:
        """Return a function that starts a process in place of ``gone``; None while other R-workers are left."""
        return gone.anew if isinstance(gone, RemoteWorker) and is_last else None


class _SpawnedLink(SharedMemoryLink):
    """A shared-memory link to an R-worker's ``process``, which this object starts and ends."""

    def __init__(self, size: RWorkerSize, flags: Sequence[str], silence_seconds: float) -> None:
        """``flags``: additional flags for the R-worker's command line."""
        mine, theirs = socket.socketpair()
        memory = make_memory()
        super().__init__(mine, memory, is_s_worker=True, silence_seconds=silence_seconds)
        with theirs:
            self.process = subprocess.Popen(
                [*_command(size, theirs.fileno(), memory), *flags],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONSAFEPATH": "1"},  # a checkout as current folder would hide the extensions
                start_new_session=True,  # Ctrl-C must reach only the S-worker, which then sends BYE
            )

    def close(self) -> None:
        """See ``Link.close``. The process ends when it sees its socket close."""
        super().close()
        # Most seconds for an R-worker to end after its socket is closed; then the S-worker kills it
        end_seconds = 10.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(end_seconds)
            return
        self.process.kill()
        self.process.wait()

    def give_up(self, error: Exception) -> str:
        """See ``Link.give_up``. Kill the process if it still runs; return how it ended."""
        how_it_ended = "" if isinstance(error, SilenceError) else self._how_it_ended()
        self.process.kill()
        return how_it_ended or str(error)

    def _how_it_ended(self) -> str:
        # Seconds that a process takes to end after closing its socket
        exit_seconds = 0.1
        try:
            status = self.process.wait(exit_seconds)
        except subprocess.TimeoutExpired:
            return ""
        return (
            f"its process was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"its process exited with {status}"
        )


def _command(size: RWorkerSize, control: int, memory: int) -> list[str]:
    command = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--control-fd", str(control)]
    command += ["--memory-fd", str(memory), "--kv-cache-memory", str(size.kv_cache_bytes)]
    command += ["--threads", str(size.num_threads)]
    if size.cores:
        command += ["--cores", ",".join(map(str, sorted(set(size.cores))))]
    return command + parent_flags()


def _security_flags(key_file: str | None, security: str | None) -> list[str]:
    flags = ["--key-file", key_file] if key_file else []
    return [*flags, "--security", security] if security else flags
