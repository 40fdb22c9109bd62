"""A sequence of tokens with the scheduler's data about it, and rules for its size in blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastdecode.scheduler.places.place import Columns, Segment


@dataclass(eq=False)
class TokenSequence:
    """A prompt and its growing output.

    ``max_tokens`` bounds the output; ``num_cached`` tokens are in R-workers' caches.

    ``sequence_id`` grows with arrival: a lower one is older. ``siblings``: other samples of the same prompt
    (``SamplingParams.n`` > 1), which are forked from this sequence once it has computed the prompt. ``num_prefill``:
    tokens to compute before it can decode: its prompt and, after a preemption, the output tokens that it had.

    ``segments``: where its tokens are cached, in order; empty before it starts. New tokens go to the segment ``tail``.
    Segments before the tail are ``closed``: full and read-only. Segments ``ahead`` follow the tail: they have blocks
    for the rest of the prompt, or were left when an earlier segment was lost. While it has a cache, its
    progress is in ``row`` of ``table``.

    ``num_hit_tokens``: prompt tokens found in the prefix cache at its start. ``outputs_at_start``: output tokens at its
    last start, None before the first. ``may_stop``: its output may end before ``max_tokens``. ``job_id``: the prefill
    workers' job that computes its prompt; 0 if the S-worker does. ``scored``: all prompt tokens need logits, so the
    S-worker computes the whole prompt. ``woken_on``: the R-worker that has loaded its prefix from disk; -1 for none.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    siblings: tuple[TokenSequence, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    num_prefill: int = 0
    uses_scratch: bool = False
    job_id: int = 0
    woken_on: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    num_hit_tokens: int = 0
    outputs_at_start: int | None = None
    may_stop: bool = False
    was_preempted: bool = False
    scored: bool = False
    segments: list[Segment] = field(default_factory=list, repr=False)
    num_closed: int = 0
    table: Columns | None = field(default=None, repr=False)
    row: int = -1

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        if self.table is not None:
            self.table.last_tokens[self.row] = token_id

    @property
    def tail(self) -> Segment:
        """The segment to which tokens are appended. The sequence must have a cache."""
        return self.segments[self.num_closed]

    @property
    def closed(self) -> list[Segment]:
        """The full segments before the one to which tokens are appended."""
        return self.segments[: self.num_closed]

    @property
    def ahead(self) -> list[Segment]:
        """The segments after the one to which tokens are appended."""
        return self.segments[self.num_closed + 1 :]

    @property
    def num_cached(self) -> int:
        """The number of the sequence's tokens that R-workers have cached."""
        return 0 if self.table is None else int(self.table.num_cached[self.row])

    @property
    def worker(self) -> int:
        """The index of the R-worker on which tokens are appended; -1 if the sequence has no cache."""
        return -1 if self.table is None else int(self.table.homes[self.row])

    @property
    def holders(self) -> list[int]:
        """The R-workers with a copy of the whole sequence; none if it has several segments."""
        return self.segments[0].workers if len(self.segments) == 1 else []

    @property
    def has_several(self) -> bool:
        """True if the sequence has more than one segment."""
        return len(self.segments) > 1

    @property
    def begins_tail(self) -> bool:
        """True if the tail follows another segment and has no tokens yet."""
        return self.num_closed > 0 and self.tail.num_tokens == 0

    @property
    def num_tokens(self) -> int:
        """The number of prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached(self) -> int:
        """The most tokens that the sequence can ever have cached. Its last output token is never cached."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def attends_in_prompt(self) -> bool:
        """True if the prompt attends on R-workers, not on the S-worker or prefill workers."""
        return not (self.uses_scratch or self.job_id)

    @property
    def in_prompt(self) -> bool:
        """True while tokens of the prompt, or those dropped by a preemption, must be computed before decoding."""
        return self.num_cached < self.num_prefill

    def is_on(self, worker: int) -> bool:
        """Return whether R-worker ``worker`` has a copy of any segment of the sequence."""
        return any(segment.on(worker) for segment in self.segments)

    def tokens(self, start: int, count: int) -> list[int]:
        """Return ``count`` tokens of prompt and output from position ``start``."""
        return text_tokens(self.prompt_token_ids, self.output_token_ids, start, count)


def text_tokens(prompt: list[int], output: list[int], start: int, count: int) -> list[int]:
    """Return ``count`` tokens of ``prompt`` followed by ``output``, from position ``start``."""
    if start >= len(prompt):
        return output[start - len(prompt) : start - len(prompt) + count]
    head = prompt[start : start + count]
    return head + output[: count - len(head)]


@dataclass(frozen=True)
class Sizes:
    """Counts how many blocks sequences take in a cache, by the same rules as the R-workers.

    ``block_size``: tokens of a block. ``fixed``: blocks per sequence in addition to those of its tokens.
    ``worth_blocks``: blocks of tokens that would take as much memory as one sequence's states in the S-worker.
    """

    block_size: int
    fixed: int = 0
    worth_blocks: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of ``num_tokens`` tokens takes, fixed ones included."""
        return self.fixed + -(-num_tokens // self.block_size)

    def blocks_of_tokens(self, num_blocks: Any) -> Any:
        """Return how many of a sequence's ``num_blocks`` blocks hold tokens: a number, or an array of numbers."""
        return num_blocks - self.fixed

    def blocks_of_copy(self, num_tokens: int) -> int:
        """Return how many blocks a forked sequence does not share: fixed ones, and the last one if partly full."""
        return self.fixed + (num_tokens % self.block_size > 0)

    @property
    def rewinds(self) -> bool:
        """True if a sequence can be truncated after any of its tokens, since it has no recurrent state."""
        return self.fixed == 0

    @property
    def worth(self) -> int:
        """Blocks of tokens that would take as much memory as a sequence's fixed blocks and states together."""
        return self.worth_blocks or self.fixed
