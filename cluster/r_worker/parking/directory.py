"""The folder of an R-worker's parked chains: what lies in it, oldest use first, within a limit of bytes."""

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
    """Return the chains in ``folder``, the one that was used longest ago first. Raise OSError if it cannot be read."""
    times = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # its R-worker has dropped it since
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path])


class ParkDirectory:
    """One R-worker's folder. The time of a file's last change is that of its chain's last use.

    ``num_bytes`` of files are in it, ``most_bytes`` at most. ``after_seconds``: without use, chains come here.
    """

    def __init__(self, place: ParkPlace) -> None:
        """Make the folder, readable by this user alone, and clear it of what was not finished.

        Its limit: what is there already and half of what is free, unless ``place`` has one. ConfigError if it cannot be
        had.
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
        """Chains in the folder."""
        return len(self._sizes)

    @property
    def largest(self) -> int:
        """Bytes of the largest file, 0 if there is none."""
        return max(self._sizes.values(), default=0)

    def chains(self, fingerprint: str) -> Iterator[Chain]:
        """Yield the chains of ``fingerprint``, oldest use first; one whose head is not what was written is dropped."""
        for name in [name for name in self._sizes if name.startswith(fingerprint[:16])]:
            try:
                with ChainReader(self.folder / name) as reader:
                    head, marks, own_name = reader.head, reader.marks, reader.name
                if head.fingerprint == fingerprint and own_name == name:
                    yield Chain(head.num_blocks, marks)
            except (ChainError, OSError):
                self.drop(name)

    def path(self, fingerprint: str, mark: bytes) -> Path:
        """Return where the chain that ends with ``mark`` is, or would be."""
        return self.folder / file_name(fingerprint, mark)

    def make_room(self, head: Head, name: str) -> list[str] | None:
        """Drop chains, those used longest ago first, until one of ``head`` fits as file ``name``, in place of what is
        there; the names of the dropped. None, and nothing is dropped, where it never fits."""
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
        """The file at ``path`` is whole, and was used just now."""
        self.num_bytes -= self._sizes.pop(path.name, 0)
        self._sizes[path.name] = path.stat().st_size
        self.num_bytes += self._sizes[path.name]

    def use(self, path: Path) -> None:
        """The chain at ``path`` was used just now."""
        if path.name in self._sizes:
            self._sizes.move_to_end(path.name)
        with contextlib.suppress(OSError):
            os.utime(path)

    def drop(self, name: str) -> None:
        """Remove the file ``name``; no effect where it is gone."""
        self.num_bytes -= self._sizes.pop(name, 0)
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def close(self) -> None:
        """Let another R-worker have the folder, which goes where this one made it and parked nothing there; may be
        called twice."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            leave_folder(self.folder, LOCK)
            os.close(lock)

    def _take_lock(self) -> int:
        """A file descriptor that has the folder's lock; one that was killed just now may have it for a moment."""
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:
                    return lock
                os.close(lock)  # the one that had it has removed the folder that it had made
                make_folder(self.folder, 0o700)
                lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_SECONDS / 10)
                    continue
                os.close(lock)
                mine = "give each a folder of its own"
                raise ConfigError(f"park_dir: {self.folder} is another R-worker's: {mine}") from None
