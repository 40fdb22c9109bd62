"""The folder of an R-worker's parked chains: what lies in it, oldest use first, within a limit of bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cluster.parking.chain_file import SUFFIX, UNFINISHED, ChainReader, Head, file_name
from fastdecode.core.errors import ChainError, ConfigError
from fastdecode.core.parked import Chain

LOCK = ".lock"


def chain_files(folder: Path) -> list[Path]:
    """The chains in ``folder``, the one that was used longest ago first; OSError where it cannot be read."""
    times = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # its R-worker has dropped it since
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path])


class ParkDirectory:
    """One R-worker's folder. The time of a file's last change is that of its chain's last use.

    ``num_bytes`` of files are in it, ``most_bytes`` at most.
    """

    def __init__(self, folder: str | Path, most_bytes: int | None = None) -> None:
        """Make ``folder``, readable by this user alone, and clear it of what was not finished. ``most_bytes``: half of
        what is free, and what is there already, unless given. ConfigError where it cannot be had."""
        self.folder = Path(folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
            for path in self.folder.glob(f"*{UNFINISHED}"):
                path.unlink()
            self._sizes = OrderedDict((path.name, path.stat().st_size) for path in chain_files(self.folder))
            self.num_bytes = sum(self._sizes.values())
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise ConfigError(f"park_dir: {folder}: {error.strerror}") from None
        self.most_bytes = most_bytes or self.num_bytes + free // 2

    def __len__(self) -> int:
        """Chains in the folder."""
        return len(self._sizes)

    def chains(self, fingerprint: str) -> Iterator[Chain]:
        """Yield the chains of ``fingerprint``, oldest use first; one whose head is not what was written is dropped."""
        for name in [name for name in self._sizes if name.startswith(fingerprint[:16])]:
            try:
                with ChainReader(self.folder / name) as reader:
                    head, marks = reader.head, reader.marks
                if head.fingerprint == fingerprint and file_name(fingerprint, marks[-1]) == name:
                    yield Chain(head.num_blocks, marks)
            except (ChainError, OSError):
                self.drop(name)

    def path(self, fingerprint: str, mark: bytes) -> Path:
        """Where the chain that ends with ``mark`` is, or would be."""
        return self.folder / file_name(fingerprint, mark)

    def make_room(self, head: Head) -> list[str] | None:
        """Drop chains, those used longest ago first, until one of ``head`` fits; the names of the dropped. None, and
        nothing is dropped, where it never fits."""
        needed = head.file_bytes
        if needed > self.most_bytes:
            return None
        dropped = []
        while self.num_bytes + needed > self.most_bytes:
            dropped.append(next(iter(self._sizes)))
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
        """Let another R-worker have the folder."""
        os.close(self._lock)

    def _take_lock(self) -> int:
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(f"park_dir: {self.folder} is another R-worker's: give each a folder of its own") from None
        return lock
