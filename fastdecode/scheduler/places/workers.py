"""The scheduler's data about each R-worker: blocks, pending controls, and speed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.errors import BackendError
from fastdecode.core.parked import hash_after
from fastdecode.core.types import Verb
from fastdecode.scheduler.places.place import Block
from fastdecode.scheduler.places.speeds import Observed, Speeds
from fastdecode.scheduler.sequence import Sizes

Control = tuple[int, int, int, int]

KEPT_GONE = 16
"""Most lost R-workers that keep their index. Beyond these, a new R-worker takes the longest lost one's index."""


class RoomError(BackendError):
    """An R-worker has fewer blocks than the scheduler has promised, because of a bug in the scheduler."""


@dataclass(eq=False)
class Prefix:
    """A retained prefix: cached tokens that no sequence owns, held by R-worker ``worker`` as ``prefix_id``.
    ``block_hashes[i]`` covers all tokens up to the end of block i. If a sequence has two copies, both are retained with
    the same ``origin``; they are identical bit for bit. ``own``: blocks that only this prefix uses, for a recurrent
    state and for the tokens ``rest`` after the last full block. A prefix with a state can only be used as a whole.
    ``contains``: names of shorter prefixes with a ``rest``, with which this prefix begins. ``used_seconds``: the time
    of the last use. ``is_parked``: True if its R-worker's disk also has the whole prefix.
    """

    prefix_id: int
    worker: int
    block_hashes: list[bytes]
    blocks: list[Block]
    origin: int = 0
    own: list[Block] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    contains: tuple[bytes, ...] = ()
    used_seconds: float = 0.0
    is_parked: bool = False

    @property
    def name(self) -> bytes:
        """The hash of all tokens of the prefix; on disk, the prefix is stored under this name."""
        before = self.block_hashes[-1] if self.block_hashes else b""
        return hash_after(before, self.rest) if self.rest else before


@dataclass(eq=False, slots=True)
class WorkerState:
    """The scheduler's record of one R-worker. A lost R-worker's record stays until a new R-worker takes its index.
    ``free``: how many of its ``num_blocks`` KV blocks are free, counted as the R-worker counts. Blocks that several
    sequences or prefixes may use are :class:`Block` objects; other blocks are only counted. ``cached``: blocks that
    only retained ``prefixes`` use, least recently used first; they can be freed at any time. ``num_sequences``:
    sequences that append here. ``num_segments``: segments with a copy here. ``controls``: controls to send. ``host``:
    the R-worker's machine.
    """

    index: int
    num_blocks: int
    free: int
    cached: int = 0
    num_sequences: int = 0
    num_segments: int = 0
    is_draining: bool = False
    is_gone: bool = False
    host: str = ""
    prefixes: OrderedDict[int, Prefix] = field(default_factory=OrderedDict)
    controls: list[Control] = field(default_factory=list)

    @property
    def available(self) -> int:
        """The number of blocks that are free, or would be after evicting all retained prefixes."""
        return self.free + self.cached

    @property
    def holds_nothing(self) -> bool:
        """True if no sequence has a copy here."""
        return not self.num_segments

    def take(self, num_blocks: int) -> None:
        """Reserve ``num_blocks`` unshared blocks for a new copy. Raise :class:`RoomError` if fewer are free."""
        self.grow(num_blocks)
        self.num_segments += 1

    def give_back(self, num_blocks: int, shared: Iterable[Block]) -> None:
        """Free the blocks of a dropped copy: ``num_blocks`` unshared ones, and ``shared`` ones without other users."""
        self.free += num_blocks
        self.drop(shared)
        self.num_segments -= 1

    def grow(self, num_blocks: int) -> None:
        """Reserve ``num_blocks`` more blocks for existing copies; a negative number frees blocks."""
        if num_blocks > self.free:
            raise RoomError(
                f"R-worker {self.index} has {self.free} free blocks, and {num_blocks} were promised (a bug)"
            )
        self.free -= num_blocks

    def fork(self, cache_id: int, source_id: int, num_tokens: int) -> None:
        """Queue a FORK: ``cache_id`` begins with the first ``num_tokens`` tokens of ``source_id``."""
        self._tell(Verb.FORK, cache_id, source_id, num_tokens)

    def truncate(self, cache_id: int, num_tokens: int) -> None:
        """Queue a TRUNCATE: ``cache_id`` keeps its first ``num_tokens`` tokens; with 0 it is released."""
        self._tell(Verb.TRUNCATE if num_tokens else Verb.RELEASE, cache_id, 0, num_tokens)

    def release(self, cache_id: int) -> None:
        self._tell(Verb.RELEASE, cache_id, 0, 0)

    def reserve(self, cache_id: int, job_id: int, num_tokens: int) -> None:
        """Queue a RESERVE: prefill workers will store ``num_tokens`` tokens of ``cache_id`` under job ``job_id``."""
        self._tell(Verb.RESERVE, cache_id, job_id, num_tokens)

    def commit(self, cache_id: int, job_id: int, num_tokens: int) -> None:
        """Queue a COMMIT: prefill workers have stored ``num_tokens`` tokens of ``cache_id`` under job ``job_id``."""
        self._tell(Verb.COMMIT, cache_id, job_id, num_tokens)

    def _tell(self, verb: Verb, cache_id: int, source_id: int, num_tokens: int) -> None:
        self.controls.append((int(verb), cache_id, source_id, num_tokens))

    def hold(self, blocks: Iterable[Block]) -> None:
        """Increment the number of sequences that use each of ``blocks``."""
        for block in blocks:
            self.cached -= block.num_sequences == 0
            block.num_sequences += 1

    def drop(self, blocks: Iterable[Block]) -> None:
        """Decrement the number of sequences that use each of ``blocks``; free blocks that nothing else uses."""
        for block in blocks:
            block.num_sequences -= 1
            if block.num_sequences == 0:
                self.cached += block.num_prefixes > 0
                self.free += block.num_prefixes == 0

    def forget(self, blocks: Iterable[Block]) -> None:
        """Decrement the number of retained prefixes that use each of ``blocks``; free blocks that nothing else uses."""
        for block in blocks:
            block.num_prefixes -= 1
            if block.num_prefixes == 0 and block.num_sequences == 0:
                self.cached -= 1
                self.free += 1


class Workers:
    """Holds the records of all R-workers by index, and the records of the R-workers lost last.
    Values that are compared across R-workers are arrays.
    """

    def __init__(
        self,
        num_blocks: Iterable[int],
        bandwidths: Sequence[float],
        sizes: Sizes,
        hosts: Sequence[str] = (),
    ) -> None:
        """``bandwidths``: each R-worker's memory bandwidth at its start, in any unit.
        ``hosts``: the R-workers' machines, if known.
        """
        self.sizes, self.block_size = sizes, sizes.block_size
        self.speeds = Speeds(bandwidths)
        self._gone: list[int] = []
        self._states = [WorkerState(index, count, count) for index, count in enumerate(num_blocks)]
        for state, host in zip(self._states, hosts, strict=False):
            state.host = host

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> WorkerState:
        return self._states[index]

    def __iter__(self) -> Iterator[WorkerState]:
        """Yield the records of all R-workers in order of index, lost R-workers included."""
        return iter(self._states)

    @property
    def present(self) -> list[int]:
        """The indices of R-workers that are not lost."""
        return [worker.index for worker in self._states if not worker.is_gone]

    @property
    def vacant(self) -> list[int]:
        """The indices of lost R-workers, which new R-workers take before further indices are added."""
        return self._gone[: max(0, len(self._gone) - KEPT_GONE)]

    @property
    def draining(self) -> list[int]:
        """The indices of draining R-workers."""
        return [worker.index for worker in self._states if worker.is_draining]

    @property
    def accepting(self) -> list[int]:
        """The indices of R-workers on which sequences may start: neither lost nor draining."""
        return [worker.index for worker in self._states if not worker.is_gone and not worker.is_draining]

    @property
    def num_blocks(self) -> np.ndarray:
        """The number of KV blocks of each R-worker: int64 [num_workers]."""
        return np.array([worker.num_blocks for worker in self._states])

    @property
    def available(self) -> np.ndarray:
        """Blocks of each R-worker that are free or used by retained prefixes only: int64 [num_workers]."""
        return np.array([worker.free + worker.cached for worker in self._states])

    @property
    def num_sequences(self) -> np.ndarray:
        """The number of sequences that append on each R-worker: int64 [num_workers]."""
        return np.array([worker.num_sequences for worker in self._states])

    @property
    def has_controls(self) -> bool:
        """True while controls to any R-worker wait to be sent."""
        return any(worker.controls for worker in self._states)

    def take_controls(self) -> tuple[tuple[Control, ...], ...]:
        """Return the controls to send to each R-worker, and clear them."""
        controls = tuple(tuple(worker.controls) for worker in self._states)
        for worker in self._states:
            worker.controls.clear()
        return controls

    def put_back(self, controls: tuple[tuple[Control, ...], ...]) -> None:
        """Queue ``controls`` again, before newer ones, since no R-worker has received them."""
        for worker, verbs in zip(self._states, controls, strict=True):
            worker.controls[:0] = verbs

    def observe(self, observed: Observed) -> None:
        """Learn the R-workers' speeds from the times of a step, if it had few prompt rows."""
        if observed.shows_speeds:
            self.speeds.observe(observed.step.kv_loads, observed.r_seconds)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of ``num_tokens`` tokens takes."""
        return self.sizes.blocks_for(num_tokens)

    def join(self, index: int, num_blocks: int, bandwidth: float, host: str = "") -> float:
        """Add an R-worker with all blocks free; return its speed divided by the sum of all other speeds.
        ``index`` is vacant, or the next one.
        """
        others = self.present
        if index < len(self):
            self._gone.remove(index)
        self._states[index : index + 1] = [WorkerState(index, num_blocks, num_blocks, host=host)]
        self.speeds.join(index, bandwidth)
        speeds = self.speeds.lasting
        return float(speeds[index] / speeds[others].sum())

    def drain(self, index: int) -> None:
        """Let no more sequences start on R-worker ``index``. Nothing changes if it is lost."""
        self._states[index].is_draining = not self._states[index].is_gone

    def lose(self, index: int) -> None:
        """Mark R-worker ``index`` as lost, with all its blocks and prefixes."""
        if not self._states[index].is_gone:
            self._gone.append(index)
        self._states[index] = WorkerState(index, 0, 0, is_gone=True)
