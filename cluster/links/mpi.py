"""The ranks of an MPI job. Only this file knows MPI, and importing it starts MPI.

All messages are byte buffers. The S-worker is rank 0; every other rank is an R-worker or a prefill worker
(``mpi_job.py``). Two ranks exchange *words* of eight bytes, for which a receive is always posted, and *messages*. A
word announces each message; both ranks know the message's size.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import mpi4py

# Variables that launchers set for every rank. Without them Open MPI starts a job of a single rank, this process.
if not any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")):
    # for a single process, Open MPI would create a segment of shared memory that nothing removes
    os.environ.setdefault("OMPI_MCA_btl", "self")

mpi4py.rc.thread_level = "serialized"  # SERIALIZED costs nothing, while MULTIPLE is slow in Open MPI

from mpi4py import MPI  # noqa: E402

NAP_SECONDS, IDLE_NAP_SECONDS = 20e-6, 1e-3

_WORD_TAG = 0
_WORD = struct.Struct("=Q")


class MpiJob:
    """All ranks of this mpirun job. Only one thread of this process calls MPI at a time."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.lock = threading.Lock()
        self._peers: dict[int, MpiPeer] = {}
        _sleep_precisely()

    def peer(self, rank: int) -> MpiPeer:
        """Return the connection to ``rank``; later calls return the same object."""
        if rank not in self._peers:
            self._peers[rank] = MpiPeer(self._world, rank, self.lock)
        return self._peers[rank]

    def gather(self, mine: bytes) -> list[bytes]:
        """Send ``mine`` to all ranks; return all ranks' bytes, by rank. Each rank must call this with equal length."""
        found = bytearray(len(mine) * self.size)
        try:
            request = self._world.Iallgather([mine, MPI.BYTE], [found, MPI.BYTE])
            while not request.Test():
                time.sleep(IDLE_NAP_SECONDS)
        except MPI.Exception as error:
            raise _lost(error) from error
        return [bytes(found[i : i + len(mine)]) for i in range(0, len(found), len(mine))]

    def abort(self, reason: str) -> None:
        """End the whole job now with status 1; this does not return."""
        print(f"fastdecode: error: MPI rank {self.rank}: {reason}", file=sys.stderr, flush=True)
        self._world.Abort(1)


class MpiPeer:
    """Words and messages to and from another rank. Methods raise ConnectionError if MPI fails."""

    def __init__(self, world: Any, rank: int, lock: threading.Lock) -> None:
        self.rank = rank
        self._world, self._lock = world, lock
        self._idle_since: float | None = None
        self._word = bytearray(_WORD.size)
        self._arrival: Any = self.receive(self._word, _WORD_TAG)

    def send(self, buffer: Any, tag: int) -> Any:
        """Start sending ``buffer``; return the MPI request. The buffer must not change until the request is done."""
        try:
            with self._lock:
                return self._world.Isend([buffer, MPI.BYTE], self.rank, tag)
        except MPI.Exception as error:
            raise _lost(error) from error

    def receive(self, buffer: Any, tag: int) -> Any:
        """Post a receive for a message of exactly the buffer's size; return the MPI request."""
        try:
            with self._lock:
                return self._world.Irecv([buffer, MPI.BYTE], self.rank, tag)
        except MPI.Exception as error:
            raise _lost(error) from error

    def send_word(self, word: int) -> Any:
        """Start sending one 64-bit word; return the MPI request."""
        return self.send(_WORD.pack(word), _WORD_TAG)

    def word_is_there(self, timeout_seconds: float) -> bool:
        """Return whether a word has arrived, waiting at most ``timeout_seconds``; then ``take_word`` may be called."""
        return self.wait([self._arrival], timeout_seconds)

    def take_word(self) -> int:
        """Return the word that has arrived, and post the receive for the next one."""
        (word,) = _WORD.unpack(self._word)
        self._arrival = self.receive(self._word, _WORD_TAG)
        return word

    def await_word(self, word: int, timeout_seconds: float) -> bool:
        """Drop arriving words until ``word`` arrives; return False if it does not arrive in time."""
        deadline = time.monotonic() + timeout_seconds
        while self.word_is_there(max(0.0, deadline - time.monotonic())):
            if self.take_word() == word:
                return True
        return False

    def wait(self, requests: Sequence[Any], timeout_seconds: float) -> bool:
        """Wait for the MPI ``requests``, sleeping between tests; return False if they are not done in time."""
        done = self.done(requests) or (timeout_seconds > 0 and self._sleep_until_done(requests, timeout_seconds))
        if done:
            self._idle_since = None
        return done

    def _sleep_until_done(self, requests: Sequence[Any], timeout_seconds: float) -> bool:
        start = now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = start
        # A rank that has received nothing for this many seconds sleeps longer between tests
        idle_seconds = 1.0
        while now < start + timeout_seconds:
            time.sleep(NAP_SECONDS if now - self._idle_since < idle_seconds else IDLE_NAP_SECONDS)
            if self.done(requests):
                return True
            now = time.monotonic()
        return False

    def cancel(self, requests: Sequence[Any]) -> None:
        """Cancel the posted receives ``requests``."""
        with self._lock:
            for request in requests:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
                    request.Wait()

    def close(self) -> None:
        """Cancel the receive for the next word, since MPI must not be finalized while a receive is posted."""
        self.cancel([self._arrival])

    def done(self, requests: Sequence[Any]) -> bool:
        """Return whether all MPI ``requests`` are done. A finished request stays finished. Any thread may call this."""
        try:
            with self._lock:
                for request in requests:  # noqa: SIM110 - twice as fast as all(), and every wait runs this loop
                    if not request.Test():
                        return False
                return True
        except MPI.Exception as error:
            raise _lost(error) from error


class Watched(Protocol):
    """The interface of a link that ``SendProgress`` watches."""

    def move_on(self) -> bool:
        """Let MPI make progress on this link's sent messages; return True until all of them have arrived."""


class SendProgress:
    """The S-worker's communication thread: lets MPI make progress on sent messages while the S-worker computes.

    It sleeps while no message is being sent. The S-worker's own thread tests for answers whenever it sends or waits.
    """

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdecode-mpi", daemon=True)
        # Seconds that one thread may hold the GIL while another waits. Python's default of 5 ms is as long as
        # several layers.
        switch_seconds = 1e-4
        sys.setswitchinterval(min(sys.getswitchinterval(), switch_seconds))
        self._thread.start()

    def watch(self, link: Watched) -> None:
        """Let MPI make progress also on the messages that ``link`` sends."""
        self._watched = [*self._watched, link]

    def forget(self, link: Watched) -> None:
        """Watch ``link`` no more."""
        self._watched = [each for each in self._watched if each is not link]

    def nudge(self) -> None:
        """Wake the thread, since a message is being sent."""
        self._wake.set()

    def stop(self) -> None:
        """End the communication thread, before MPI is finalized."""
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        # Seconds between two tests while q, k, v are being sent. Each test takes about 50 µs of the S-worker's core.
        progress_seconds = 200e-6
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            time.sleep(progress_seconds)  # after this time most messages have arrived and need no test
            while not self._stopped and self._move_on():
                time.sleep(progress_seconds)

    def _move_on(self) -> bool:
        moved = [link.move_on() for link in self._watched]
        return any(moved)


def _lost(error: MPI.Exception) -> ConnectionError:
    return ConnectionError(f"MPI: {error.Get_error_string()}")


def _sleep_precisely() -> None:
    """Turn off the up to 50 µs that Linux adds to every sleep of a thread; threads started later inherit this."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1000, 0, 0, 0)
