"""How many blocks and tokens a sequence takes: at its start, at its end, and elsewhere."""

from __future__ import annotations

from fastdecode.scheduler.policy.range_sizes import Size, sizes_of
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.place import Segment


class Needs:
    """Counts with the R-workers' own arithmetic. ``segment_tokens``: longer sequences have several segments."""

    def __init__(self, schedule: Schedule, limits: Limits) -> None:
        self.segment_tokens = limits.range_tokens
        self._block_size = limits.block_size
        self._reserved = limits.max_model_len if schedule.reserves_longest else 0

    @property
    def holds_all_from_start(self) -> bool:
        """True where a sequence never grows, since it begins with all blocks of the longest one."""
        return self._reserved > 0

    def at_start(self, sequence: Sequence) -> int:
        """Blocks that ``sequence`` holds from its start, its siblings' copies of a partial block included."""
        siblings = len(sequence.siblings)
        if self._reserved:
            return self._blocks_for(self._reserved) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._blocks_for(num_tokens) + siblings * (num_tokens % self._block_size > 0)

    def at_most(self, sequence: Sequence) -> int:
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more; of one
        that may have several segments only those of the first."""
        if sequence.num_tokens > self.segment_tokens:
            return 0
        most = min(sequence.max_cached, self.segment_tokens)
        return max(self.at_start(sequence), self._blocks_for(most))

    def attended(self, sequence: Sequence) -> int:
        """The most tokens that ``sequence`` and its siblings can attend in one step on one R-worker that they need."""
        return min(sequence.max_cached, self.segment_tokens) * (1 + len(sequence.siblings))

    def elsewhere(self, sequence: Sequence, moved: Segment) -> int:
        """Blocks that ``moved``, of ``sequence``, takes elsewhere, the one for the next token included."""
        if sequence.num_tokens <= self.segment_tokens:
            return self.at_start(sequence)
        return self._blocks_for(min(moved.num_tokens + 1, self.segment_tokens))

    def sizes_at_start(self, sequence: Sequence) -> list[Size]:
        """Blocks and tokens of each segment that ``sequence`` begins with, its siblings' copies of a partial block
        included."""
        *others, (blocks, tokens) = sizes_of(sequence.num_tokens, self.segment_tokens, self._block_size)
        return [*others, (blocks + len(sequence.siblings) * (tokens % self._block_size > 0), tokens)]

    def sizes_at_end(self, sequence: Sequence) -> list[Size]:
        """Blocks and tokens of each segment of ``sequence`` at its end."""
        return sizes_of(sequence.max_cached, self.segment_tokens, self._block_size)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
