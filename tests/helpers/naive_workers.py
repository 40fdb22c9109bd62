"""R-workers as naive as they can be: what each holds, token by token and block by block."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.step import Chunk, ScheduledStep
from fastdecode.types import Verb

SPOILT = -1
"""Stands for a token that was computed without all that it should have attended to."""


@dataclass
class Held:
    """What a naive R-worker knows of a sequence: its tokens, and the physical blocks they lie in."""

    worker: int
    tokens: list[int]
    blocks: list[object]


def name(chunk: Chunk) -> int:
    """What its R-worker calls the sequence that a chunk is appended to."""
    return chunk.sequence_id if chunk.cache_id is None else chunk.cache_id


class NaiveWorkers:
    """``held``: by sequence. ``left_behind``: what was moved away and is still to be released, by R-worker and
    sequence. Full blocks are shared, partial ones copied."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[int, Held] = {}
        self.left_behind: dict[tuple[int, int], Held] = {}

    def of(self, chunk: Chunk) -> Held:
        """What is held of a chunk's sequence before it is written."""
        return self.held.get(name(chunk), Held(chunk.worker, [], []))

    def blocks_used(self, num_workers: int) -> list[int]:
        """Of each R-worker."""
        blocks: list[set[int]] = [set() for _ in range(num_workers)]
        for held in (*self.held.values(), *self.left_behind.values()):
            blocks[held.worker] |= {id(block) for block in held.blocks}
        return [len(used) for used in blocks]

    def apply(self, step: ScheduledStep) -> None:
        """The controls, in order. Each R-worker has its own sequences: one may leave it and begin anew on another in
        the same step."""
        parts = [{i: held for i, held in self.held.items() if held.worker == w} for w in range(len(step.controls))]
        for worker, verbs in enumerate(step.controls):
            for verb, sequence_id, source_id, num_tokens in verbs:
                self._obey(worker, parts[worker], Verb(verb), sequence_id, source_id, num_tokens)
        self.held = {i: held for part in parts for i, held in part.items()}
        assert len(self.held) == sum(map(len, parts)), "a sequence is on two R-workers"

    def write(self, chunks: list[Chunk]) -> None:
        """Append the tokens of ``chunks``."""
        for chunk in chunks:
            held = self.held.setdefault(name(chunk), self.of(chunk))
            held.tokens += chunk.token_ids
            held.blocks += [object() for _ in range(self._blocks_for(len(held.tokens)) - len(held.blocks))]

    def unwrite(self, chunks: list[Chunk]) -> None:
        """The step was abandoned."""
        for chunk in chunks:
            held, num_tokens = self.held[name(chunk)], chunk.context_len - chunk.base
            del held.tokens[num_tokens:], held.blocks[self._blocks_for(num_tokens) :]
            if not held.tokens:
                del self.held[name(chunk)]

    def spoil(self, chunks: list[Chunk]) -> None:
        """What was written of ``chunks`` is wrong: an R-worker was lost that should have had a part in it."""
        for chunk in chunks:
            held, num_tokens = self.held[name(chunk)], chunk.context_len - chunk.base
            held.tokens[num_tokens : num_tokens + len(chunk.token_ids)] = [SPOILT] * len(chunk.token_ids)

    def copy(self, sequence_id: int, target: int) -> None:
        """The cache of a sequence goes to ``target``; its old place is released later."""
        held = self.held[sequence_id]
        self.left_behind[held.worker, sequence_id] = held
        blocks = [object() for _ in range(self._blocks_for(len(held.tokens)))]
        self.held[sequence_id] = Held(target, list(held.tokens), blocks)

    def lose(self, worker: int) -> None:
        """All that ``worker`` held is gone."""
        self.held = {i: held for i, held in self.held.items() if held.worker != worker}
        self.left_behind = {at: held for at, held in self.left_behind.items() if at[0] != worker}

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _obey(
        self, worker: int, part: dict[int, Held], verb: Verb, sequence_id: int, source_id: int, num_tokens: int
    ) -> None:
        """One control, on what ``worker`` holds."""
        full, rest = divmod(num_tokens, self.block_size)
        if verb == Verb.FORK:
            source = part[source_id]  # a KeyError here: released before it was forked
            assert len(source.tokens) >= num_tokens and sequence_id not in part
            part[sequence_id] = Held(worker, source.tokens[:num_tokens], source.blocks[:full] + [object()] * (rest > 0))
        elif verb == Verb.TRUNCATE:
            held = part[sequence_id]
            assert len(held.tokens) >= num_tokens
            del held.tokens[num_tokens:], held.blocks[full:]
            held.blocks += [object()] * (rest > 0)  # its own from here on, if it was shared
        else:
            assert verb == Verb.RELEASE
            if not self.left_behind.pop((worker, sequence_id), None):
                del part[sequence_id]
