"""A pool's shared secret, and the handshake by which both ends of a clear connection prove that they hold it.

::

    S-worker                                               R-worker
    CHALLENGE  n, 32 random bytes                     →
                                                      ←    CHALLENGED  m, 32 random bytes, HMAC("r-worker|" n m)
    PROOF      HMAC("s-worker|" n m)                  →
                                                      ←    PROVEN

HMAC is HMAC-SHA256 with a key derived from the secret. The roles in the HMACs keep an end from sending back the
other's proof. The random bytes keep a recorded proof from being used again, since each challenge is answered once. The
proof authenticates the other end at the start; it does not protect TCP data from changes on the way.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fastdecode.cluster.wire.frames import Channel, Conversation, Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.messages import decode_refusal, encode_refusal
from fastdecode.core.errors import BackendError, ConfigError, FrameError, WorkerLostError

S_WORKER, R_WORKER = "s-worker", "r-worker"
"""The roles of the two ends of a connection; each has its own keys and proofs."""

NONCE_BYTES = PROOF_BYTES = 32
MOST_PENDING = 64
"""Most challenges that an R-worker keeps while it waits for their proofs; then it drops the oldest."""

TICK_SECONDS = 0.1
BOTH_SIDES = "--key-file with --security authenticate must be on both sides, or on neither"

AnyChannel = TypeVar("AnyChannel", bound=Channel)

log = logging.getLogger("fastdecode.r_worker")


@dataclass(frozen=True)
class Security:
    """The security of a connection. Its two ends authenticate each other by ``secret``, if there is one.

    With ``encrypts``, ZeroMQ's CURVE authenticates and encrypts. Otherwise this module's handshake authenticates the
    ends, and data is unencrypted.
    """

    secret: bytes | None = field(default=None, repr=False)
    encrypts: bool = True

    @property
    def curve_secret(self) -> bytes | None:
        """The source of CURVE's keys; None for connections without CURVE."""
        return self.secret if self.encrypts else None

    @property
    def proof_key(self) -> bytes | None:
        """The 32 bytes whose knowledge the handshake proves; None for connections without it."""
        return None if self.secret is None or self.encrypts else derive_key(self.secret, "handshake")


def read_security(key_file: str | None, level: str | None) -> Security:
    """Return the security with the secret in ``key_file`` and ``level`` (None: encrypt), one of ``SECURITY_LEVELS``.

    Raise ConfigError for a bad file.
    """
    return Security(read_secret(key_file) if key_file else None, level != "authenticate")


def read_secret(path: str) -> bytes:
    """Return the key file's contents without surrounding white space.

    Raise ConfigError unless the file is private and long enough.
    """
    most_bytes = 4096
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(most_bytes + 1).strip()
    except OSError as error:
        raise ConfigError(f"key_file: cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o177:
        raise ConfigError(f"key_file: {path} must be a file that only its owner can use: chmod 600 {path}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"key_file: {path} must be owned by the user of this process, not by user {status.st_uid}")
    least_bytes = 32
    if not least_bytes <= len(secret) <= most_bytes:
        raise ConfigError(
            f"key_file: {path} holds {len(secret)} bytes; it takes {least_bytes} to {most_bytes} random ones, such as "
            f"`openssl rand -hex 32` gives"
        )
    return secret


def derive_key(secret: bytes, role: str) -> bytes:
    """Return a key of 32 bytes, derived from ``secret`` for ``role`` ("s-worker", "r-worker", "handshake").

    The derivation is HKDF-SHA256 (RFC 5869) with one block of output.
    """
    extracted = hmac.digest(b"fastdecode curve keys v1", secret, "sha256")
    return hmac.digest(extracted, role.encode() + b"\x01", "sha256")


def proof(key: bytes, role: str, nonces: bytes) -> bytes:
    """Return 32 bytes that only a holder of ``key`` can compute, for ``role`` and both nonces."""
    return hmac.digest(key, role.encode() + b"|" + nonces, "sha256")


def proven(channel: AnyChannel, security: Security, name: str) -> AnyChannel:
    """Return ``channel`` once both ends have proven that they hold the key, if ``security`` asks for proofs.

    On failure, close ``channel``, and raise BackendError, or WorkerLostError if the other end, ``name``, is gone.
    """
    try:
        if security.proof_key is not None:
            _prove(channel, security.proof_key, name)
    except BaseException:
        channel.close()
        raise
    return channel


def _prove(channel: Channel, key: bytes, name: str) -> None:
    conversation, nonce = Conversation(channel), secrets.token_bytes(NONCE_BYTES)
    try:
        conversation.send(Kind.CHALLENGE, nonce)
        nonces, theirs = _challenged(channel, nonce)
        if not hmac.compare_digest(proof(key, R_WORKER, nonces), theirs):
            conversation.send(Kind.BYE)
            raise FrameError("the other side does not hold this side's key: the same --key-file must be on both sides")
        conversation.send(Kind.PROOF, proof(key, S_WORKER, nonces))
        _answer(Conversation(channel), Kind.PROVEN)
    except ConnectionError as error:
        raise WorkerLostError(f"R-worker {name} is lost: {error}") from error
    except FrameError as error:
        raise BackendError(f"R-worker {name}: {error}") from error


def _challenged(channel: Channel, nonce: bytes) -> tuple[bytes, bytes]:
    """Send ``nonce`` as a CHALLENGE; return (both nonces concatenated, the R-worker's proof).

    The R-worker numbers its answers from 0; the nonces show that an answer is new.
    """
    conversation = Conversation(channel)
    body = _body(conversation, _answer(conversation, Kind.CHALLENGED), NONCE_BYTES + PROOF_BYTES)
    return nonce + body[:NONCE_BYTES], body[NONCE_BYTES:]


def _answer(conversation: Conversation, kind: Kind) -> Frame:
    # Most seconds for each answer. An R-worker that is starting may need this long.
    proof_seconds = 30.0
    deadline = time.monotonic() + proof_seconds
    while (frame := conversation.receive(TICK_SECONDS)) is None:
        if time.monotonic() > deadline:
            raise ConnectionError(f"no answer came within {proof_seconds:g} s")
    if frame.kind is Kind.REFUSED:
        raise FrameError(f"refused: {decode_refusal(conversation.body(frame, MAX_JSON_BYTES))[1]}")
    if frame.kind is not kind:
        raise FrameError(f"a {frame.kind.name} frame came in place of {kind.name}")
    return frame


class Gate:
    """The R-worker's side of the handshake. It keeps 64 bytes for each of the last 64 unproven peers."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._pending: dict[bytes, bytes] = {}
        self._logged = False

    def admits(self, channel: Channel, identity: bytes) -> bool:
        """Read and answer the current message of the peer ``identity``; return True if it is a good proof."""
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
            pass  # the peer has disconnected
        return False

    def _challenge(self, conversation: Conversation, frame: Frame, identity: bytes) -> None:
        theirs = _body(conversation, frame, NONCE_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._pending.pop(identity, None)
        while len(self._pending) >= MOST_PENDING:
            self._pending.pop(next(iter(self._pending)))
        self._pending[identity] = theirs + nonce
        conversation.send(Kind.CHALLENGED, nonce + proof(self._key, R_WORKER, theirs + nonce))

    def _proves(self, conversation: Conversation, frame: Frame, identity: bytes) -> bool:
        nonces = self._pending.pop(identity, None)
        if frame.kind is not Kind.PROOF or nonces is None:
            raise FrameError(f"this R-worker serves only peers that prove to hold its key: {BOTH_SIDES}")
        if not hmac.compare_digest(proof(self._key, S_WORKER, nonces), _body(conversation, frame, PROOF_BYTES)):
            raise FrameError("its proof of the key is wrong: the same --key-file must be on both sides")
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
