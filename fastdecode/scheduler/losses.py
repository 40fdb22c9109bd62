"""What is left of sequences when an R-worker is lost: all, where another holds them; the other ranges; or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from fastdecode.scheduler.ranges import Range
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence
from fastdecode.types import Verb


class Losses:
    """Takes residents off an R-worker that is gone: first ``of_copies``, then ``of_ranges``, then ``of_whole``."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._workers = residents.workers

    def of_copies(self, worker: int, sound: Mapping[int, int]) -> None:
        """``worker`` is about to be gone: sequences with two copies go on from the other one.

        ``sound``: cached tokens, before its last rows, of each sequence in whose last rows it attended; they repeat
        those rows.
        """
        if self._residents.copying and self._residents.copying[1].worker == worker:
            self._residents.drop_copying()
        for sequence in [each for each in self._residents.on(worker) if len(each.holders) > 1]:
            self._residents.drop_holder(sequence, worker)
            if sequence.sequence_id in sound:
                self._repeat(sequence, sound[sequence.sequence_id])

    def _repeat(self, sequence: Sequence, num_sound: int) -> None:
        """What is cached of ``sequence`` beyond ``num_sound`` tokens is wrong, and is computed again."""
        if sequence.sequence_id in self._residents.decoding and num_sound < sequence.num_prefill:
            del self._residents.decoding[sequence.sequence_id]
            self._residents.table.stop(sequence)
            self._residents.prompts[sequence.sequence_id] = sequence
        kept, num_blocks = sequence.tail, sequence.num_blocks
        if sequence.sequence_id in self._residents.decoding:  # drafts had blocks of their own
            num_blocks = min(num_blocks, self._workers.blocks_for(num_sound + 1))
        self._cut(kept, num_sound, num_blocks)
        self._residents.table.put(sequence, kept)

    def of_whole(self, worker: int) -> list[Sequence]:
        """``worker`` is gone; returns the sequences of a single range that it held, oldest first."""
        lost = [sequence for sequence in self._residents.on(worker) if not sequence.is_sharded]
        for sequence in lost:
            self._residents.take_out(sequence)
            self._workers[worker].drop(sequence.shared)
            self._residents.forget_cache(sequence)
        self._residents.prefix_cache.lose(worker)
        self._workers.lose(worker)
        return lost

    def of_ranges(self, worker: int, sound: Mapping[int, int]) -> list[Sequence]:
        """``worker`` is about to be gone; returns the sequences of several ranges that lost some of them, oldest first.

        What they had elsewhere stays; they are prompts now, whose first tokens to compute are those of the first range
        that was lost. ``sound``: cached tokens of sequences in whose last rows the lost ranges should have had a part.
        """
        broken = [sequence for sequence in self._residents.on(worker) if sequence.is_sharded]
        for sequence in broken:
            decoded = sequence.sequence_id in self._residents.decoding or sequence.num_prefill < sequence.num_tokens
            decoded &= len(sequence.output_token_ids) > 0  # else its first was lost with the range
            ranges = self._interrupt(sequence)
            sequence.num_prefill = sequence.num_tokens - decoded  # who decodes has an output token that is not cached
            num_sound = sound.get(sequence.sequence_id, sequence.num_tokens)
            for place, each in enumerate(ranges):
                most = self._workers.blocks_for(sequence.num_tokens - each.start) if decoded else each.num_blocks
                if each.worker == worker:
                    num_blocks = min(each.num_blocks, most)
                    ranges[place] = Range(self._residents.prefix_cache.new_id(), -1, each.start, 0, num_blocks)
                elif each.num_tokens and each.start + each.num_tokens > num_sound:
                    self._cut(each, max(0, num_sound - each.start), min(each.num_blocks, most))
            whole = [each.num_tokens == self._residents.table.range_tokens for each in ranges]
            first = [*whole[:-1], False].index(False)
            sequence.closed, sequence.ahead = ranges[:first], ranges[first + 1 :]
            self._residents.table.put(sequence, ranges[first])
            if sequence.worker >= 0:
                self._workers[sequence.worker].num_sequences += 1
        return broken

    def _interrupt(self, sequence: Sequence) -> list[Range]:
        """``sequence`` neither decodes nor appends any more, but is a prompt, with the ranges that are returned."""
        if self._residents.decoding.pop(sequence.sequence_id, None):
            self._residents.table.stop(sequence)
        else:
            self._residents.leave_scratch(sequence)
            self._residents.prefix_cache.stop_computing(sequence)
        self._residents.prompts[sequence.sequence_id] = sequence
        if sequence.worker >= 0:
            self._workers[sequence.worker].num_sequences -= 1
        return sequence.ranges

    def _cut(self, held: Range, num_tokens: int, num_blocks: int) -> None:
        """What ``held`` has beyond ``num_tokens`` tokens is wrong: it is forgotten, and ``num_blocks`` are kept."""
        worker = self._workers[held.worker]
        self._residents.prefix_cache.forget_beyond(held, num_tokens)
        wrong = held.shared[num_tokens // self._workers.block_size :]
        del held.shared[num_tokens // self._workers.block_size :]
        worker.drop(wrong)
        worker.free += held.num_blocks - num_blocks - len(wrong)
        held.num_tokens, held.num_blocks = num_tokens, num_blocks
        verb = Verb.TRUNCATE if num_tokens else Verb.RELEASE
        worker.controls.append((int(verb), held.cache_id, 0, num_tokens))
