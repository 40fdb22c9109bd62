"""Prefixes parked on R-workers' disks: the terms that both sides share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdecode.core.types import SPLIT_TOKENS

PIECE_TOKENS = SPLIT_TOKENS
"""Tokens that are written, checked and read back in one piece: a multiple of every block size."""

PARK_AFTER = 60.0
"""Default seconds without use after which a prefix is parked."""

MARK_BYTES = 16
"""Bytes kept of the hash of all tokens up to a block's end, by which a prefix is found."""


def num_marks(num_blocks: int, block_size: int) -> int:
    """Return the pieces of a chain of ``num_blocks`` blocks, which is also its number of marks."""
    return -(-num_blocks * block_size // PIECE_TOKENS)


@dataclass(frozen=True)
class ParkPlace:
    """Where and when an R-worker parks.

    ``folder``: at most ``most_bytes`` (None: the R-worker's choice) go there. ``after_seconds``: the time without use
    before a prefix is parked.
    """

    folder: Path
    most_bytes: int | None = None
    after_seconds: float = PARK_AFTER

    def of(self, index: int) -> ParkPlace:
        """Return the place for R-worker ``index`` of several."""
        return replace(self, folder=self.folder / f"r-worker-{index}")

    def flags(self) -> list[str]:
        """Return the flags of ``fastdecode r-worker`` for this place."""
        flags = ["--park-dir", str(self.folder), "--park-after", str(self.after_seconds)]
        return flags if self.most_bytes is None else [*flags, "--park-bytes", str(self.most_bytes)]


class Chain(NamedTuple):
    """A parked chain of blocks. ``marks``: the hash at the end of each piece; the last is the end of the chain."""

    num_blocks: int
    marks: tuple[bytes, ...]

    @staticmethod
    def of(block_hashes: Sequence[bytes], block_size: int) -> Chain:
        """Return the chain of all blocks with these hashes."""
        step = PIECE_TOKENS // block_size
        whole = block_hashes[step - 1 :: step]
        return Chain(len(block_hashes), (*whole, *(block_hashes[-1:] if len(block_hashes) % step else ())))

    @property
    def name(self) -> bytes:
        """The hash of all its tokens, which names it."""
        return self.marks[-1]


class Progress(IntEnum):
    """Progress of parking or waking. A request is repeated while it is under way."""

    DONE = 0
    UNDER_WAY = 1
    FAILED = 2


class Parked(NamedTuple):
    """An R-worker's answer to a request to park or wake. ``num_tokens`` tokens are parked, or loaded.

    ``num_bytes``: bytes on its disk. ``dropped``: names of chains that it deleted to make room.
    """

    progress: Progress
    num_tokens: int = 0
    num_bytes: int = 0
    dropped: tuple[bytes, ...] = ()


class Parks(Protocol):
    """The R-workers' disks; called between steps. BackendError: a refusal; WorkerLostError: the R-worker is lost.

    ``patience_ms``: about how long a call may take before it returns that the request is under way.
    """

    def chains(self, worker: int, model: str) -> list[Chain]:
        """Start parking for the model that ``model`` identifies.

        Return its chains on R-worker ``worker``, oldest use first.
        """

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        """Write ``chain``, whose blocks ``sequence_id`` holds, and delete the ``superseded`` chains."""

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        """Read the first ``num_blocks`` blocks of chain ``name`` as a new sequence ``sequence_id``.

        They end at the end of a piece. If reading FAILED part way, the sequence has the tokens read so far and must be
        released.
        """
