"""Prefixes parked on R-workers' disks: types and constants that S-worker and R-workers share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdecode.core.types import SPLIT_TOKENS

PIECE_TOKENS = SPLIT_TOKENS
"""Tokens that are written, checked and read back as one piece of a parked prefix: a multiple of every block size."""

PARK_AFTER = 60.0
"""Default seconds without use after which a prefix is parked."""

MARK_BYTES = 16
"""Bytes kept of the hash of all tokens up to the end of a block. Prefixes are found by these bytes."""


def num_pieces(num_blocks: int, block_size: int) -> int:
    """Return the number of pieces, of ``PIECE_TOKENS`` tokens each, into which a file divides ``num_blocks`` blocks."""
    return -(-num_blocks * block_size // PIECE_TOKENS)


def num_marks(num_blocks: int, block_size: int, rest: int = 0) -> int:
    """Return the number of hashes in ``Chain.marks`` for ``num_blocks`` blocks and ``rest`` tokens after them."""
    return num_pieces(num_blocks, block_size) + (rest > 0)


def hash_after(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of all tokens up to the end of ``token_ids``; ``before``: the hash of all tokens before these."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=MARK_BYTES).digest()


@dataclass(frozen=True)
class ParkPlace:
    """The folder where an R-worker parks prefixes, and its limits.
    ``most_bytes``: most bytes to use in ``folder``; None lets the R-worker choose. ``after_seconds``: how long a prefix
    must be unused before it is parked.
    """

    folder: Path
    most_bytes: int | None = None
    after_seconds: float = PARK_AFTER

    def of(self, index: int) -> ParkPlace:
        """Return a subfolder of this place for R-worker ``index``, one of several on this machine."""
        return replace(self, folder=self.folder / f"r-worker-{index}")

    def flags(self) -> list[str]:
        """Return the flags that make ``fastdecode r-worker`` park in this place."""
        flags = ["--park-dir", str(self.folder), "--park-after", str(self.after_seconds)]
        return flags if self.most_bytes is None else [*flags, "--park-bytes", str(self.most_bytes)]


class Chain(NamedTuple):
    """A parked prefix of ``num_blocks`` blocks, and of ``rest`` more tokens if layers are recurrent.
    ``marks``: for each piece of the file, the hash of all tokens up to its end; then the hash with the ``rest`` tokens.
    """

    num_blocks: int
    marks: tuple[bytes, ...]
    rest: int = 0

    @staticmethod
    def of(block_hashes: Sequence[bytes], block_size: int, rest: Sequence[int] = ()) -> Chain:
        """Return the description of a parked prefix: blocks with ``block_hashes``, then the tokens ``rest``."""
        step = PIECE_TOKENS // block_size
        marks = [*block_hashes[step - 1 :: step], *(block_hashes[-1:] if len(block_hashes) % step else ())]
        if rest:
            marks.append(hash_after(block_hashes[-1], rest))
        return Chain(len(block_hashes), tuple(marks), len(rest))

    @property
    def last_block(self) -> bytes:
        """The hash of all tokens up to the end of the last block."""
        return self.marks[-2] if self.rest else self.marks[-1]

    @property
    def name(self) -> bytes:
        """The parked prefix's name: the hash of all its tokens."""
        return self.marks[-1]


class Progress(IntEnum):
    """The state of a request to park or load a prefix. If it is UNDER_WAY, the caller must repeat the request."""

    DONE = 0
    UNDER_WAY = 1
    FAILED = 2


class Parked(NamedTuple):
    """An R-worker's answer to a request to park or load a prefix.
    ``num_tokens``: tokens parked or loaded until now. ``num_bytes``: bytes of all prefixes on the R-worker's disk.
    ``dropped``: names of parked prefixes that it deleted to make space.
    """

    progress: Progress
    num_tokens: int = 0
    num_bytes: int = 0
    dropped: tuple[bytes, ...] = ()


class Parks(Protocol):
    """Access to the R-workers' disks, between steps.
    Methods raise BackendError if an R-worker refuses, and WorkerLostError if it is lost. ``patience_ms``: about how
    long a call may take before it returns UNDER_WAY.
    """

    def chains(self, worker: int, model: str) -> list[Chain]:
        """Let R-worker ``worker`` park for the model identified by ``model``.
        Return the prefixes of this model that are parked on its disk, least recently used first.
        """

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        """Write the blocks of ``sequence_id`` to the R-worker's disk as ``chain``; delete the ``superseded`` ones.
        With recurrent layers, the whole sequence is written, with the states at its end.
        """

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        """Load the first ``num_blocks`` blocks of the parked prefix ``name`` as a new sequence ``sequence_id``.
        These blocks must end where a piece ends. A prefix with recurrent states is loaded whole, with its ``rest``. If
        the answer is FAILED, the caller must release the tokens that were loaded before.
        """
