"""The places that can keep a journal: here, a local folder; in ``fastdecode.cluster.pool``, R-workers' memory."""

from __future__ import annotations

import fcntl
import logging
import math
import os
from pathlib import Path
from typing import Protocol

from fastdecode.core.errors import ConfigError, naming
from fastdecode.core.own_folder import leave_folder, make_folder

FILE = "journal"

logger = logging.getLogger(__name__)


class Place(Protocol):
    """A place that keeps the bytes of one journal. Its methods raise OSError or CapacityError when they fail.
    ``name``: for logs. ``growth_bytes``: a journal that has grown by this much, and to twice its size, is rewritten
    without requests that ended long ago. ``most_bytes``: the largest journal; math.inf for no limit. ``is_own``: False
    once another process has taken the place over.
    """

    name: str
    growth_bytes: int
    most_bytes: float

    @property
    def is_own(self) -> bool: ...

    def copies(self) -> list[bytes]:
        """Return the bytes of each journal copy found; a copy may be outdated, cut off or damaged."""

    def written(self) -> bytes:
        """Return the bytes of the journal that this process has written."""

    def replace(self, data: bytes) -> None:
        """Replace the whole journal by ``data``."""

    def append(self, data: bytes) -> None:
        """Append ``data`` to the journal; the write may complete later (see ``settle``)."""

    def settle(self) -> None:
        """Wait until all appended data survives the end of this process."""

    def end(self, data: bytes) -> None:
        """Replace the journal by ``data``, a complete journal without requests to continue."""

    def close(self) -> None:
        """Close the place; may be called twice."""


class Folder:
    """A ``Place`` in a folder, which one process at a time may write."""

    growth_bytes = 1 << 26
    most_bytes: float = math.inf

    def __init__(self, folder: str, takes_over: bool = False) -> None:
        """Open ``folder``, and create it if it is missing.
        ``takes_over``: write even if another process has the folder open, since that process has lost its R-workers.
        """
        self.name = folder
        self._path = Path(folder) / FILE
        self._fd = -1
        self._is_used = False
        try:
            with naming(folder):
                make_folder(Path(folder))
                self._lock = _locked(Path(folder) / "lock", takes_over)
        except OSError as error:
            raise ConfigError(f"journal: {error.filename}: {error.strerror}") from None

    @property
    def is_own(self) -> bool:
        return os.path.samestat(os.fstat(self._fd), os.stat(self._path))  # noqa: PTH116 (as fstat gives it)

    def copies(self) -> list[bytes]:
        return [self._path.read_bytes()] if self._path.exists() else []

    def written(self) -> bytes:
        return self._path.read_bytes()

    def replace(self, data: bytes) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        aside = self._path.with_suffix(".new")
        with naming(str(aside)), aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path)  # noqa: PTH105 (both are plain strings)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def append(self, data: bytes) -> None:
        """Append ``data`` in one write. It is not synced to the disk, so a power failure may lose the last steps."""
        self._is_used = True
        if (written := os.write(self._fd, data)) < len(data):
            raise OSError(0, f"{written} of {len(data)} bytes were written")

    def settle(self) -> None:
        pass

    def end(self, data: bytes) -> None:
        self.replace(data)

    def close(self) -> None:
        """Close the folder; may be called twice. If this process made the folder and recorded nothing, remove it."""
        if self._lock >= 0 and not self._is_used and os.fstat(self._lock).st_nlink:  # still this process's folder
            leave_folder(self._path.parent, FILE, "lock", "pulse")
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1


def _locked(path: Path, takes_over: bool) -> int:
    """Open and lock ``path`` until this process ends; return its file descriptor.
    If another process has the lock, raise ConfigError with its id, unless this process ``takes_over``.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 20).decode(errors="replace")
        os.close(fd)
        if takes_over:
            logger.warning("journal: %s was written by process %s; this process takes it over", path.parent, owner)
            path.unlink()
            return _locked(path, takes_over=False)
        raise ConfigError(
            f"journal: {path.parent} is written by process {owner}: give each engine its own folder"
        ) from None
    if not os.fstat(fd).st_nlink:  # another run removed the folder after ``path`` was opened
        os.close(fd)
        make_folder(path.parent)
        return _locked(path, takes_over)
    os.truncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
