"""The shared secret of a pool: a key file that only its owner can read, and what is derived from it."""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from fastdecode.errors import ConfigError

LEAST_BYTES = 32
MOST_BYTES = 4096


@dataclass(frozen=True)
class Security:
    """How the two ends of a connection know each other: by ``secret``, if any, and with ``encrypts`` by CURVE.

    A secret without encryption is proven in a handshake of our own, and then frames are clear data.
    """

    secret: bytes | None = field(default=None, repr=False)
    encrypts: bool = True

    @property
    def curve_secret(self) -> bytes | None:
        """What CURVE's keys are derived from, None for connections without it."""
        return self.secret if self.encrypts else None

    @property
    def proof_key(self) -> bytes | None:
        """32 bytes that the handshake proves knowledge of, None for connections without it."""
        return None if self.secret is None or self.encrypts else derive_key(self.secret, "handshake")


def read_security(key_file: str | None, level: str | None) -> Security:
    """What a key file and a level of ``SECURITY_LEVELS`` (None: encrypt) ask for; ConfigError for a bad key file."""
    return Security(read_secret(key_file) if key_file else None, level != "authenticate")


def read_secret(path: str) -> bytes:
    """The key file's contents, without white space at the ends; ConfigError unless it is private and long enough."""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"key_file: cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o177:
        raise ConfigError(f"key_file: {path} must be a file that only its owner can use: chmod 600 {path}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"key_file: {path} must be owned by the user who runs this, not by user {status.st_uid}")
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise ConfigError(
            f"key_file: {path} holds {len(secret)} bytes; it takes {LEAST_BYTES} to {MOST_BYTES} random ones, such as "
            f"`openssl rand -hex 32` gives"
        )
    return secret


def derive_key(secret: bytes, role: str) -> bytes:
    """32 bytes for ``role`` ("s-worker", "r-worker", "handshake"): HKDF-SHA256 (RFC 5869), one block of output."""
    extracted = hmac.digest(b"fastdecode curve keys v1", secret, "sha256")
    return hmac.digest(extracted, role.encode() + b"\x01", "sha256")
