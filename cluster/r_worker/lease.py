"""The lease of a named session on an R-worker: keeps the cache after the link breaks, for the next S-worker.

Each S-worker that takes the lease gets the next epoch. An S-worker with an older epoch, which may have been stopped for
a while, is told who superseded it. It can write nothing, since only frames from the served S-worker are accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.r_worker.host import begin_step, end_step
from fastdecode.cluster.r_worker.session_journal import SessionJournal
from fastdecode.cluster.wire.leases import AskedLease
from fastdecode.cluster.wire.messages import Hello
from fastdecode.core.held import HeldSequence
from fastdecode.core.types import CONTROL, Verb, WorkerPlan

log = logging.getLogger("fastdecode.r_worker")


class LeaseError(Exception):
    """Raised if an S-worker may not be served. ``kind``: as in ``encode_refusal``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Lease:
    """The lease of one R-worker, for all S-workers that it serves one after another.

    At most one cache is kept. It is closed before another cache is made, for which its memory is needed. ``epoch``: the
    served S-worker's epoch; 0 if that S-worker named no session. ``kept_of``: the fingerprint of the S-worker whose
    kept cache the served one got; "" if it got none. ``journal``: the session's journal, as S-workers wrote it.
    """

    def __init__(self) -> None:
        self.epoch, self.kept_of = 0, ""
        self.journal = SessionJournal()
        self._name, self._last_epoch, self._holder = "", 0, ""
        self._served: Hello | None = None
        self._heir_of: Hello | None = None
        self._kept: _rworker.RWorker | None = None
        self._until = 0.0

    def open(self, hello: Hello, make: Callable[[], _rworker.RWorker]) -> _rworker.RWorker:
        """Return the cache for ``hello``: the one kept for its session, or a new one from ``make``.

        Raises:
            LeaseError: another session's cache is kept, or another S-worker has continued the session.
        """
        asked = hello.lease
        self._check(asked)
        kept, self._kept = self._kept, None
        before = self._served.lease if self._served else None
        goes_on = kept is not None and asked is not None and asked.epoch == 0 and self._fits(hello)
        self.kept_of = before.fingerprint if before and goes_on else ""
        self._heir_of = self._served if goes_on else None
        if asked is None or asked.session != self._name:
            self.journal.clear()
        if kept is not None and not goes_on:
            log.warning(
                "session %s continues with another model, layout or journal: its kept caches are freed", self._name
            )
            kept.close()
        self.epoch = self._epoch_of(asked)
        if asked is not None:
            self._name, self._last_epoch, self._holder = asked.session, self.epoch, hello.name
        self._served = hello
        return kept if kept is not None and goes_on else make()

    def superseded(self, asked: AskedLease | None) -> str:
        """Return why an S-worker that asks with an older epoch must end; "" if the epoch is not older."""
        if asked is None or asked.session != self._name or not 0 < asked.epoch < self._last_epoch:
            return ""
        return f"session {self._name} was continued by {self._holder}: epoch {self._last_epoch}, not {asked.epoch}"

    def may_pass_to(self, hello: Hello, has_stopped: Callable[[], bool]) -> bool:
        """Return whether the S-worker that sent ``hello`` may replace the served one once the served one is silent.

        ``has_stopped`` tells whether the served S-worker's process has stopped. If ``hello`` says ``waits``, silence is
        not enough: the served process must have stopped.
        """
        asked = hello.lease
        if asked is None or not self.epoch or asked.session != self._name or asked.epoch:
            return False
        return not asked.waits or has_stopped()

    def leave(self, worker: _rworker.RWorker, is_broken: bool, is_untouched: bool = False) -> None:
        """Keep ``worker``, the cache, if the link ``is_broken`` and the S-worker asked for keeping; otherwise free it.

        ``is_untouched``: the S-worker got a kept cache and ran no step. The cache then still passes to an S-worker that
        follows the one before. Half-stored prompts of prefill workers are dropped, since nobody completes them.
        The journal is always kept: an S-worker that ends its session empties it.
        """
        asked = self._served.lease if self._served else None
        if self.journal.num_bytes and asked:
            self._until = time.monotonic() + asked.keep_seconds
        if not is_broken or asked is None or not asked.keep_seconds:
            worker.close()
            return
        _release(worker, worker.incoming_ids())
        if is_untouched and self._heir_of is not None:
            self._served = self._heir_of
        self._kept, self._until = worker, time.monotonic() + asked.keep_seconds
        log.info("session %s: its caches are kept for %g s", asked.session, asked.keep_seconds)

    def expire(self) -> None:
        """Free the kept cache and the journal once their time is over."""
        if self._keeps and time.monotonic() > self._until:
            log.info("session %s has not come back: its kept caches are freed", self._name)
            self.close()

    def close(self) -> None:
        """Free the journal, and the kept cache if there is one."""
        self.journal.clear()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    @property
    def goes_on(self) -> bool:
        """True if the served S-worker got the kept cache."""
        return self.kept_of != ""

    @property
    def _keeps(self) -> bool:
        """True if a cache or a journal is kept."""
        return self._kept is not None or self.journal.num_bytes > 0

    def _check(self, asked: AskedLease | None) -> None:
        if self._keeps and (asked is None or asked.session != self._name):
            left = self._until - time.monotonic()
            raise LeaseError(
                "busy", f"this R-worker keeps the caches of session {self._name}, for {left:.0f} s at most"
            )
        if reason := self.superseded(asked):
            raise LeaseError("superseded", reason)

    def _fits(self, hello: Hello) -> bool:
        """Return whether the kept cache fits: same layout, and ``hello`` follows the S-worker that left the cache."""
        before = self._served
        if before is None or before.lease is None or hello.lease is None:
            return False
        if (before.layout, before.block_size) != (hello.layout, hello.block_size):
            return False
        follows, fingerprint = hello.lease.follows, before.lease.fingerprint
        return follows != "" and (fingerprint.startswith(follows) if hello.lease.any_run else fingerprint == follows)

    def _epoch_of(self, asked: AskedLease | None) -> int:
        if asked is None:
            return 0
        before = self._last_epoch if asked.session == self._name else 0
        return max(asked.epoch, before) if asked.epoch else before + 1


def _release(worker: _rworker.RWorker, sequence_ids: Iterable[int]) -> None:
    controls = np.array([(Verb.RELEASE, each, 0, 0) for each in sequence_ids], CONTROL)
    begin_step(worker, WorkerPlan(controls, ()))
    end_step(worker)


def held_by(worker: _rworker.RWorker) -> list[HeldSequence]:
    """Return a description of each sequence in the cache of ``worker``, ordered by id."""
    return [
        HeldSequence(each, worker.sequence_length(each), tuple(worker.block_table(each)), worker.least_length(each))
        for each in worker.sequence_ids()
    ]
