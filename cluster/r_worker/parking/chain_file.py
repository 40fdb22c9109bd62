"""The file of a parked chain of blocks. It is written, then renamed, and checked whenever it is read.

Layout, little-endian::

    magic "FDCHAIN2" | bytes of the head u32 | head (JSON) | marks, 16 bytes each | SHA-256 of the above
    for each piece: its checksum, 16 bytes | its bytes

A piece has the blocks of ``PIECE_TOKENS`` consecutive tokens, or of fewer at the chain's end, in the form of an
R-worker's cache. If layers are recurrent, "the end" follows as one more piece: the tokens after the last full block,
and the states after all tokens, as ``_rworker.RWorker.export`` writes them. A piece's checksum (``_rworker.checksum``)
covers the SHA-256 above, the piece's number and its bytes. So it detects changed bits and pieces from elsewhere. A mark
is the hash of all tokens up to a piece's end; the last mark identifies the whole chain.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fastdecode import _rworker
from fastdecode.core.errors import ChainError
from fastdecode.core.machine import advise_cache, force_to_disk
from fastdecode.core.parked import MARK_BYTES, PIECE_TOKENS, num_marks, num_pieces

MAGIC = b"FDCHAIN2"
SUFFIX, UNFINISHED = ".chain", ".part"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES, _CHECKSUM_BYTES = 32, 16

Name = Annotated[str, Meta(max_length=200)]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The head of a chain's file.

    ``fingerprint``: hash of the model's weights, the cache's layout and the arithmetic. ``block_bytes``: bytes of a
    block over all layers; 0 if no layer attends. ``rest``: number of tokens after the last block.
    ``end_bytes``: bytes of these tokens and of the states; 0 if no layer is recurrent.
    """

    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    block_size: Annotated[int, Meta(ge=1, le=PIECE_TOKENS)]
    num_blocks: Annotated[int, Meta(ge=1, le=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=0, le=1 << 48)]
    model_dtype: Name = ""
    kv_dtype: Name = ""
    isa: Name = ""
    rest: Annotated[int, Meta(ge=0, lt=PIECE_TOKENS)] = 0
    end_bytes: Annotated[int, Meta(ge=0, le=1 << 48)] = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole chain."""
        return self.num_blocks * self.block_size + self.rest

    @property
    def num_marks(self) -> int:
        return num_marks(self.num_blocks, self.block_size, self.rest)

    @property
    def num_block_pieces(self) -> int:
        """The number of pieces that have blocks; none if no layer attends."""
        return num_pieces(self.num_blocks, self.block_size) if self.block_bytes else 0

    @property
    def num_pieces(self) -> int:
        """The number of pieces, the end included."""
        return self.num_block_pieces + (self.end_bytes > 0)

    def piece_tokens(self, number: int) -> int:
        """Return the number of tokens in the blocks of piece ``number``."""
        return min(PIECE_TOKENS, self.num_blocks * self.block_size - number * PIECE_TOKENS)

    def piece_bytes(self, number: int) -> int:
        if number == self.num_block_pieces:
            return self.end_bytes
        return self.piece_tokens(number) // self.block_size * self.block_bytes

    @property
    def file_bytes(self) -> int:
        start = len(MAGIC) + _LENGTH.size + len(msgspec.json.encode(self)) + self.num_marks * MARK_BYTES
        pieces = self.num_pieces * _CHECKSUM_BYTES + self.num_blocks * self.block_bytes + self.end_bytes
        return start + _DIGEST_BYTES + pieces


_HEAD = msgspec.json.Decoder(Head)


def file_name(fingerprint: str, mark: bytes) -> str:
    """Return the file name of the chain that ends with ``mark``, under ``fingerprint``."""
    return f"{fingerprint[:16]}-{mark.hex()}{SUFFIX}"


class ChainWriter:
    """Writes a chain under a temporary name, and renames it when it is complete."""

    def __init__(self, path: Path, head: Head, marks: tuple[bytes, ...]) -> None:
        """Raise OSError if the file cannot be made."""
        self._path, self._aside = path, path.with_suffix(UNFINISHED)
        self._number = 0
        text = msgspec.json.encode(head)
        start = b"".join((MAGIC, _LENGTH.pack(len(text)), text, *marks))
        self._digest = hashlib.sha256(start).digest()
        self._file = self._aside.open("wb", buffering=0)
        self._aside.chmod(0o600)
        self._write(start + self._digest)

    def append(self, piece: np.ndarray) -> None:
        """Write the next piece, uint8 [num_bytes]."""
        self._write(_checksum(self._digest, self._number, piece))
        self._write(piece.data)
        self._number += 1

    def finish(self) -> None:
        """Sync the file to the disk, and rename it into place."""
        force_to_disk(self._file.fileno())
        self._file.close()
        self._aside.rename(self._path)

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._file.write(view) :]


class ChainReader:
    """An open file of a chain: its head and marks, checked at once, and its pieces, checked when read.

    Raise ChainError for an incomplete or changed chain, OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            advise_cache(self._file.fileno(), "SEQUENTIAL")
            self.head, self.marks = self._read_start()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ChainReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The file name that this chain should have, whatever the file is called."""
        return file_name(self.head.fingerprint, self.marks[-1])

    def place(self, number: int) -> tuple[int, bytes]:
        """Return the offset of piece ``number`` in the file, and the seed of its checksum."""
        head = self.head
        blocks_before = min(number * PIECE_TOKENS // head.block_size, head.num_blocks)
        offset = self._start + (number + 1) * _CHECKSUM_BYTES + blocks_before * head.block_bytes
        return offset, _seed(self._digest, number)

    def check(self, number: int, checksum: bytes) -> None:
        """Raise ChainError unless the file has this ``checksum`` for piece ``number``."""
        if checksum != os.pread(self.fileno(), _CHECKSUM_BYTES, self.place(number)[0] - _CHECKSUM_BYTES):
            raise self._broken(f"piece {number} is damaged: its checksum differs")

    def is_cached(self, number: int) -> bool:
        """Return whether the end of piece ``number`` is in the page cache, as far as the system tells."""
        end = self.place(number)[0] + self.head.piece_bytes(number)
        try:
            return os.preadv(self.fileno(), [bytearray(1)], end - 1, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):
            return False

    def fetch(self, number: int) -> None:
        """Load piece ``number`` into the page cache."""
        start, _ = self.place(number)
        fetch_bytes = 1 << 18
        end, part = start + self.head.piece_bytes(number), bytearray(fetch_bytes)
        while start < end and (count := os.preadv(self.fileno(), [part], start)):
            start += count

    def end(self) -> np.ndarray:
        """Return the end of the chain, uint8 [end_bytes]: tokens after the last block, and states."""
        number, data = self.head.num_block_pieces, np.empty(self.head.end_bytes, np.uint8)
        self._file.seek(self.place(number)[0])
        self._fill(data.data)
        self.check(number, _checksum(self._digest, number, data))
        return data

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._file.fileno()

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the pieces in order, uint8 [num_bytes] each, valid until the next one is read."""
        buffer = np.empty(max(self.head.piece_bytes(0), self.head.end_bytes), np.uint8)
        for number in range(self.head.num_pieces):
            checksum = self._read(_CHECKSUM_BYTES)
            piece = buffer[: self.head.piece_bytes(number)]
            self._fill(piece.data)
            if _checksum(self._digest, number, piece) != checksum:
                raise self._broken(f"piece {number} is damaged: its checksum differs")
            yield piece

    def close(self) -> None:
        self._file.close()

    def _read_start(self) -> tuple[Head, tuple[bytes, ...]]:
        text = self._read(len(MAGIC) + _LENGTH.size)
        (num_bytes,) = _LENGTH.unpack(text[len(MAGIC) :])
        max_head_bytes = 1 << 16
        if text[: len(MAGIC)] != MAGIC or num_bytes > max_head_bytes:
            raise self._broken("this is no parked chain")
        text += self._read(num_bytes)
        try:
            head = _HEAD.decode(text[len(MAGIC) + _LENGTH.size :])
        except (ValueError, RecursionError):
            raise self._broken("the file's head cannot be read") from None
        if (size := os.fstat(self._file.fileno()).st_size) != head.file_bytes:
            raise self._broken(f"the file has {size:,} bytes, not the {head.file_bytes:,} that were written")
        marks = self._read(head.num_marks * MARK_BYTES)
        self._digest = self._read(_DIGEST_BYTES)
        self._start = len(text) + len(marks) + _DIGEST_BYTES
        if hashlib.sha256(text + marks).digest() != self._digest:
            raise self._broken("the file's head is damaged: its checksum differs")
        return head, tuple(marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES))

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._file.readinto(view)
            if not count:
                raise self._broken("the file ends too early")
            view = view[count:]

    def _broken(self, why: str) -> ChainError:
        return ChainError(f"{self.path}: {why}")


def _checksum(start: bytes, number: int, piece: np.ndarray) -> bytes:
    """Return the checksum of piece ``number`` of the chain whose head has the SHA-256 ``start``."""
    return _rworker.checksum(piece, _seed(start, number))


def _seed(start: bytes, number: int) -> bytes:
    return hashlib.sha256(start + number.to_bytes(8, "little")).digest()[:_CHECKSUM_BYTES]
