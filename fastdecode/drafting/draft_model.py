"""Draft tokens from a smaller model with its own KV cache."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fastdecode.core.errors import interrupts_deferred
from fastdecode.core.protocols import DraftRequest, PendingControls
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import Verb
from fastdecode.drafting.early_exit import Draft, draw
from fastdecode.sworker import SWorker

Control = tuple[int, int, int, int]


@dataclass
class Held:
    """A sequence's tokens in the draft model's cache: the first ``num_known`` of prompt and output, then ``drafts``.
    ``num_blocks``: blocks reserved for the sequence.
    """

    num_known: int = 0
    drafts: list[int] = field(default_factory=list)
    num_blocks: int = 0

    @property
    def num_cached(self) -> int:
        """The number of tokens in the draft model's cache."""
        return self.num_known + len(self.drafts)

    def rewind(self, text: Draft) -> bool:
        """Drop rejected drafts and the last known token, which is the next input; return True if any was dropped."""
        before, most = self.num_cached, text.num_tokens - 1
        while self.drafts and self.num_known < most and text.tokens(self.num_known, 1) == self.drafts[:1]:
            del self.drafts[0]
            self.num_known += 1
        self.drafts = []
        self.num_known = min(self.num_known, most)
        return self.num_known < before


class DraftCache:
    """Records which tokens the draft model's R-worker caches, and collects the controls to send to it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = num_blocks
        self.block_size = block_size
        self.controls: list[Control] = []
        self._held: OrderedDict[int, Held] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of sequences with cached or reserved tokens."""
        return len(self._held)

    def use(self, text: Draft) -> Held:
        """Mark the sequence as used last; return its cached tokens after dropping rejected drafts (``Held.rewind``)."""
        held = self._held.setdefault(text.sequence_id, Held())
        self._held.move_to_end(text.sequence_id)
        if held.rewind(text):
            self.controls.append((int(Verb.TRUNCATE), text.sequence_id, 0, held.num_known))
        return held

    def chunk(self, text: Draft, token_ids: list[int], samples: bool) -> Chunk:
        """Return a chunk that appends ``token_ids`` to the sequence's cached tokens."""
        return Chunk(text.sequence_id, 0, self._held[text.sequence_id].num_cached, token_ids, samples=samples)

    def add(self, text: Draft, token_ids: list[int]) -> None:
        """Record that ``token_ids``, which follow the sequence's cached tokens, are now cached."""
        held = self._held[text.sequence_id]
        if held.num_known < text.num_tokens:
            held.num_known += len(token_ids)
        else:
            held.drafts += token_ids

    def reserve(self, sequence_id: int, num_tokens: int, in_use: Collection[int], after: Sequence[int]) -> bool:
        """Reserve blocks for ``num_tokens`` tokens of a sequence; return False if too few blocks are free.
        To free blocks, drop sequences that are not ``in_use``, least recently used first. If that is not enough, and
        this sequence has cached tokens, drop the less urgent sequences ``after``, last one first.
        """
        held = self._held[sequence_id]
        more = max(0, -(-num_tokens // self.block_size) - held.num_blocks)
        if more > self.free:
            victims = [each for each in self._held if each not in in_use]
            victims += reversed(after) if held.num_cached else ()
            for victim in itertools.takewhile(lambda _: more > self.free, victims):
                self.drop(victim)
        if more > self.free:
            return False
        self.free -= more
        held.num_blocks += more
        return True

    def drop(self, sequence_id: int) -> None:
        """Drop all cached tokens of a sequence; unknown ids are ignored."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self.free += held.num_blocks
            if held.num_cached:
                self.controls.append((int(Verb.RELEASE), sequence_id, 0, 0))


class DraftModelDrafter:
    """Runs a draft model over prompts and outputs, then over its own drafts. Its R-worker is in this process.
    A step computes at most ``most_rows`` prompt and output tokens. A sequence gets drafts once its whole prompt and
    output are cached. ``cache``: the tokens and blocks that the R-worker holds for each sequence.
    """

    def __init__(self, s_worker: SWorker, num_blocks: int, block_size: int, most_rows: int) -> None:
        """``s_worker``: runs the draft model over one R-worker with ``num_blocks`` blocks."""
        self.s_worker = s_worker
        self.cache = DraftCache(num_blocks, block_size)
        self._most_rows = most_rows

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        """See ``Drafter``. The result omits sequences whose prompt or output is not yet fully cached."""
        drafts = self._catch_up([Draft(each) for each in requests])
        while growing := [each for each in drafts if each.wants_more]:
            self._pass([(each, [each.token_ids[-1]]) for each in growing], growing)
        return {each.sequence_id: each.token_ids for each in drafts}

    def forget(self, sequence_id: int) -> None:
        """See ``Drafter``. When the cache is empty, send the pending releases to the R-worker at once."""
        self.cache.drop(sequence_id)
        if not len(self.cache) and self.cache.controls:
            self._pass([], [])

    def _catch_up(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Cache missing prompt and output tokens; return the drafts of complete sequences, with a first draft token."""
        missing = {each.sequence_id: each.num_tokens - self.cache.use(each).num_cached for each in drafts}
        in_order = sorted(drafts, key=lambda each: (missing[each.sequence_id], each.sequence_id))
        ids = [each.sequence_id for each in in_order]
        parts, whole, budget = [], [], self._most_rows
        for place, each in enumerate(in_order):
            start = self.cache.use(each).num_cached
            tokens = each.tokens(start, min(budget, each.num_tokens - start))
            most = each.num_tokens + each.request.num_drafts - 1
            if tokens and self.cache.reserve(each.sequence_id, most, missing, ids[place + 1 :]):
                budget -= len(tokens)
                parts.append((each, tokens))
                whole += [each] if start + len(tokens) == each.num_tokens else []
        if parts:
            self._pass(parts, whole)
        return whole

    def _pass(self, parts: Sequence[tuple[Draft, list[int]]], growing: Sequence[Draft]) -> None:
        """Run one step of the draft model: cache the tokens of ``parts``; append a new token to each of ``growing``."""
        cache, backend = self.cache, self.s_worker.backend
        sampled = {each.sequence_id for each in growing}
        chunks = [cache.chunk(each, tokens, each.sequence_id in sampled) for each, tokens in parts]
        step = ScheduledStep((MiniBatch.of(chunks),), (tuple(cache.controls),))
        try:
            with interrupts_deferred():
                backend.begin_step(step.to_step_plan())
                cache.controls.clear()
            if parts:
                draw(self.s_worker, step, growing)
            with interrupts_deferred():
                backend.end_step()
                for each, tokens in parts:
                    cache.add(each, tokens)
        except BaseException:
            backend.abandon_step()
            raise
