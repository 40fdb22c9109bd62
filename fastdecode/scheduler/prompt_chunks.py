"""How prompts share a step with the decodes."""

from __future__ import annotations

from fastdecode.scheduler.policy import Prompts
from fastdecode.scheduler.sequence import Sequence
from fastdecode.step import Chunk


class ChunkCutter:
    """Cuts prompts to what a step of ``budget`` rows has left for them."""

    def __init__(self, prompts: Prompts, budget: int) -> None:
        self.chunks: list[Chunk] = []
        self._prompts = prompts
        self._budget = budget

    def rows_for(self, num_left: int) -> int:
        """How many of a prompt's ``num_left`` tokens would go into this step."""
        if self._prompts is Prompts.UNBOUNDED:
            return num_left
        if self._prompts is not Prompts.CHUNKED and num_left > self._budget and self.chunks:
            return 0
        return max(0, min(num_left, self._budget))

    def cut(self, sequence: Sequence) -> None:
        """Put the next tokens of ``sequence``'s prompt into the step, as many as go."""
        if count := self.rows_for(sequence.num_prefill - sequence.num_cached):
            self.chunks.append(_chunk(sequence, count))
            self._budget -= count


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next ``count`` tokens of ``sequence``'s prompt."""
    last = sequence.num_cached + count == sequence.num_prefill
    return Chunk(
        sequence.sequence_id,
        sequence.worker,
        sequence.num_cached,
        sequence.tokens(sequence.num_cached, count),
        attends=not sequence.uses_scratch,
        samples=last,
        last_of_prompt=last,
        is_decode=False,
    )
