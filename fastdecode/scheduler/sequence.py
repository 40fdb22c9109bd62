"""One sequence as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdecode.scheduler.places.place import Columns, Segment


@dataclass(eq=False)
class TokenSequence:
    """``max_tokens`` bounds the output; ``num_cached`` tokens of prompt + output are in R-workers' caches.

    ``sequence_id`` grows with arrival: a lower one is older. ``siblings`` share the prompt (``SamplingParams.n`` > 1):
    this sequence computes it, and they are forked from it once it is cached. ``num_prefill`` tokens have to be computed
    before it can decode: its prompt, and after a preemption also its output so far.

    ``segments``: where its tokens lie, in order, none before it starts. It appends to its ``tail``; those before are
    ``closed``: whole, and only read. Those ``ahead`` have blocks for the rest of the prompt, or were there when one
    before them was lost. While it holds a cache its progress is in ``row`` of ``table``.

    ``num_hit_tokens``: tokens of its prompt that were in the prefix cache when it began. ``outputs_at_start``: output
    tokens that it had when it last began, None before its first start. ``may_stop``: its
    output may end before ``max_tokens``. ``job_id``: under which prefill workers compute its prompt; 0: the S-worker
    does, or has. ``scored``: its prompt's logits are wanted, so that the S-worker computes all of it. ``woken_on``:
    the R-worker that read its prefix from disk for it, where it waits since; -1: none has.
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
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self.table is not None:
            self.table.last_tokens[self.row] = token_id

    @property
    def tail(self) -> Segment:
        """The segment that it appends to; it must hold a cache."""
        return self.segments[self.num_closed]

    @property
    def closed(self) -> list[Segment]:
        """The whole segments before its tail."""
        return self.segments[: self.num_closed]

    @property
    def ahead(self) -> list[Segment]:
        """The segments after its tail."""
        return self.segments[self.num_closed + 1 :]

    @property
    def num_cached(self) -> int:
        """Tokens in the cache."""
        return 0 if self.table is None else int(self.table.num_cached[self.row])

    @property
    def worker(self) -> int:
        """The home of its tail; -1: it has none."""
        return -1 if self.table is None else int(self.table.homes[self.row])

    @property
    def holders(self) -> list[int]:
        """The R-workers that have all of it; a sequence of several segments has none."""
        return self.segments[0].workers if len(self.segments) == 1 else []

    @property
    def has_several(self) -> bool:
        """True if it has more than one segment."""
        return len(self.segments) > 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached(self) -> int:
        """The most tokens this sequence can ever hold in the cache; its last output token is never cached."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def attends_in_prompt(self) -> bool:
        """True if its prompt attends on its R-workers."""
        return not (self.uses_scratch or self.job_id)

    @property
    def in_prompt(self) -> bool:
        """True while tokens remain to be computed before it can decode."""
        return self.num_cached < self.num_prefill

    def is_on(self, worker: int) -> bool:
        """Return True if R-worker ``worker`` has a copy of a segment."""
        return any(segment.on(worker) for segment in self.segments)

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` tokens of prompt + output from position ``start``."""
        return text_tokens(self.prompt_token_ids, self.output_token_ids, start, count)


def text_tokens(prompt: list[int], output: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens of ``prompt`` and ``output``, one after the other, from position ``start``."""
    if start >= len(prompt):
        return output[start - len(prompt) : start - len(prompt) + count]
    head = prompt[start : start + count]
    return head + output[: count - len(head)]
