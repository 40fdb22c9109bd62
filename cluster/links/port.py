"""A ZeroMQ listener that serves any number of peers in its own thread: KV ports, and ports of prefill workers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from fastdecode.cluster.links.link import TICK_SECONDS
from fastdecode.cluster.links.peer import MOST_LOGGED, PeerChannel
from fastdecode.cluster.links.zeromq import ZmqListener
from fastdecode.cluster.wire.frames import Conversation, Frame, Kind, decode
from fastdecode.cluster.wire.handshake import BOTH_SIDES, R_WORKER, Gate, Security
from fastdecode.cluster.wire.messages import MOST_IN_FLIGHT, encode_refusal
from fastdecode.core.errors import CapacityError, FrameError

LIMITS = 1 << 23, 3 * MOST_IN_FLIGHT
"""(Most bytes of a message's part, most queued messages of a peer).

A part can hold one row of keys of the largest layer. The queue holds MOST_IN_FLIGHT messages three times, since libzmq
counts up to half of the queue as waiting after it was read. A peer that sends more fills 1.1 GiB, and then blocks.
"""

log = logging.getLogger("fastdecode.port")


class Reader:
    """Reads the parts of one received frame in order; parts that are not read are dropped."""

    def __init__(self, listener: ZmqListener) -> None:
        self._listener = listener
        self.read_into = listener.read_into

    def body(self, frame: Frame, most_bytes: int) -> bytearray:
        """Return the only part of ``frame``.

        Raise FrameError if the frame has several parts, or one part of more than ``most_bytes`` bytes.
        """
        if frame.lengths[0] > most_bytes or any(frame.lengths[1:]):
            raise FrameError(f"a {frame.kind.name} frame with parts of {frame.lengths} bytes; {most_bytes:,} at most")
        data = bytearray(frame.lengths[0])
        if data:
            self.read_into(data)
        return data

    def record(self, form: struct.Struct) -> tuple[Any, ...]:
        """Return the next part's numbers, unpacked by ``form``. Raise FrameError if the part has another size."""
        return form.unpack(self._listener.read_part(form.size))

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the next part as a read-only array over the received bytes; copied only if they are not aligned.

        Raise FrameError if the part has another size.
        """
        part = self._listener.read_part(math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(part, dtype).reshape(shape)
        return array if array.flags.aligned else array.copy()


class Bell:
    """Wakes a thread that polls ``descriptor``, a file descriptor.

    Any thread may call ``ring``. ``descriptor``, a pipe, is then readable until ``hush`` is called.
    """

    def __init__(self) -> None:
        self.descriptor, self._rung = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._rung, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # if the pipe is full, ``descriptor`` is readable already
            os.write(self._rung, b"\0")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 1 << 16)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._rung)


Handler = Callable[["Port", bytes, Frame, Reader], None]
"""A function called in the port's thread with the port, a peer's identity, its frame, and the frame's parts.

A FrameError, ValueError, KeyError or CapacityError that it raises is sent to the peer in a REFUSED frame.
"""


class Port:
    """Listens at ``address`` ("host:port") until ``close``.

    Every frame must carry ``epoch``, 63 random bits. If the port has a key, the peer must hold it. The port refuses any
    other frame, logs this once per reason, and changes nothing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        security: Security,
        handle: Handler,
        role: str = R_WORKER,
        open_kinds: Collection[Kind] = (),
        niceness: int = 0,
    ) -> None:
        """Listen at ``host`` (a numeric address or "*"); port 0 chooses one. Raise OSError if listening fails.

        ``role``: this side's role. ``open_kinds``: kinds of frames that may carry epoch 0, such as HELLO. ``niceness``:
        how much to raise the niceness of the port's and libzmq's threads, which lowers their priority.
        """
        self.epoch = secrets.randbelow((1 << 63) - 1) + 1
        self._handle, self._open_kinds = handle, frozenset(open_kinds)
        self._gate = None if security.proof_key is None else Gate(security.proof_key)
        self._proven: dict[bytes, None] = {}
        self._peers: dict[bytes, Conversation] = {}
        self._outbox: deque[tuple[bytes, Kind, tuple[Any, ...], int]] = deque()
        self._logged: set[str] = set()
        self._bell = Bell()
        self._is_closing = False
        self._watched: tuple[bytes, Callable[[], None]] | None = None
        self._next_look = 0.0
        bind = partial(ZmqListener, host, port, security.curve_secret, role, *LIMITS)
        bound: SimpleQueue[ZmqListener | Exception] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(bind, niceness, bound), name="port", daemon=True)
        self._thread.start()
        listener = bound.get()
        if isinstance(listener, Exception):
            self.close()
            raise listener
        self.address = listener.address.removeprefix("tcp://")

    @property
    def tcp_port(self) -> int:
        """The port number in ``address``."""
        return int(self.address.rpartition(":")[2])

    def send(self, identity: bytes, kind: Kind, *parts: Any, layer: int = 0) -> None:
        """Send a frame to the peer ``identity``. Any thread may call this. No effect if the peer is gone or stuck."""
        self._outbox.append((identity, kind, parts, layer))
        if threading.current_thread() is not self._thread:
            self._bell.ring()

    def refuse(self, identity: bytes, error: str, message: str) -> None:
        """Send a REFUSED frame without the epoch, which a stranger must not learn. Call this only from the handler."""
        self._refuse(Conversation(PeerChannel(self._listener, identity)), error, message)

    def renew_epoch(self) -> None:
        """Draw a new epoch, so that frames with the old epoch are refused. Call this only from the handler."""
        self.epoch = secrets.randbelow((1 << 63) - 1) + 1
        self._peers.clear()

    def look_after(self, identity: bytes, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` once, in the port's thread, when the peer ``identity`` is gone.

        Only one peer is watched: this call ends the watch of the previous peer. Call this only from the handler.
        """
        self._watched = identity, on_gone

    def close(self) -> None:
        """Close the port and wait until its thread has ended; may be called twice."""
        if not self._is_closing:
            self._is_closing = True
            self._bell.ring()
            self._thread.join()
            self._bell.close()

    def _run(self, bind: Callable[[], ZmqListener], niceness: int, bound: SimpleQueue[ZmqListener | Exception]) -> None:
        """Run the port's thread. It makes the listener, since libzmq's threads inherit this thread's niceness."""
        if niceness:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        try:
            self._listener = bind()
        except Exception as error:
            bound.put(error)
            return
        self._reader = Reader(self._listener)
        self._listener.watch(self._bell.descriptor)
        bound.put(self._listener)
        try:
            while not self._is_closing:
                self._turn()
        finally:
            self._listener.close()

    def _turn(self) -> None:
        if peer := self._listener.accept(TICK_SECONDS):
            self._receive(peer)
            self._listener.skip()
        self._look_after()
        self._bell.hush()
        while self._outbox:
            identity, kind, parts, layer = self._outbox.popleft()
            with contextlib.suppress(ConnectionError):
                self._conversation(identity).send(kind, *parts, layer=layer)

    def _look_after(self) -> None:
        """Send the watched peer an empty message now and then. The sending fails once the peer is gone."""
        if self._watched is None or (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + TICK_SECONDS
        identity, on_gone = self._watched
        try:
            PeerChannel(self._listener, identity).send([b""])
        except ConnectionError:
            self._watched = None
            on_gone()

    def _receive(self, peer: PeerChannel) -> None:
        try:
            if self._gate is None or peer.identity in self._proven:
                self._serve(peer)
            elif self._gate.admits(peer, peer.identity):
                _remember(self._proven, peer.identity, None)
                Conversation(peer).send(Kind.PROVEN)
        except ConnectionError:
            pass
        except FrameError as error:
            # The peer may be an unknown one, so the answer is a new ``Conversation``, which does not tell the epoch
            self._refuse(Conversation(peer), "frame", str(error))

    def _serve(self, peer: PeerChannel) -> None:
        frame = decode(peer.first_header or b"")
        if frame.kind is Kind.CHALLENGE and self._gate is None:
            raise FrameError(f"this side has no key: {BOTH_SIDES}")
        if frame.epoch != self.epoch and (frame.epoch or frame.kind not in self._open_kinds):
            raise FrameError(f"a {frame.kind.name} frame of another session (epoch {frame.epoch:#x})")
        conversation = self._conversation(peer.identity) if frame.epoch else Conversation(peer)
        try:
            conversation.check_order(frame)
            self._handle(self, peer.identity, frame, self._reader)
        except FrameError as error:
            self._refuse(conversation, "frame", str(error))
        except (CapacityError, MemoryError) as error:
            self._refuse(conversation, "capacity", str(error) or "out of memory")
        except (ValueError, KeyError) as error:
            self._refuse(conversation, "refused", str(error.args[0] if error.args else error))
        except ConnectionError:
            raise
        except Exception as error:  # one peer's frame must not end the thread, which serves all peers
            log.exception("a %s frame failed", frame.kind.name)
            self._refuse(conversation, "refused", f"{type(error).__name__} while it was handled")

    def _refuse(self, conversation: Conversation, error: str, message: str) -> None:
        if message not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(message)
            log.warning("refused: %s", message)
        with contextlib.suppress(ConnectionError):
            conversation.send(Kind.REFUSED, encode_refusal(error, message))

    def _conversation(self, identity: bytes) -> Conversation:
        found = self._peers.get(identity)
        if found is None:
            found = Conversation(PeerChannel(self._listener, identity))
            found.epoch = self.epoch
            _remember(self._peers, identity, found)
        return found


def _remember(peers: dict[bytes, Any], identity: bytes, value: Any) -> None:
    # Most peers whose state the port remembers; with more, it forgets the peer that it has known longest
    most_peers = 1024
    while len(peers) >= most_peers:
        peers.pop(next(iter(peers)))
    peers[identity] = value
