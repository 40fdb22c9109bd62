"""This process's place in an MPI job: the only file that knows MPI. Importing it starts MPI.

Buffers only, as bytes. The S-worker is rank 0 and every other rank is an R-worker. Between two ranks go *words*, eight
bytes that are always expected and say what is there, and *messages*, whose sizes both sides know.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import mpi4py
import numpy as np

from fastdecode.errors import ConfigError
from fastdecode.machine import usable_cores

mpi4py.rc.thread_level = "serialized"  # one thread at a time, which costs nothing; MULTIPLE is slow in Open MPI

from mpi4py import MPI  # noqa: E402

SPINS_VARIABLE = "FASTDECODE_MPI_SPINS"
SPINS, SPINS_ON_FEW_CORES, FEW_CORES = 300, 20, 4
"""How often a wait looks again before it sleeps: on few cores these are turns that somebody else could use."""

NAP_SECONDS, IDLE_NAP_SECONDS = 20e-6, 1e-3
IDLE_SECONDS = 1.0
"""A rank that has heard nothing for so long sleeps longer."""

_WORD_TAG, _NO_TAG = 0, 1
_PR_SET_TIMERSLACK = 29


class MpiJob:
    """All ranks of this mpirun. Calls of MPI take turns."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.turn = _Turn()
        self.spins = _spins()
        self._peers: dict[int, MpiPeer] = {}
        _sleep_precisely()

    def peer(self, rank: int) -> MpiPeer:
        """The way to ``rank``, the same object each time."""
        if rank not in self._peers:
            self._peers[rank] = MpiPeer(self, self._world, rank)
        return self._peers[rank]

    def move_on(self) -> None:
        """Look into MPI, which moves large messages on only while somebody does."""
        with self.turn:
            self._world.Iprobe(self.rank, _NO_TAG)

    def abort(self, reason: str) -> None:
        """End the whole job now, with status 1; does not return."""
        print(f"fastdecode: error: MPI rank {self.rank}: {reason}", file=sys.stderr, flush=True)
        self._world.Abort(1)


class MpiPeer:
    """Words and messages to and from one other rank; ConnectionError where MPI fails."""

    def __init__(self, job: MpiJob, world: Any, rank: int) -> None:
        self.rank = rank
        self._job, self._world, self._turn = job, world, job.turn
        self._heard = time.monotonic()
        self._word = np.zeros(1, np.uint64)
        self._arrival: Any = self.receive(self._word, _WORD_TAG)

    def send(self, buffer: Any, tag: int) -> Any:
        """Start a message; the buffer is left alone until the request is done."""
        with self._turn:
            return self._world.Isend([buffer, MPI.BYTE], self.rank, tag)

    def receive(self, buffer: Any, tag: int) -> Any:
        """Expect a message of exactly this many bytes."""
        with self._turn:
            return self._world.Irecv([buffer, MPI.BYTE], self.rank, tag)

    def send_word(self, word: int) -> Any:
        """Start to send one word of 64 bits."""
        return self.send(np.array([word], np.uint64), _WORD_TAG)

    def word_is_there(self, timeout_seconds: float) -> bool:
        """True when ``take_word`` may be called."""
        return self.wait([self._arrival], timeout_seconds)

    def take_word(self) -> int:
        """The word that is there; the next is expected from now on."""
        word = int(self._word[0])
        self._arrival = self.receive(self._word, _WORD_TAG)
        return word

    def hears(self, word: int, timeout_seconds: float) -> bool:
        """Drop words until this one comes; False when it does not in time."""
        deadline = time.monotonic() + timeout_seconds
        while self.word_is_there(max(0.0, deadline - time.monotonic())):
            if self.take_word() == word:
                return True
        return False

    def wait(self, requests: Sequence[Any], timeout_seconds: float) -> bool:
        """False when they are not done in time. Looks a few times more at once, then sleeps between looks."""
        spins, deadline = self._job.spins, 0.0
        while not self._done(requests):
            if timeout_seconds == 0:
                return False
            if spins:
                spins -= 1
                continue
            now = time.monotonic()
            deadline = deadline or now + timeout_seconds
            if now >= deadline:
                return False
            time.sleep(NAP_SECONDS if now - self._heard < IDLE_SECONDS else IDLE_NAP_SECONDS)
        self._heard = time.monotonic()
        return True

    def cancel(self, requests: Sequence[Any]) -> None:
        """Expect these messages no longer."""
        with self._turn:
            for request in requests:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
                    request.Wait()

    def close(self) -> None:
        """Expect no more words; MPI must not end while one is expected."""
        self.cancel([self._arrival])

    def _done(self, requests: Sequence[Any]) -> bool:
        with self._turn:
            return all(request.Test() for request in requests)  # one that is done stays so


class _Turn:
    """The lock on MPI, and its errors as the loss of a connection that they mean."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        if isinstance(error, MPI.Exception):
            raise ConnectionError(f"MPI: {error.Get_error_string()}") from error


def _spins() -> int:
    given = os.environ.get(SPINS_VARIABLE)
    if given is None:
        return SPINS if len(usable_cores()) >= FEW_CORES else SPINS_ON_FEW_CORES
    if not given.isdigit():
        raise ConfigError(f"{SPINS_VARIABLE} must be a whole number of at least 0, not {given!r}")
    return int(given)


def _sleep_precisely() -> None:
    """Linux adds up to 50 µs to every sleep of a thread that does not ask for less; its later threads inherit it."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
