"""Draft tokens of decoding sequences: how many each sequence gets, how many fit a step, how many are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdecode.core.protocols import DraftPolicy
from fastdecode.core.step import Chunk
from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.places.speeds import Observed
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


@dataclass
class DraftCounts:
    """Counts of verified drafts. ``num_drafts``: verifications; ``num_draft_tokens``: tokens of all verified drafts.
    ``num_accepted_tokens_per_pos``: accepted first tokens of drafts, accepted second tokens, and so on.
    """

    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts: int = 0
    num_draft_tokens: int = 0

    @property
    def num_accepted_tokens(self) -> int:
        """The number of accepted draft tokens at all positions."""
        return sum(self.num_accepted_tokens_per_pos)

    def figures(self) -> dict[str, Any]:
        """Return the counts under the names that ``bench throughput`` prints.
        ``mean_accepted_length``: accepted tokens per verified draft.
        """
        accepted = self.num_accepted_tokens
        return {
            "drafts": self.num_drafts,
            "drafted_tokens": self.num_draft_tokens,
            "accepted_tokens": accepted,
            "accepted_per_position": list(self.num_accepted_tokens_per_pos),
            "acceptance_rate": accepted / max(1, self.num_draft_tokens),
            "mean_accepted_length": accepted / max(1, self.num_drafts),
        }

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self.num_accepted_tokens_per_pos[place] += 1

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return these counts minus the earlier counts ``before``."""
        return DraftCounts(
            list(map(int.__sub__, self.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos)),
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
        )

    def copy(self) -> DraftCounts:
        return DraftCounts(list(self.num_accepted_tokens_per_pos), self.num_drafts, self.num_draft_tokens)


class Drafts:
    """Grants rows, KV load and blocks to draft tokens, as far as decodes and prompts leave some in a step.
    Drafts preempt nothing. A sequence with k draft tokens has 1 + k rows in a step, over one read of its cache. Blocks
    are granted before drafting, since a drafter may cache draft tokens on the R-workers too.
    """

    def __init__(self, store: Store, limits: Limits, policy: DraftPolicy | None) -> None:
        """``policy`` decides how many draft tokens each sequence gets; None for no drafts."""
        self.policy = policy
        self.counts = DraftCounts([0] * limits.num_speculative_tokens)
        self._store, self._residents, self._table = store, store.residents, store.table
        self._workers = store.workers
        self._most, self._budget = limits.num_speculative_tokens, limits.max_num_batched_tokens
        self._proposed: dict[int, TokenSequence] = {}
        self._granted: list[tuple[TokenSequence, Segment, list[int], int]] = []

    def observe(self, observed: Observed) -> None:
        """Let the policy learn from the times of a step, if all its rows were decodes."""
        if self.policy and observed.decodes:
            step, num_sequences = observed.step, sum(map(len, observed.step.mini_batches))
            seconds = (observed.s_seconds, observed.wait_seconds, observed.r_seconds)
            self.policy.observe(step.num_tokens, num_sequences, step.kv_loads, *seconds)

    def grant(self) -> dict[int, int]:
        """Grant blocks for draft tokens; return how many tokens each decoding sequence gets, by id, without zeros.
        The blocks stay granted until the step that verifies the draft tokens has ended.
        """
        self.drop()
        self._table.refresh()
        table, rows = self._table, self._table.rows
        if self.policy is None or not len(rows):
            return {}
        most = np.minimum(table.max_tokens[rows] - table.num_outputs(rows), table.tail_room(rows))
        most = np.clip(most - 1, 0, self._most)
        acceptance = self.policy.acceptance(table.drafts.tried[rows], table.drafts.kept[rows])
        loads = table.kv_loads(len(self._workers))
        counts = self._within_blocks(rows, self.policy.choose(acceptance, most, len(rows), loads))
        some = np.flatnonzero(counts)
        ids = table.chunks["sequence_id"][rows[some]]
        return dict(zip(ids.tolist(), counts[some].tolist(), strict=True))

    def propose(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Use ``drafts``, draft tokens by sequence id, in the next step.
        Sequences that no longer decode are ignored.
        """
        for sequence_id, tokens in drafts.items():
            sequence = self._residents.decoding.get(sequence_id)
            if sequence is not None and len(tokens):
                self._table.drafts.propose(sequence.row, tokens)
                self._proposed[sequence_id] = sequence

    def drop(self) -> None:
        """Drop the proposed drafts; free the blocks that were granted for drafts and hold no token."""
        for sequence in self._proposed.values():
            if sequence.table is not None:
                self._table.drafts.forget(sequence.row)
        for sequence, tail, holders, num_blocks in self._granted:
            still_there = sequence.table is not None and sequence.tail is tail and tail.workers[:1] == holders[:1]
            # a sequence that was preempted and restarted no longer decodes
            if still_there and sequence.sequence_id in self._residents.decoding:
                unused = tail.num_blocks - self._workers.blocks_for(tail.num_tokens)
                self._store.tails.grow(np.array([sequence.row]), -min(num_blocks, unused))
        self._proposed.clear()
        self._granted.clear()

    def place(self, rows: np.ndarray, prompts: Sequence[Chunk], kv_limits: np.ndarray | None) -> dict[int, list[int]]:
        """Return this step's draft tokens by sequence id, cut so that all rows fit the step.
        ``rows``: table rows of the decoding sequences; ``prompts``: the step's prompt chunks. ``kv_limits``: KV tokens
        that each R-worker may attend, float64 [num_workers]; None without strict limits.
        """
        if not self._proposed:
            return {}
        table, left = self._table, self._budget - len(rows) - sum(len(chunk.token_ids) for chunk in prompts)
        proposed = table.drafts.counts[rows]
        counts = np.minimum(proposed, _cap(proposed, max(0, left)))
        if kv_limits is not None:
            attending = table.attending(rows)
            loads = table.kv_loads(len(kv_limits)) + np.bincount(attending, counts, len(kv_limits))
            counts[(loads > kv_limits)[attending]] = 0
        table.drafts.cut(rows, counts)
        some = rows[counts > 0]
        ids, drafts = table.chunks["sequence_id"][some].tolist(), table.drafts.tokens[some].tolist()
        return {each: tokens[:count] for each, tokens, count in zip(ids, drafts, counts[counts > 0], strict=True)}

    def settle(self, drafts: Mapping[int, Sequence[int]], accepted: Mapping[int, int]) -> None:
        """Record that ``drafts`` were verified.
        Each sequence keeps its ``accepted`` first draft tokens; the others are dropped.
        """
        table = self._table
        for sequence_id, tokens in drafts.items():
            sequence = self._residents.decoding[sequence_id]
            row, kept = sequence.row, accepted.get(sequence_id, 0)
            table.advance(row, kept)
            table.drafts.verify(row, len(tokens), kept)
            self.counts.count(len(tokens), kept)
            if kept < len(tokens):
                self._store.tails.truncate(sequence)
        self.drop()

    def _within_blocks(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return ``counts``, draft tokens of each of ``rows``, cut to the available blocks.
        Blocks are granted on an R-worker only if each sequence there can still get one more block. Otherwise drafts
        only fill blocks that their sequences already have.
        """
        table, workers = self._table, self._workers
        held, cached = workers.sizes.blocks_of_tokens(table.num_blocks[rows]), table.tail_lens(rows)
        more = np.maximum(0, -(-(cached + 1 + counts) // workers.block_size) - held) * (counts > 0)
        needed = table.count_held(rows, more, len(workers))
        short = needed + workers.num_sequences > workers.available
        lacking = short[table.homes[rows]] | (short[table.second_workers[rows]] & (table.second_workers[rows] >= 0))
        room = np.maximum(0, held * workers.block_size - cached - 1)
        counts, more = np.where(lacking, np.minimum(counts, room), counts), np.where(lacking, 0, more)
        for worker in np.flatnonzero(needed * ~short).tolist():
            self._store.make_room(worker, int(needed[worker]))
        grown = np.flatnonzero(more)
        self._store.tails.grow(rows[grown], more[grown])
        for row, count in zip(rows[grown].tolist(), more[grown].tolist(), strict=True):
            sequence = self._residents.decoding[int(table.chunks["sequence_id"][row])]
            self._granted.append((sequence, sequence.tail, sequence.tail.workers, count))
        return counts


def _cap(counts: np.ndarray, budget: int) -> int:
    """Return the largest cap such that ``counts`` add up to at most ``budget`` if each count is cut to the cap."""
    for cap in range(int(counts.max(initial=0)), 0, -1):
        if np.minimum(counts, cap).sum() <= budget:
            return cap
    return 0
