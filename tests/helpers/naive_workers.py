"""The simplest R-workers: they hold each token and each block as Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastdecode.core.remote_prefill import RemotePrefill, StoredAt
from fastdecode.core.step import Chunk, ScheduledStep
from fastdecode.core.types import Verb

SPOILT = -1
"""Stands for a token that was computed without everything that it should have attended to."""


@dataclass
class Held:
    """A naive R-worker's record of a sequence: its tokens, and its physical blocks.

    ``ticket``: the job under which prefill workers store ``incoming`` tokens, until ``num_reserved`` are there.
    ``state``: blocks of a recurrent state. ``is_spoilt``: an abandoned step has changed that state.
    """

    tokens: list[int]
    blocks: list[object]
    ticket: int | None = None
    num_reserved: int = 0
    incoming: list[int] = field(default_factory=list)
    state: list[object] = field(default_factory=list)
    is_spoilt: bool = False


def name(chunk: Chunk) -> int:
    """Return the cache id of the sequence to which a chunk is appended."""
    return chunk.sequence_id if chunk.cache_id is None else chunk.cache_id


def places(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the (R-worker, cache id) pairs that store a chunk: its own R-worker, and any second copy's."""
    return [(worker, name(chunk)) for worker in (chunk.worker, chunk.copy) if worker >= 0]


class NaiveWorkers:
    """Naive R-workers. ``held``: by R-worker and sequence.
    Forks share full blocks, and copy partial blocks and states of ``state_blocks`` blocks.
    """

    def __init__(self, block_size: int, state_blocks: int = 0) -> None:
        self.block_size, self.state_blocks = block_size, state_blocks
        self.held: dict[tuple[int, int], Held] = {}

    def of(self, chunk: Chunk) -> list[Held]:
        """Return the records of a chunk's sequence in all its places, before the chunk is written."""
        return [self.held.get(place, Held([], [])) for place in places(chunk)]

    def on(self, worker: int) -> set[int]:
        """Return the sequences that R-worker ``worker`` holds."""
        return {sequence_id for at, sequence_id in self.held if at == worker}

    def blocks_used(self, num_workers: int) -> list[int]:
        """Return the number of used blocks of each R-worker."""
        blocks: list[set[int]] = [set() for _ in range(num_workers)]
        for (worker, _), held in self.held.items():
            blocks[worker] |= {id(block) for block in (*held.blocks, *held.state)}
        return [len(used) for used in blocks]

    def apply(self, step: ScheduledStep) -> None:
        """Apply the controls of ``step`` in order."""
        for worker, verbs in enumerate(step.controls):
            for verb, sequence_id, source_id, num_tokens in verbs:
                self._obey(worker, Verb(verb), sequence_id, source_id, num_tokens)

    def write(self, chunks: list[Chunk]) -> None:
        """Append the tokens of ``chunks``."""
        for place, chunk in _places_of(chunks):
            held = self.held.setdefault(place, self._new())
            assert held.ticket is None and not held.is_spoilt
            held.tokens += chunk.token_ids
            held.blocks += [object() for _ in range(self._blocks_for(len(held.tokens)) - len(held.blocks))]

    def unwrite(self, chunks: list[Chunk]) -> None:
        """Remove the tokens of ``chunks``, since the step was abandoned."""
        for place, chunk in _places_of(chunks):
            held, num_tokens = self.held[place], chunk.context_len - chunk.base
            del held.tokens[num_tokens:], held.blocks[self._blocks_for(num_tokens) :]
            held.is_spoilt = self.state_blocks > 0
            if not held.tokens:
                del self.held[place]

    def spoil(self, chunks: list[Chunk]) -> None:
        """Mark the tokens of ``chunks`` as wrong, since a lost R-worker had a part in them."""
        for place, chunk in _places_of(chunks):
            held, num_tokens = self.held[place], chunk.context_len - chunk.base
            held.tokens[num_tokens : num_tokens + len(chunk.token_ids)] = [SPOILT] * len(chunk.token_ids)

    def copy(self, sequence_id: int, source: int, target: int, start: int, num_tokens: int) -> None:
        """Copy ``num_tokens`` tokens of a sequence to ``target``, which has the first ``start`` in whole blocks."""
        assert self.held[source, sequence_id].ticket is None
        tokens = self.held[source, sequence_id].tokens[start : start + num_tokens]
        held = self.held.setdefault((target, sequence_id), self._new())
        assert len(held.tokens) == start and start % self.block_size == 0
        held.tokens += tokens
        held.blocks += [object() for _ in range(self._blocks_for(len(held.tokens)) - len(held.blocks))]

    def store(self, prefill: RemotePrefill, misses: Callable[[], bool]) -> list[int] | None:
        """Read a prompt's prefix and store the rest in all present places; return missed tickets.
        ``misses`` says which places cannot be reached. Return None if a place of the prefix is gone. The prefix must be
        the prompt's first tokens, and stored tokens must be reserved.
        """
        if not all(self._waits(place) for place in prefill.prefix):
            return None
        for place in prefill.prefix:
            there = self.held[place.r_worker, place.cache_id].tokens
            assert there == list(prefill.token_ids[place.start : place.end])
        missed = []
        for place in prefill.stores:
            if not self._waits(place) or misses():
                missed.append(place.ticket)
                continue
            held = self.held[place.r_worker, place.cache_id]
            assert place.start + len(held.tokens) == max(place.start, prefill.context_len)
            held.incoming = list(prefill.token_ids[place.start + len(held.tokens) : place.end])
        return missed

    def _waits(self, place: StoredAt) -> bool:
        held = self.held.get((place.r_worker, place.cache_id))
        return held is not None and held.ticket == place.ticket

    def lose(self, worker: int) -> None:
        """Drop everything that the lost R-worker ``worker`` held."""
        self.held = {place: held for place, held in self.held.items() if place[0] != worker}

    def _new(self) -> Held:
        return Held([], [], state=[object() for _ in range(self.state_blocks)])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _obey(self, worker: int, verb: Verb, sequence_id: int, source_id: int, num_tokens: int) -> None:
        """Apply one control to what ``worker`` holds."""
        full, rest = divmod(num_tokens, self.block_size)
        place = worker, sequence_id
        if verb == Verb.RESERVE:
            held = self.held.setdefault(place, Held([], []))
            assert held.ticket is None and num_tokens >= max(1, len(held.tokens))
            held.ticket, held.num_reserved = source_id, num_tokens
            held.blocks += [object() for _ in range(self._blocks_for(num_tokens) - len(held.blocks))]
        elif verb == Verb.COMMIT:
            held = self.held[place]
            assert held.ticket == source_id and held.num_reserved == num_tokens
            held.tokens, held.ticket, held.incoming = held.tokens + held.incoming, None, []
            assert len(held.tokens) == num_tokens, "some were not stored"
        elif verb == Verb.FORK:
            source = self.held[worker, source_id]  # a KeyError here means: released before it was forked
            assert len(source.tokens) >= num_tokens and place not in self.held
            assert source.ticket is None or not rest
            assert not self.state_blocks or (len(source.tokens) == num_tokens and not source.is_spoilt)
            self.held[place] = held = self._new()
            held.tokens, held.blocks = source.tokens[:num_tokens], source.blocks[:full] + [object()] * (rest > 0)
        elif verb == Verb.TRUNCATE:
            held = self.held[place]
            assert len(held.tokens) >= num_tokens and held.ticket is None and not self.state_blocks
            del held.tokens[num_tokens:], held.blocks[full:]
            held.blocks += [object()] * (rest > 0)  # the copied partial block is its own
        else:
            assert verb == Verb.RELEASE
            del self.held[place]


def _places_of(chunks: list[Chunk]) -> Iterator[tuple[tuple[int, int], Chunk]]:
    return ((place, chunk) for chunk in chunks for place in places(chunk))
