"""Retained prefixes on the disks of R-workers, as both sides speak of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdecode.core.types import SPLIT_TOKENS

PIECE_TOKENS = SPLIT_TOKENS
"""Tokens that are written, checked and read back at a time: a multiple of every block size."""

PARK_AFTER = 60.0
"""Seconds without use after which a prefix goes to the disk, unless told."""

MARK_BYTES = 16
"""Of the hash of all tokens up to a block's end, by which a beginning is found."""


def num_marks(num_blocks: int, block_size: int) -> int:
    """Return pieces of a chain of ``num_blocks`` blocks, and so its marks."""
    return -(-num_blocks * block_size // PIECE_TOKENS)


@dataclass(frozen=True)
class ParkPlace:
    """Where an R-worker parks: ``folder``, at most ``most_bytes`` (None: its own choice), what was not used for
    ``after_seconds``."""

    folder: Path
    most_bytes: int | None = None
    after_seconds: float = PARK_AFTER

    def of(self, index: int) -> ParkPlace:
        """Return the place of one of several R-workers."""
        return replace(self, folder=self.folder / f"r-worker-{index}")

    def flags(self) -> list[str]:
        """Those by which ``fastdecode r-worker`` gets this place."""
        flags = ["--park-dir", str(self.folder), "--park-after", str(self.after_seconds)]
        return flags if self.most_bytes is None else [*flags, "--park-bytes", str(self.most_bytes)]


class Chain(NamedTuple):
    """A parked chain of blocks. ``marks``: of the end of each piece, the last one of the chain's end."""

    num_blocks: int
    marks: tuple[bytes, ...]

    @staticmethod
    def of(block_hashes: Sequence[bytes], block_size: int) -> Chain:
        """Return the chain of all blocks of these hashes."""
        step = PIECE_TOKENS // block_size
        whole = block_hashes[step - 1 :: step]
        return Chain(len(block_hashes), (*whole, *(block_hashes[-1:] if len(block_hashes) % step else ())))

    @property
    def name(self) -> bytes:
        """The hash of all its tokens."""
        return self.marks[-1]


class Progress(IntEnum):
    """How far parking or waking is: a request is repeated while it is under way."""

    DONE = 0
    UNDER_WAY = 1
    FAILED = 2


class Parked(NamedTuple):
    """An R-worker's answer to a request to park or to wake: ``num_tokens`` of it are parked, or there again.

    ``num_bytes`` lie on its disk. ``dropped``: names of chains that it has given up for the room.
    """

    progress: Progress
    num_tokens: int = 0
    num_bytes: int = 0
    dropped: tuple[bytes, ...] = ()


class Parks(Protocol):
    """R-workers with a disk; called between steps. BackendError for a refusal, WorkerLostError for one that is lost.

    ``patience_ms``: about how long a call may take before it says that what it was asked for is under way.
    """

    def chains(self, worker: int, model: str) -> list[Chain]:
        """Begin to park caches of the model that ``model`` identifies: what R-worker ``worker`` has of it, oldest
        use first."""

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        """Write ``chain``, of which ``sequence_id`` has all blocks, and drop those named ``superseded`` with that."""

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        """Read the first ``num_blocks`` blocks of the chain ``name``, up to the end of a piece, as a new sequence
        ``sequence_id``. Where that FAILED after some tokens, the sequence has these and is to be released."""
