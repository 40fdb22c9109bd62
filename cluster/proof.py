"""The handshake of connections that carry clear data: before HELLO both ends prove that they hold the pool's secret.

::

    S-worker                                               R-worker
    CHALLENGE  n, 32 random bytes                     →
                                                      ←    CHALLENGED  m, 32 random bytes, HMAC("r-worker|" n m)
    PROOF      HMAC("s-worker|" n m)                  →
                                                      ←    PROVEN

HMAC is HMAC-SHA256 with a key derived from the secret. The roles keep a proof from being sent back to who made it, and
the random bytes from being used again: each challenge is answered once. What follows is believed for the connection it
comes on; who can change on its way what TCP carries is not kept out.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from contextlib import suppress

from fastdecode.cluster.frames import Channel, Conversation, Frame, Kind
from fastdecode.cluster.messages import MAX_JSON_BYTES, decode_refusal, encode_refusal
from fastdecode.errors import BackendError, FrameError

NONCE_BYTES = PROOF_BYTES = 32
MOST_PENDING = 64
"""Challenges that wait for their proof; of more the oldest is forgotten."""

PROOF_SECONDS = 30.0
"""Most time to each answer, as long as an R-worker may take to start."""

TICK_SECONDS = 0.1
BOTH_SIDES = "--key-file with --security authenticate must be on both sides, or on neither"

log = logging.getLogger("fastdecode.r_worker")


def proof(key: bytes, role: str, nonces: bytes) -> bytes:
    """What only who holds ``key`` can say for ``role`` ("s-worker", "r-worker") and both nonces: 32 bytes."""
    return hmac.digest(key, role.encode() + b"|" + nonces, "sha256")


def prove(channel: Channel, key: bytes, name: str) -> None:
    """The S-worker's side, to R-worker ``name``; BackendError, saying why, unless both ends hold ``key``."""
    conversation, nonce = Conversation(channel), secrets.token_bytes(NONCE_BYTES)
    try:
        conversation.send(Kind.CHALLENGE, nonce)
        nonces, theirs = _challenged(channel, nonce)
        if not hmac.compare_digest(proof(key, "r-worker", nonces), theirs):
            conversation.send(Kind.BYE)
            raise FrameError("it does not hold this side's key: the same --key-file must be on both sides")
        conversation.send(Kind.PROOF, proof(key, "s-worker", nonces))
        _answer(Conversation(channel), Kind.PROVEN)
    except (ConnectionError, FrameError) as error:
        raise BackendError(f"R-worker {name}: {error}") from error


def _challenged(channel: Channel, nonce: bytes) -> tuple[bytes, bytes]:
    """Both nonces and the R-worker's proof. It numbers its answers from 0: the nonces are what makes them new."""
    conversation = Conversation(channel)
    body = _body(conversation, _answer(conversation, Kind.CHALLENGED), NONCE_BYTES + PROOF_BYTES)
    return nonce + body[:NONCE_BYTES], body[NONCE_BYTES:]


def _answer(conversation: Conversation, kind: Kind) -> Frame:
    deadline = time.monotonic() + PROOF_SECONDS
    while (frame := conversation.receive(TICK_SECONDS)) is None:
        if time.monotonic() > deadline:
            raise ConnectionError(f"it did not answer within {PROOF_SECONDS:g} s")
    if frame.kind is Kind.REFUSED:
        raise FrameError(f"refused: {decode_refusal(conversation.body(frame, MAX_JSON_BYTES))[1]}")
    if frame.kind is not kind:
        raise FrameError(f"it sent a {frame.kind.name} frame, and {kind.name} was to come")
    return frame


class Gate:
    """The R-worker's side: hears peers that have proven nothing yet, and keeps 64 bytes each of the last 64 of them."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._pending: dict[bytes, bytes] = {}
        self._logged = False

    def admits(self, channel: Channel, identity: bytes) -> bool:
        """Read and answer the message at hand, of the peer ``identity``; True when it is a good proof."""
        conversation = Conversation(channel)
        try:
            frame = conversation.receive(0)
            if frame is not None and frame.kind is Kind.CHALLENGE:
                self._challenge(conversation, frame, identity)
            elif frame is not None:
                return self._proves(conversation, frame, identity)
        except FrameError as error:
            self._refuse(conversation, str(error))
        except ConnectionError:
            pass  # it has gone meanwhile, and nothing is lost with it
        return False

    def _challenge(self, conversation: Conversation, frame: Frame, identity: bytes) -> None:
        theirs = _body(conversation, frame, NONCE_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._pending.pop(identity, None)
        while len(self._pending) >= MOST_PENDING:
            self._pending.pop(next(iter(self._pending)))
        self._pending[identity] = theirs + nonce
        conversation.send(Kind.CHALLENGED, nonce + proof(self._key, "r-worker", theirs + nonce))

    def _proves(self, conversation: Conversation, frame: Frame, identity: bytes) -> bool:
        nonces = self._pending.pop(identity, None)
        if frame.kind is not Kind.PROOF or nonces is None:
            raise FrameError(f"it serves who proves to hold its key: {BOTH_SIDES}")
        if not hmac.compare_digest(proof(self._key, "s-worker", nonces), _body(conversation, frame, PROOF_BYTES)):
            raise FrameError("that is no proof of its key: the same --key-file must be on both sides")
        return True

    def _refuse(self, conversation: Conversation, reason: str) -> None:
        if not self._logged:
            self._logged = True
            log.warning("refused: a peer that does not prove to hold this R-worker's key")
        with suppress(ConnectionError):
            conversation.send(Kind.REFUSED, encode_refusal("key", reason))


def _body(conversation: Conversation, frame: Frame, num_bytes: int) -> bytes:
    body = conversation.body(frame, num_bytes)
    if len(body) != num_bytes:
        raise FrameError(f"a {frame.kind.name} frame of {len(body)} bytes, not {num_bytes}")
    return bytes(body)
