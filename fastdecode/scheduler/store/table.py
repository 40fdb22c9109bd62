"""A table of the sequences with a cache, so that planning thousands of decodes takes a few array operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.core.placing import UNLIMITED
from fastdecode.core.step import CHUNK, NO_READS, READ, MiniBatch
from fastdecode.scheduler.sequence import TokenSequence


class DraftColumns:
    """The draft tokens of each table row, and how many were accepted.
    ``tokens``: int64 [most_rows, most_drafts]; the first ``counts`` of each row are proposed for the next step.
    ``tried``, ``kept``: float64 [most_rows], decaying counts of verified and of accepted draft tokens.
    """

    def __init__(self, most_rows: int, most_drafts: int) -> None:
        self.tokens, self.counts = np.zeros((most_rows, most_drafts), np.int64), np.zeros(most_rows, np.int64)
        self.tried, self.kept = np.zeros((2, most_rows))

    def open(self, row: int) -> None:
        """Reset the drafts of ``row`` for another sequence."""
        self.counts[row], self.tried[row], self.kept[row] = 0, 0.0, 0.0

    def propose(self, row: int, token_ids: Sequence[int]) -> None:
        self.tokens[row, : len(token_ids)] = token_ids
        self.counts[row] = len(token_ids)

    def forget(self, row: int) -> None:
        self.counts[row] = 0

    def cut(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Keep only the first ``counts`` draft tokens of each of ``rows``."""
        self.counts[rows] = counts

    def verify(self, row: int, num_tested: int, num_accepted: int) -> None:
        """Count the verified drafts of ``row``. Draft tokens after the first rejected one do not count."""
        # Factor by which a verification reduces the weight of earlier ones: about the last ten count
        kept = 0.9
        self.tried[row] = kept * self.tried[row] + min(num_accepted + 1, num_tested)
        self.kept[row] = kept * self.kept[row] + num_accepted


class SequenceTable:
    """The progress of sequences with a cache, and the R-workers on which they append, one row each.
    ``chunks``: CHUNK [most rows], the next decode of each. Its columns include ``homes`` and ``second_workers`` (the
    R-workers with the first and second copy of the last segment, -1 for none), ``num_cached``, ``bases`` and
    ``cache_ids``. ``on_second``: bool [most rows], True if the second copy attends in the next step. Segments end at
    multiples of ``segment_tokens``. ``prompt_lens``, ``max_tokens``, ``num_blocks`` and ``last_tokens``: int64 [most
    rows]. Each sequence writes its own last token into ``last_tokens``, since reading thousands of lists would take
    longer than all other planning. ``sequences``: the sequence of each row. ``rows``: int64 [n], the decoding rows as
    of the last :meth:`refresh`, sorted by R-worker and then longest context first. ``drafts``: draft tokens of each
    row.
    """

    def __init__(self, most_rows: int, most_drafts: int = 0, segment_tokens: int = UNLIMITED) -> None:
        self.segment_tokens = segment_tokens
        self.chunks = np.zeros(most_rows, CHUNK)
        self.homes, self.second_workers = self.chunks["worker"], self.chunks["copy"]
        self.num_cached, self.bases = self.chunks["context_len"], self.chunks["base"]
        self.cache_ids = self.chunks["cache_id"]
        self.homes[:], self.second_workers[:], self.on_second = -1, -1, np.zeros(most_rows, bool)
        for name in ("attends", "samples", "last_of_prompt", "is_decode", "num_rows"):
            self.chunks[name] = 1
        self.prompt_lens, self.max_tokens, self.num_blocks, self.last_tokens = np.zeros((4, most_rows), np.int64)
        self.drafts = DraftColumns(most_rows, most_drafts)
        self.sequences: list[TokenSequence | None] = [None] * most_rows
        self.rows = np.zeros(0, np.int64)
        self._free = list(range(most_rows))
        self._added: dict[int, None] = {}
        self._stopped = np.zeros(most_rows, bool)
        self._several: dict[int, None] = {}
        self._reads: dict[int, np.ndarray] = {}

    def open(self, sequence: TokenSequence) -> None:
        """Give ``sequence``, which has segments, a row of the table."""
        row = self._free.pop()
        self.chunks["sequence_id"][row], self.on_second[row] = sequence.sequence_id, False
        self.prompt_lens[row], self.max_tokens[row] = len(sequence.prompt_token_ids), sequence.max_tokens
        self.drafts.open(row)
        self.last_tokens[row] = sequence.output_token_ids[-1] if len(sequence.output_token_ids) else 0
        self.sequences[row], sequence.table, sequence.row = sequence, self, row
        self.put(sequence)

    def put(self, sequence: TokenSequence) -> None:
        """Update the row of ``sequence`` after a change of its segments or copies."""
        row, tail = sequence.row, sequence.tail
        num_cached = tail.start + tail.num_tokens
        for segment in sequence.segments if sequence.has_several else ():
            segment.release()
        self.bases[row], self.cache_ids[row], self.num_cached[row] = tail.start, tail.cache_id, num_cached
        tail.bind(self, row)
        self.homes[row], self.second_workers[row], *_ = (*tail.workers, -1, -1)
        self.on_second[row] &= tail.twice
        self._several.pop(row, None)
        self._reads.pop(row, None)
        if sequence.has_several:
            self._several[row] = None
        if closed := sequence.closed:
            self._reads[row] = np.array([(0, each.home, each.cache_id, each.start) for each in closed], READ)

    def decode(self, sequence: TokenSequence) -> None:
        """Let ``sequence`` decode after the next refresh."""
        self._added[sequence.row] = None

    def stop(self, sequence: TokenSequence) -> None:
        """Stop ``sequence`` from decoding after the next refresh."""
        if self._added.pop(sequence.row, self) is self:
            self._stopped[sequence.row] = True

    def close(self, sequence: TokenSequence) -> None:
        """Free the row of ``sequence``, which has no cache any more."""
        row = sequence.row
        self.stop(sequence)
        self._several.pop(row, None)
        self._reads.pop(row, None)
        self._free.append(row)
        self.homes[row], self.second_workers[row], self.sequences[row] = -1, -1, None
        sequence.segments, sequence.num_closed, sequence.table, sequence.row = [], 0, None, -1

    def refresh(self) -> None:
        """Remove the rows of sequences that stopped decoding, append new ones, and restore the order of ``rows``."""
        stopped = self._stopped[self.rows]
        if self._added or stopped.any():
            self.rows = np.append(self.rows[~stopped], np.array(list(self._added), np.int64))
            self._added.clear()
        self._stopped[:] = False
        self.sort()

    def sort(self) -> None:
        """Restore the order of ``rows``: by attending R-worker, then longest context first."""
        key = (self.attending(self.rows) << 40) - self.num_cached[self.rows]
        if (key[1:] < key[:-1]).any():
            self.rows = self.rows[np.argsort(key, kind="stable")]  # nearly sorted already, so this takes linear time

    def sequence(self, row: int) -> TokenSequence:
        """Return the sequence of ``row``. Raise KeyError if the row is not in use."""
        found = self.sequences[row]
        if found is None:
            raise KeyError(f"row {row} is not in use")
        return found

    def several(self) -> list[TokenSequence]:
        """Return the sequences with several segments."""
        return [self.sequence(row) for row in self._several]

    def on(self, worker: int) -> list[TokenSequence]:
        """Return the sequences with a segment on R-worker ``worker``, in no order."""
        rows = np.flatnonzero((self.homes == worker) | (self.second_workers == worker)).tolist()
        more = [row for row in self._several if self.sequence(row).is_on(worker)]
        return [self.sequence(row) for row in dict.fromkeys([*rows, *more])]

    def attending(self, rows: np.ndarray) -> np.ndarray:
        """Return the R-worker that attends the last segment of each of ``rows``; int64 [n]."""
        return np.where(self.on_second[rows], self.second_workers[rows], self.homes[rows])

    def count_held(self, rows: np.ndarray, counts: np.ndarray | int, num_workers: int) -> np.ndarray:
        """Return the sum of ``counts``, one per row, by R-worker with the row's segment; int64 [num_workers]."""
        weights = np.broadcast_to(counts, rows.shape)
        held = np.bincount(self.homes[rows], weights, num_workers)
        copied = rows[self.second_workers[rows] >= 0]
        if len(copied):
            held += np.bincount(self.second_workers[copied], weights[self.second_workers[rows] >= 0], num_workers)
        return held.astype(np.int64)

    def num_outputs(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of output tokens of each decoding row; int64 [n]. All but the last are cached."""
        return self.num_cached[rows] - self.prompt_lens[rows] + 1

    def advance(self, rows: np.ndarray | int, num_tokens: int = 1) -> None:
        """Count the next ``num_tokens`` tokens of ``rows`` as cached."""
        self.num_cached[rows] += num_tokens

    def tail_lens(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of cached tokens in the last segment of each of ``rows``; int64 [n]."""
        return self.num_cached[rows] - self.bases[rows]

    def tail_room(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens still fit the last segment of each of ``rows``, free blocks aside; int64 [n]."""
        return self.segment_tokens - self.tail_lens(rows)

    def reads(self, rows: np.ndarray) -> np.ndarray:
        """Return READ records of the full segments of ``rows``, in order; ``chunk`` is the index in ``rows``."""
        if not self._reads:
            return NO_READS
        found = {}
        for row, records in self._reads.items():
            for place in np.flatnonzero(rows == row).tolist():
                found[place] = records.copy()
                found[place]["chunk"] = place
        return np.concatenate([found[place] for place in sorted(found)]) if found else NO_READS

    def kv_loads(self, num_workers: int) -> np.ndarray:
        """Return the KV tokens that each R-worker attends if all rows decode, float64 [num_workers]."""
        tokens = self.tail_lens(self.rows) + 1
        loads = np.bincount(self.attending(self.rows), tokens, num_workers).astype(np.float64)
        if self._reads:
            loads += self.segment_tokens * np.bincount(self.reads(self.rows)["worker"], minlength=num_workers)
        return loads

    def cached_of_several(self) -> dict[int, int]:
        """Return the number of cached tokens of each sequence with several segments, by id."""
        return {int(self.chunks["sequence_id"][row]): int(self.num_cached[row]) for row in self._several}

    def loads_on(self, worker: int, rows: np.ndarray) -> np.ndarray:
        """Return the KV tokens that each of ``rows`` attends on R-worker ``worker``; int64 [n]."""
        loads = np.where(self.attending(rows) == worker, self.tail_lens(rows) + 1, 0)
        reads = self.reads(rows)
        return loads + self.segment_tokens * np.bincount(reads["chunk"][reads["worker"] == worker], minlength=len(rows))

    def mini_batch(self, rows: np.ndarray) -> MiniBatch:
        """Return the next decodes of ``rows`` as a mini-batch, with their last tokens and drafts."""
        chunks, last, num_drafts = self.chunks.take(rows), self.last_tokens.take(rows), self.drafts.counts[rows]
        reads, swapped = self.reads(rows), self.on_second[rows]
        if swapped.any():  # in this step, the R-worker `worker` attends, and `copy` only stores
            chunks["worker"][swapped], chunks["copy"][swapped] = (
                self.second_workers[rows[swapped]],
                self.homes[rows[swapped]],
            )
        if not num_drafts.any():
            return MiniBatch(chunks, last, reads)
        chunks["num_rows"], chunks["scored"] = 1 + num_drafts, num_drafts > 0
        tokens = np.column_stack([last, self.drafts.tokens[rows]])
        return MiniBatch(chunks, tokens[np.arange(tokens.shape[1]) <= num_drafts[:, None]], reads)
