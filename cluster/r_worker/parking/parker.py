"""Parks and wakes the sequences of one R-worker: pieces are copied between cache and disk between steps.

To park, the R-worker's own thread copies a piece out of the cache, and the disk's thread writes it. To wake, the
R-worker's threads read pieces straight from the file and check them. Before that, the disk's thread fetches pieces that
are not in the page cache.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.r_worker.audits import check_memory
from fastdecode.cluster.r_worker.host import RWorkerSize, make_rworker
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader, ChainWriter, Head
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.cluster.r_worker.parking.jobs import FAILURES, ParkJob, WakeJob
from fastdecode.cluster.wire.messages import fingerprint
from fastdecode.core.errors import ChainError
from fastdecode.core.parked import MARK_BYTES, PIECE_TOKENS, Chain, Parked, Progress
from fastdecode.kinds.layout import KVLayout

log = logging.getLogger("fastdecode.r_worker")


def block_form(layout: KVLayout, worker: _rworker.RWorker) -> str:
    """Return a hash of the memory layout of ``worker``'s blocks, made by storing known tokens.

    With the hash in chains' fingerprints, a build never reads blocks that a build with another layout wrote.
    """
    size = RWorkerSize(worker.block_bytes * (1 + worker.state_blocks), 1)
    probe = make_rworker(replace(layout.absorbed, isa=worker.isa), worker.block_size, size)
    tokens = np.resize(np.arange(251, dtype=np.uint8), worker.block_size * layout.kv_bytes_per_token)
    probe.import_(0, worker.block_size, tokens)
    block = probe.export_blocks(0, 0, worker.block_size)
    probe.close()
    return hashlib.sha256(block.data).hexdigest()


class Parker:
    """Parks and wakes one sequence at a time, for one S-worker. Another request cancels the current one."""

    def __init__(self, worker: _rworker.RWorker, directory: ParkDirectory, layout: KVLayout) -> None:
        self._worker, self._directory, self._layout = worker, directory, layout
        self._threads = ThreadPoolExecutor(1, "park")
        self._keep_room()
        self._fingerprint = ""
        self._job: ParkJob | WakeJob | None = None
        self._asked: tuple[Any, ...] = ()
        self._dropped: tuple[bytes, ...] = ()

    def chains(self, model: str) -> list[Chain]:
        self._give_up()
        cache = fingerprint(replace(self._layout, kv_port="", isa="auto"), self._worker.block_size)
        form = block_form(self._layout, self._worker)
        self._fingerprint = hashlib.sha256(f"{model} {cache} {self._worker.isa} {form}".encode()).hexdigest()
        return list(self._directory.chains(self._fingerprint))

    def park(self, patience_ms: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes]) -> Parked:
        """See ``Parks.park``. The first answer lists the chains that the R-worker drops to make room."""
        if self._asked != (asked := (sequence_id, chain)):
            self._give_up()
            check_memory(self._worker, sequence_id, chain.num_blocks * self._worker.block_size)
            head = self._head(chain)
            for name in superseded:
                self._directory.drop(self._path(name).name)
            dropped = self._directory.make_room(head, self._path(chain.name).name)
            if dropped is None:
                return self._failed(f"{head.file_bytes:,} bytes are more than --park-bytes")
            mine = self._fingerprint[:16]
            names = (Path(each).stem.rpartition("-")[2] for each in dropped if each.startswith(mine))
            self._dropped = tuple(bytes.fromhex(each) for each in names)
            try:
                writer = ChainWriter(self._path(chain.name), head, chain.marks)
            except OSError as error:
                return self._failed(str(error))
            self._asked, self._job = asked, ParkJob(self._worker, self._threads, sequence_id, head, writer)
        return self._go_on(self._path(chain.name), patience_ms)

    def wake(self, patience_ms: int, sequence_id: int, num_blocks: int, name: bytes) -> Parked:
        path = self._path(name)
        if self._asked != (asked := (sequence_id, num_blocks, name)):
            self._give_up()
            try:
                self._job = self._open(path, sequence_id, num_blocks, name)
            except FAILURES as error:
                return self._lost(path, error)
            self._asked = asked
        return self._go_on(path, patience_ms)

    def close(self) -> None:
        """Wait for the disk, and cancel the work in progress."""
        self._give_up()
        self._threads.shutdown()

    def _go_on(self, path: Path, patience_ms: int) -> Parked:
        """Continue the current job for at most ``patience_ms`` milliseconds; return its progress."""
        job = self._job
        if job is None:
            return self._failed("nothing is under way")
        try:
            if not job.advance(time.monotonic() + patience_ms / 1000):
                return self._answer(Progress.UNDER_WAY, job.num_tokens)
            if isinstance(job, ParkJob):
                self._directory.add(path)
            else:
                self._directory.use(path)
        except FAILURES as error:
            answer = self._lost(path, error)
            self._give_up()
            return answer
        self._give_up()
        self._keep_room()
        return self._answer(Progress.DONE, job.num_tokens)

    def _open(self, path: Path, sequence_id: int, num_blocks: int, name: bytes) -> WakeJob:
        reader = ChainReader(path)
        num_tokens, head = num_blocks * self._worker.block_size, reader.head
        if (head.fingerprint, reader.marks[-1]) != (self._fingerprint, name):
            reader.close()
            raise ChainError(f"{path}: this file belongs to another cache")
        whole = head.num_blocks * head.block_size
        needs_all = head.end_bytes > 0 or num_tokens % PIECE_TOKENS > 0
        if not 0 < num_tokens <= whole or (needs_all and num_tokens != whole):
            reader.close()
            raise ValueError(f"wake: {num_tokens} tokens are no whole pieces of a chain of {whole} tokens")
        return WakeJob(self._worker, self._threads, sequence_id, num_tokens, reader)

    def _head(self, chain: Chain) -> Head:
        layout, worker = self._layout, self._worker
        kinds = layout.model_dtype, layout.kv_dtype, worker.isa
        if chain.rest and not layout.kept_apart:
            raise ValueError("park: tokens after the last block are parked with states only, and no layer has one")
        end_bytes = sum(layout.sequence_bytes(number) for number in range(len(layout.layers)))
        end_bytes += chain.rest * layout.kv_bytes_per_token
        block_bytes = worker.block_bytes if layout.attends else 0
        sizes = worker.block_size, chain.num_blocks, block_bytes
        return Head(self._fingerprint, *sizes, *kinds, rest=chain.rest, end_bytes=end_bytes)

    def _path(self, name: bytes) -> Path:
        if not self._fingerprint or len(name) != MARK_BYTES:
            raise ValueError("park: the S-worker has not said of which model its caches are: PARKING must come first")
        return self._directory.path(self._fingerprint, name)

    def _lost(self, path: Path, error: Exception) -> Parked:
        """Log why the job failed, and return the failure. Remove a damaged file, so that it is not tried again."""
        if isinstance(error, ChainError):
            self._directory.drop(path.name)
        return self._failed(str(error))

    def _failed(self, why: str) -> Parked:
        log.warning("not parked, or not woken: %s", why)
        return self._answer(Progress.FAILED, self._job.num_tokens if self._job else 0)

    def _answer(self, progress: Progress, num_tokens: int) -> Parked:
        dropped, self._dropped = self._dropped, ()
        return Parked(progress, num_tokens, self._directory.num_bytes, dropped)

    def _keep_room(self) -> None:
        """Let the R-worker commit memory ahead for chains that may be woken, if there are any.

        For pages new to the system, a commit may take longer than reading the data from the disk.
        """
        # The memory is ``chains_ahead`` times the largest file, at least ``least_ahead_bytes``, and at most
        # 1 / ``most_of_cache`` of the cache
        chains_ahead, least_ahead_bytes, most_of_cache = 2, 1 << 26, 8
        largest = self._directory.largest
        num_bytes = max(chains_ahead * largest, least_ahead_bytes) if largest else 0
        num_blocks = min(-(-num_bytes // self._worker.block_bytes), self._worker.num_blocks // most_of_cache)
        self._worker.commit_ahead(num_blocks)

    def _give_up(self) -> None:
        job, self._job, self._asked = self._job, None, ()
        if job:
            job.close()
