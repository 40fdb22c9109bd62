"""A sequence on its way between the queue and the store: its prompt ends, it is preempted, it begins again."""

from __future__ import annotations

from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.waiting import WaitingQueue


class Lifecycle:
    """Moves sequences between the queue and the store, so that those which follow another's prefix hear of it.

    ``num_preemptions`` counts sequences that gave up their cache for others, or for want of a place.
    """

    def __init__(self, store: Store, queue: WaitingQueue) -> None:
        self.num_preemptions = 0
        self._store, self._queue = store, queue

    def finish_prompt(self, sequence: Sequence) -> None:
        """``sequence``, whose prompt is cached, decodes from here on, and its followers may start."""
        self._store.finish_prompt(sequence)
        self._queue.release_followers(sequence)

    def begin_again(self, sequence: Sequence) -> None:
        """Queue ``sequence``, which holds nothing any more, by its age."""
        self._queue.release_followers(sequence)
        self._queue.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take the cache of ``sequence``; it will be computed again from its tokens."""
        self._store.leave(sequence, keep=True)
        sequence.was_preempted = True
        self.begin_again(sequence)
        self.num_preemptions += 1

    def victim(self, worker: int) -> Sequence:
        """The youngest on ``worker``, but none that has got no token since it was preempted, and not the oldest."""
        here = self._store.residents.on(worker)
        for sequence in reversed(here[1:]):
            stuck = sequence.was_preempted and len(sequence.output_token_ids) == sequence.outputs_at_start
            if not stuck:
                return sequence
        return here[-1]

    def end(self, sequence: Sequence, keep: bool) -> None:
        """``sequence``, which holds a cache, has ended; its full blocks are retained if ``keep``."""
        self._store.forget_unused(sequence)
        self._store.leave(sequence, keep)
        self._queue.release_followers(sequence)

    def discard(self, sequence: Sequence) -> None:
        """``sequence``, which waits, never runs."""
        self._queue.discard(sequence)
        self._queue.release_followers(sequence)
