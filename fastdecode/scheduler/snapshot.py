"""A snapshot of the scheduler's state, for tests, metrics and the server's live page."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.metrics import Pool
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.waiting import WaitingQueue


@dataclass(frozen=True)
class RWorkerSnapshot:
    """One R-worker, present or lost.
    Of its ``num_blocks`` KV blocks, ``free`` are unused. ``retained`` are used by prefixes only, which can be evicted
    at any time. ``reserved`` are for unfinished copies to this R-worker. ``num_sequences``: sequences that append
    there. ``num_controls``: control messages (copy, free, ...) that wait to be sent to it.
    """

    index: int
    host: str
    num_blocks: int
    free: int
    retained: int
    reserved: int
    num_sequences: int
    num_controls: int
    is_draining: bool
    is_gone: bool

    @property
    def used(self) -> int:
        """The number of blocks that sequences and unfinished copies use."""
        return self.num_blocks - self.free - self.retained


@dataclass(frozen=True)
class SegmentSnapshot:
    """A segment: ``num_tokens`` tokens of a sequence from token ``start``, known to R-workers as ``cache_id``.

    ``workers``: R-workers with a copy of ``num_blocks`` blocks, the first copy's first; empty for a lost segment.
    """

    cache_id: int
    start: int
    num_tokens: int
    num_blocks: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class SequenceSnapshot:
    """A sequence of ``num_tokens`` prompt and output tokens. It appends to the segment with index ``tail``.
    ``num_cached`` tokens are cached in ``segments``. ``decodes``: True once its prompt is cached. ``job_id``: the
    prefill workers' job that computes its prompt; 0 for none. ``uses_scratch``: the S-worker holds its prompt's keys
    and values until the prompt is computed.
    """

    sequence_id: int
    num_tokens: int
    num_cached: int
    decodes: bool
    job_id: int
    uses_scratch: bool
    segments: tuple[SegmentSnapshot, ...]
    tail: int

    @property
    def workers(self) -> tuple[int, ...]:
        """The R-workers with a copy of any segment of the sequence, in no order."""
        return tuple({worker for segment in self.segments for worker in segment.workers})


@dataclass(frozen=True)
class TransferSnapshot:
    """An unfinished copy of a segment to R-worker ``target``: ``num_copied`` tokens, with ``num_blocks`` blocks."""

    sequence_id: int
    cache_id: int
    source: int
    target: int
    num_blocks: int
    num_copied: int
    is_move: bool


@dataclass(frozen=True)
class Snapshot:
    """The scheduler's whole state between two calls.
    ``num_running``: sequences with a cache, and siblings that will have one once their prompt is computed. ``pool``:
    how many sequences have one copy, and two. ``sequences``: sequences with a cache, by id. ``waiting``: ids of waiting
    sequences, oldest first. ``following``: ids of sequences that wait until another sequence has computed their prefix.
    ``num_prefixes``: retained prefixes. ``scratch_free``: prompt tokens that still fit the S-worker's scratch.
    """

    r_workers: tuple[RWorkerSnapshot, ...]
    num_running: int
    pool: Pool
    sequences: dict[int, SequenceSnapshot]
    transfers: tuple[TransferSnapshot, ...]
    waiting: tuple[int, ...]
    following: tuple[int, ...]
    num_prefixes: int
    scratch_free: int

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences, including those that wait for a prefix."""
        return len(self.waiting) + len(self.following)

    @property
    def present(self) -> list[int]:
        """The indices of R-workers that are not lost."""
        return [worker.index for worker in self.r_workers if not worker.is_gone]

    @property
    def draining(self) -> list[int]:
        """The indices of R-workers that are draining."""
        return [worker.index for worker in self.r_workers if worker.is_draining]

    @property
    def accepting(self) -> list[int]:
        """The indices of R-workers that are neither lost nor draining."""
        return [worker.index for worker in self.r_workers if not worker.is_gone and not worker.is_draining]

    @property
    def has_controls(self) -> bool:
        """True while controls to any R-worker wait to be sent."""
        return any(worker.num_controls for worker in self.r_workers)

    @property
    def prompts(self) -> list[int]:
        """Ids of sequences whose prompt is being computed, in ascending order."""
        return [each.sequence_id for each in self.sequences.values() if not each.decodes]

    @property
    def decoding(self) -> list[int]:
        """Ids of decoding sequences, in ascending order."""
        return [each.sequence_id for each in self.sequences.values() if each.decodes]

    def on(self, worker: int) -> list[int]:
        """Return the ids of sequences with a segment on R-worker ``worker``, in ascending order."""
        return [each.sequence_id for each in self.sequences.values() if worker in each.workers]


def take_snapshot(store: Store, queue: WaitingQueue, with_sequences: bool = True) -> Snapshot:
    """Return a snapshot of ``store`` and ``queue``.
    Without ``with_sequences``, ``sequences`` is empty; listing thousands takes milliseconds.
    """
    residents = store.residents
    running = sorted(residents.all, key=lambda each: each.sequence_id) if with_sequences else []
    waiting = tuple(each.sequence_id for each in queue)
    return Snapshot(
        r_workers=_r_workers(store),
        num_running=len(residents),
        pool=store.pool,
        sequences={each.sequence_id: _sequence(each, each.sequence_id in residents.decoding) for each in running},
        transfers=tuple(
            TransferSnapshot(
                each.sequence.sequence_id, each.cache_id, each.source, each.target, each.num_blocks, each.num_copied,
                each.is_move,
            )
            for each in store.transfers
        ),
        waiting=waiting,
        following=tuple(sorted({each.sequence_id for each in queue.all} - set(waiting))),
        num_prefixes=len(store.prefixes),
        scratch_free=residents.scratch_free,
    )  # fmt: skip


def _r_workers(store: Store) -> tuple[RWorkerSnapshot, ...]:
    return tuple(
        RWorkerSnapshot(
            index=each.index,
            host=each.host,
            num_blocks=each.num_blocks,
            free=each.free,
            retained=each.cached,
            reserved=sum(transfer.num_blocks for transfer in store.transfers if transfer.target == each.index),
            num_sequences=each.num_sequences,
            num_controls=len(each.controls),
            is_draining=each.is_draining,
            is_gone=each.is_gone,
        )
        for each in store.workers
    )


def _sequence(sequence: TokenSequence, decodes: bool) -> SequenceSnapshot:
    segments = tuple(
        SegmentSnapshot(each.cache_id, each.start, each.num_tokens, each.num_blocks, tuple(each.workers))
        for each in sequence.segments
    )
    return SequenceSnapshot(
        sequence_id=sequence.sequence_id,
        num_tokens=sequence.num_tokens,
        num_cached=sequence.num_cached,
        decodes=decodes,
        job_id=sequence.job_id,
        uses_scratch=sequence.uses_scratch,
        segments=segments,
        tail=sequence.num_closed,
    )
