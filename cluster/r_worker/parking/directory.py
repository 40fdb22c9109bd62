"""The folder of an R-worker's parked chains, in order of use, within a limit of bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cluster.r_worker.parking.chain_file import SUFFIX, UNFINISHED, ChainReader, Head, file_name
from fastdecode.core.errors import ChainError, ConfigError
from fastdecode.core.own_folder import leave_folder, make_folder
from fastdecode.core.parked import Chain, ParkPlace

LOCK, LOCK_SECONDS = ".lock", 1.0


def chain_files(folder: Path) -> list[Path]:
    """Return the chains in ``folder``, oldest use first. Raise OSError if it cannot be read."""
    times = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # the R-worker has deleted the file meanwhile
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path])


class ParkDirectory:
    """One R-worker's folder. A file's modification time is the time of its chain's last use.

    ``num_bytes``: bytes of all its files, at most ``most_bytes``. ``after_seconds``: a prefix unused for this long is
    parked.
    """

    def __init__(self, place: ParkPlace) -> None:
        """Make the folder, readable by this user only, and remove unfinished files.

        If ``place`` sets no limit, the folder may grow by half of the disk's free space. Raise ConfigError if the
        folder cannot be made.
        """
        self.folder, self.after_seconds = place.folder, place.after_seconds
        try:
            make_folder(self.folder, 0o700)
            self._lock = self._take_lock()
            for path in self.folder.glob(f"*{UNFINISHED}"):
                path.unlink()
            self._sizes = OrderedDict((path.name, path.stat().st_size) for path in chain_files(self.folder))
            self.num_bytes = sum(self._sizes.values())
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise ConfigError(f"park_dir: {self.folder}: {error.strerror}") from None
        self.most_bytes = place.most_bytes or self.num_bytes + free // 2

    @property
    def num_chains(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest file, 0 if there is none."""
        return max(self._sizes.values(), default=0)

    def chains(self, fingerprint: str) -> Iterator[Chain]:
        """Yield the chains of ``fingerprint``, oldest use first; drop one with a damaged head."""
        for name in [name for name in self._sizes if name.startswith(fingerprint[:16])]:
            try:
                with ChainReader(self.folder / name) as reader:
                    head, marks, own_name = reader.head, reader.marks, reader.name
                if head.fingerprint == fingerprint and own_name == name:
                    yield Chain(head.num_blocks, marks, head.rest)
            except (ChainError, OSError):
                self.drop(name)

    def path(self, fingerprint: str, mark: bytes) -> Path:
        """Return the path of the chain that ends with ``mark``, existing or not."""
        return self.folder / file_name(fingerprint, mark)

    def make_room(self, head: Head, name: str) -> list[str] | None:
        """Drop chains, oldest use first, until a chain with ``head`` fits as file ``name``; return the dropped names.

        The chain will replace a file of that name. Return None, and drop nothing, if the chain alone exceeds the limit.
        """
        needed = head.file_bytes
        if needed > self.most_bytes:
            return None
        dropped = []
        others = (each for each in list(self._sizes) if each != name)
        while self.num_bytes - self._sizes.get(name, 0) + needed > self.most_bytes:
            dropped.append(next(others))
            self.drop(dropped[-1])
        return dropped

    def add(self, path: Path) -> None:
        """Record the complete file at ``path``, as used now."""
        self.num_bytes -= self._sizes.pop(path.name, 0)
        self._sizes[path.name] = path.stat().st_size
        self.num_bytes += self._sizes[path.name]

    def use(self, path: Path) -> None:
        """Record that the chain at ``path`` is used now."""
        if path.name in self._sizes:
            self._sizes.move_to_end(path.name)
        with contextlib.suppress(OSError):
            os.utime(path)

    def drop(self, name: str) -> None:
        """Remove the file ``name``; no effect if it is gone."""
        self.num_bytes -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def close(self) -> None:
        """Release the folder for another R-worker; may be called twice.

        A folder that this R-worker made and left empty is removed.
        """
        lock, self._lock = self._lock, -1
        if lock >= 0:
            leave_folder(self.folder, LOCK)
            os.close(lock)

    def _take_lock(self) -> int:
        """Return a file descriptor with the folder's lock. An R-worker killed just now may hold it for a moment."""
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:
                    return lock
                os.close(lock)  # this file is deleted: its previous holder removed the folder when it closed
                make_folder(self.folder, 0o700)
                lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_SECONDS / 10)
                    continue
                os.close(lock)
                mine = "give each a folder of its own"
                raise ConfigError(f"park_dir: {self.folder} is another R-worker's: {mine}") from None
