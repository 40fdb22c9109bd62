"""The loss of an R-worker: which sequences keep all tokens, some segments, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


class Damage(NamedTuple):
    """The sequences that must recompute tokens after a loss.
    ``whole``: they have no cached tokens left. ``broken``: they have several segments, some of which must be
    recomputed. ``starved``: they find no free blocks to continue.
    """

    whole: list[TokenSequence]
    broken: list[TokenSequence]
    starved: list[TokenSequence]


class Losses:
    """Removes a lost R-worker's copies from the store, and those rows of the last step that may have attended there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._residents = store.residents

    def spoilt(self, workers: Sequence[int]) -> list[int]:
        """Return the ids of the sequences that lost cached tokens with R-workers ``workers``.
        They lost tokens without another copy, or their rows in the last step attended there.
        """
        attended = {each for worker in workers for each in self._attended_on(worker)}
        held = {each.sequence_id: each for worker in workers for each in self._residents.on(worker)}
        return [each for each, it in held.items() if each in attended or _loses_some(it, set(workers))]

    def lose(self, worker: int) -> Damage:
        """Remove the lost R-worker ``worker``; return the sequences that must recompute tokens.
        Rows of the last step that attended there are wrong, unless the sequence has a full copy elsewhere and attended
        on that. A prompt whose tokens other R-workers store in full continues with their copies.
        """
        attended, sound = self._attended_on(worker), self._store.num_sound
        store, here = self._store, self._residents.on(worker)
        starved: list[TokenSequence] = []
        stuck: list[TokenSequence] = []
        for transfer in [each for each in store.transfers if each.target == worker]:
            store.transfers.drop(transfer)
        for sequence in [each for each in here if len(each.holders) > 1]:
            store.give_up(sequence, sequence.tail, worker)
            if sequence.sequence_id not in attended:
                continue
            if not store.make_room_to_rewind(sequence.tail, attended[sequence.sequence_id]):
                stuck.append(sequence)
            elif not self._repeat(sequence, attended[sequence.sequence_id]):
                starved.append(sequence)
        here = self._residents.on(worker)
        broken: list[TokenSequence] = []
        whole = [each for each in here if self._begins_again(each, worker, each.sequence_id in attended)]
        for sequence in [each for each in here if each not in whole]:
            loses_some = _loses_some(sequence, {worker})
            if not loses_some and sequence.sequence_id not in attended:
                store.lose(sequence, worker)
                continue
            num_sound = (sound if loses_some else attended).get(sequence.sequence_id, sequence.num_tokens)
            has_room = self._break(sequence, worker, num_sound)
            (broken if has_room else starved).append(sequence)
        whole += stuck
        for sequence in whole:
            self._forget_spoilt(sequence, attended)
            store.leave(sequence, keep=False)
        store.prefixes.lose(worker)
        store.workers.lose(worker)
        return Damage(whole, broken, starved)

    def _begins_again(self, sequence: TokenSequence, worker: int, attended: bool) -> bool:
        """Return whether ``sequence`` must be recomputed from its first token after the loss of R-worker ``worker``.
        ``attended``: its last rows attended there. A recurrent state cannot be cut to fewer tokens.
        """
        if not sequence.has_several:
            return True
        loses_some = _loses_some(sequence, {worker})
        if self._store.workers.sizes.rewinds:
            return loses_some and sequence.job_id > 0
        return loses_some or attended

    def _forget_spoilt(self, sequence: TokenSequence, attended: Mapping[int, int]) -> None:
        """Forget the prefixes that other R-workers retain of the last rows of ``sequence``, if these rows are wrong."""
        for segment in sequence.segments if sequence.sequence_id in attended else ():
            num_sound = max(0, attended[sequence.sequence_id] - segment.start)
            for copy in segment.copies:
                self._store.prefixes.forget_beyond(copy, num_sound)

    def _attended_on(self, worker: int) -> dict[int, int]:
        """Return the sequences whose last rows attended on ``worker``, with their numbers of tokens before."""
        found: dict[int, int] = {}
        for mini_batch in self._store.last_rows:
            attended = (mini_batch.chunks["worker"] == worker) & mini_batch.chunks["attends"]
            attended[mini_batch.reads["chunk"][mini_batch.reads["worker"] == worker]] = True
            chunks = mini_batch.chunks[attended]
            found |= dict(zip(chunks["sequence_id"].tolist(), chunks["context_len"].tolist(), strict=True))
        return found

    def _repeat(self, sequence: TokenSequence, num_sound: int) -> bool:
        """Drop the tokens of ``sequence`` after the first ``num_sound``, to recompute them.
        Return False if blocks are missing. The sequence has one segment.
        """
        tail, num_blocks = sequence.tail, sequence.tail.num_blocks
        if sequence.sequence_id in self._residents.decoding and num_sound < sequence.num_prefill:
            self._residents.compute_again(sequence)
        if sequence.sequence_id in self._residents.decoding:  # free the blocks that were reserved for drafts
            num_blocks = min(num_blocks, self._store.workers.blocks_for(num_sound + 1))
        return self._store.cut(tail, num_sound, num_blocks)

    def _break(self, sequence: TokenSequence, worker: int, num_sound: int) -> bool:
        """Turn ``sequence``, of several segments, back into a prompt whose first missing segment is computed next.
        Segments on other R-workers stay. Return False if no blocks are free.
        """
        has_room = True
        decoded = sequence.sequence_id in self._residents.decoding or sequence.num_prefill < sequence.num_tokens
        # a prompt without output cannot decode: its first output token would be sampled from lost rows
        decoded &= len(sequence.output_token_ids) > 0
        self._residents.compute_again(sequence)
        self._store.prefixes.leaders.stop(sequence)
        # the last output token is the next input, so it is not cached
        sequence.num_prefill = sequence.num_tokens - decoded
        self._store.lose(sequence, worker)
        for segment in sequence.segments:
            most = segment.num_blocks
            if decoded:
                most = min(most, self._store.workers.blocks_for(sequence.num_tokens - segment.start))
            if segment.home >= 0 and segment.num_tokens and segment.start + segment.num_tokens > num_sound:
                has_room &= self._store.cut(segment, max(0, num_sound - segment.start), most)
            elif segment.home < 0:
                segment.num_blocks = most
        whole = [each.num_tokens == self._store.table.segment_tokens for each in sequence.segments]
        self._store.tails.set_tail(sequence, [*whole[:-1], False].index(False))
        return has_room


def _loses_some(sequence: TokenSequence, workers: set[int]) -> bool:
    """Return whether ``sequence`` has a segment whose copies are all on ``workers``."""
    return any(segment.home >= 0 and set(segment.workers) <= workers for segment in sequence.segments)
