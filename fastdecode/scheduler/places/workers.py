"""What the scheduler knows of each R-worker: its blocks, what it has yet to be told, and how fast it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.errors import BackendError
from fastdecode.core.types import Verb
from fastdecode.kinds.sizes import Sizes
from fastdecode.scheduler.places.place import Block
from fastdecode.scheduler.places.speeds import Observed, Speeds

Control = tuple[int, int, int, int]

KEPT_GONE = 16
"""R-workers that are gone and keep their index; one that joins takes the place of the longest gone beyond these."""


class RoomError(BackendError):
    """Blocks were promised that an R-worker does not have: a fault of the scheduler."""


@dataclass(eq=False)
class Prefix:
    """A retained prefix: a copy that no sequence owns, named ``prefix_id`` on R-worker ``worker``.

    Hash i covers all tokens up to block i's end. Of a sequence with two copies both are retained, under the same
    ``origin``: they are the same bit for bit. ``own``: blocks that only this prefix has, of a hybrid's state and of the
    tokens ``rest`` after the last full block; with a state it is of use as a whole alone. ``used_seconds``: when it was
    used last. ``is_parked``: its R-worker's disk has all of it, too.
    """

    prefix_id: int
    worker: int
    block_hashes: list[bytes]
    blocks: list[Block]
    origin: int = 0
    own: list[Block] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    used_seconds: float = 0.0
    is_parked: bool = False


@dataclass(eq=False, slots=True)
class WorkerState:
    """One R-worker. When it is gone it keeps its index until another takes it.

    ``free`` of its ``num_blocks`` KV blocks are counted as the R-worker counts them. Most blocks of a sequence are its
    own, and only counted; those that other sequences may hold as well are :class:`Block` objects, counted once however
    many hold them. ``cached`` blocks are held by ``prefixes`` only, which it retains, least recently used first: they
    can be freed at any time. ``num_sequences`` append there. ``num_segments`` have a copy there, tails included.
    ``controls``: what it has yet to be told. ``host``: its machine.
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
        """Blocks that are free or would be, were the prefix cache emptied."""
        return self.free + self.cached

    @property
    def holds_nothing(self) -> bool:
        """True if no sequence has anything here."""
        return not self.num_segments

    def take(self, num_blocks: int) -> None:
        """A copy of a segment comes, with ``num_blocks`` blocks that are no other's; :class:`RoomError` beyond what is
        free."""
        self.grow(num_blocks)
        self.num_segments += 1

    def give_back(self, num_blocks: int, shared: Iterable[Block]) -> None:
        """A copy goes, with ``num_blocks`` blocks of its own and those ``shared``."""
        self.free += num_blocks
        self.drop(shared)
        self.num_segments -= 1

    def grow(self, num_blocks: int) -> None:
        """Have what is there take ``num_blocks`` more blocks; fewer than none give some back."""
        if num_blocks > self.free:
            raise RoomError(
                f"R-worker {self.index} has {self.free} free blocks, and {num_blocks} were promised (a bug)"
            )
        self.free -= num_blocks

    def fork(self, cache_id: int, source_id: int, num_tokens: int) -> None:
        """``cache_id`` begins with the first ``num_tokens`` tokens of ``source_id``."""
        self._tell(Verb.FORK, cache_id, source_id, num_tokens)

    def truncate(self, cache_id: int, num_tokens: int) -> None:
        """``cache_id`` keeps its first ``num_tokens`` tokens; it is forgotten where these are none."""
        self._tell(Verb.TRUNCATE if num_tokens else Verb.RELEASE, cache_id, 0, num_tokens)

    def release(self, cache_id: int) -> None:
        """``cache_id`` is forgotten."""
        self._tell(Verb.RELEASE, cache_id, 0, 0)

    def reserve(self, cache_id: int, job_id: int, num_tokens: int) -> None:
        """Prefill workers are to store ``num_tokens`` tokens of ``cache_id`` under job ``job_id``."""
        self._tell(Verb.RESERVE, cache_id, job_id, num_tokens)

    def commit(self, cache_id: int, job_id: int, num_tokens: int) -> None:
        """Prefill workers have stored them."""
        self._tell(Verb.COMMIT, cache_id, job_id, num_tokens)

    def _tell(self, verb: Verb, cache_id: int, source_id: int, num_tokens: int) -> None:
        self.controls.append((int(verb), cache_id, source_id, num_tokens))

    def hold(self, blocks: Iterable[Block]) -> None:
        """One more sequence holds ``blocks``."""
        for block in blocks:
            self.cached -= block.num_sequences == 0
            block.num_sequences += 1

    def drop(self, blocks: Iterable[Block]) -> None:
        """One sequence less holds ``blocks``."""
        for block in blocks:
            block.num_sequences -= 1
            if block.num_sequences == 0:
                self.cached += block.num_prefixes > 0
                self.free += block.num_prefixes == 0

    def forget(self, blocks: Iterable[Block]) -> None:
        """One retained prefix less holds ``blocks``."""
        for block in blocks:
            block.num_prefixes -= 1
            if block.num_prefixes == 0 and block.num_sequences == 0:
                self.cached -= 1
                self.free += 1


class Workers:
    """All R-workers by index, the last ``KEPT_GONE`` gone ones included; what is compared over all are arrays."""

    def __init__(
        self,
        num_blocks: Iterable[int],
        bandwidths: Sequence[float],
        sizes: Sizes,
        hosts: Sequence[str] = (),
    ) -> None:
        """``bandwidths``: what memory gave each at its start, in any unit. ``hosts``: their machines, where known."""
        self.sizes, self.block_size = sizes, sizes.block_size
        self.speeds = Speeds(bandwidths)
        self._gone: list[int] = []
        self._states = [WorkerState(index, count, count) for index, count in enumerate(num_blocks)]
        for state, host in zip(self._states, hosts, strict=False):
            state.host = host

    def __len__(self) -> int:
        """Return R-workers that are or were here, one for each index."""
        return len(self._states)

    def __getitem__(self, index: int) -> WorkerState:
        """Return the one of them."""
        return self._states[index]

    def __iter__(self) -> Iterator[WorkerState]:
        """Yield all of them, in order."""
        return iter(self._states)

    @property
    def present(self) -> list[int]:
        """The R-workers that are not gone."""
        return [worker.index for worker in self._states if not worker.is_gone]

    @property
    def vacant(self) -> list[int]:
        """The places that R-workers which join are to take, before new ones at the end."""
        return self._gone[: max(0, len(self._gone) - KEPT_GONE)]

    @property
    def draining(self) -> list[int]:
        """The R-workers that give up what they hold and then go."""
        return [worker.index for worker in self._states if worker.is_draining]

    @property
    def accepting(self) -> list[int]:
        """The R-workers that take sequences."""
        return [worker.index for worker in self._states if not worker.is_gone and not worker.is_draining]

    @property
    def num_blocks(self) -> np.ndarray:
        """KV blocks of each: int64 [num_workers]."""
        return np.array([worker.num_blocks for worker in self._states])

    @property
    def available(self) -> np.ndarray:
        """Blocks of each that are free or would be, were the prefix cache emptied: int64 [num_workers]."""
        return np.array([worker.free + worker.cached for worker in self._states])

    @property
    def num_sequences(self) -> np.ndarray:
        """Sequences that append on each: int64 [num_workers]."""
        return np.array([worker.num_sequences for worker in self._states])

    @property
    def has_controls(self) -> bool:
        """True while some R-worker has yet to be told something."""
        return any(worker.controls for worker in self._states)

    def take_controls(self) -> tuple[tuple[Control, ...], ...]:
        """Return what the R-workers have to be told, once."""
        controls = tuple(tuple(worker.controls) for worker in self._states)
        for worker in self._states:
            worker.controls.clear()
        return controls

    def put_back(self, controls: tuple[tuple[Control, ...], ...]) -> None:
        """The R-workers heard none of ``controls``: they go before any that came since."""
        for worker, verbs in zip(self._states, controls, strict=True):
            worker.controls[:0] = verbs

    def observe(self, observed: Observed) -> None:
        """A step shows how fast they are, where prompts had little part in it."""
        if observed.shows_speeds:
            self.speeds.observe(observed.step.kv_loads, observed.r_seconds)

    def blocks_for(self, num_tokens: int) -> int:
        """Return blocks that a sequence of so many tokens takes."""
        return self.sizes.blocks_for(num_tokens)

    def join(self, index: int, num_blocks: int, bandwidth: float, host: str = "") -> float:
        """Return one more, with all its blocks free; returns how fast it is beside all others together.

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
        """R-worker ``index`` takes no more sequences; no effect on one that is gone."""
        self._states[index].is_draining = not self._states[index].is_gone

    def lose(self, index: int) -> None:
        """R-worker ``index`` is gone with all it held."""
        if not self._states[index].is_gone:
            self._gone.append(index)
        self._states[index] = WorkerState(index, 0, 0, is_gone=True)
