"""The pool's interface to audits of its R-workers, and audit questions to R-workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fastdecode.cluster.pool.calls import Calls
from fastdecode.cluster.pool.routed_rows import RoutedRows
from fastdecode.cluster.pool.worker import Joined
from fastdecode.cluster.wire.auditing import decode_answers, encode_questions
from fastdecode.cluster.wire.frames import Kind
from fastdecode.core.auditing import AuditAnswer, AuditQuestion, answer_bytes
from fastdecode.core.errors import interrupts_deferred
from fastdecode.core.types import MiniBatchRoutes, RWorkerInfo, StepPlan
from fastdecode.kinds.layout import KVLayout

Wait = Callable[[], list[AuditAnswer] | None]
"""A function that waits for an R-worker's answers and returns them; None if the R-worker is lost."""

Ask = Callable[[int, Sequence[AuditQuestion]], Wait]
"""A function that takes an R-worker's index, and sends the questions to that R-worker."""


class Verdict(NamedTuple):
    """An audit's finding: the index of the R-worker at fault, and why; -1 if it is unknown which of two is at fault."""

    worker: int
    reason: str


class Audit:
    """Base of audits: the pool calls its methods during every step. This class audits nothing.

    ``num_rows``: number of rows audited since the start.
    """

    num_rows = 0
    is_on = False

    def open(self, layout: KVLayout, infos: Sequence[RWorkerInfo], ask: Ask) -> None:
        """Prepare audits of the R-workers ``infos``, which have just been opened; ``ask`` sends them questions."""

    def admits(self, joined: Joined) -> bool:
        """Return whether the R-worker ``joined`` can be audited; if so, prepare its audits."""
        return True

    def begin(self, plan: StepPlan, routes: Sequence[MiniBatchRoutes]) -> None:
        """Choose the rows to audit of a step that begins."""

    def sent(self, mini_batch: int, layer: int, q: np.ndarray) -> None:
        """Note that the queries ``q`` of a mini-batch were sent: [attending rows, num_heads, query_dim]."""

    def arrived(self, mini_batch: int, rows: RoutedRows, o: np.ndarray) -> None:
        """Note that the output ``o`` of the layer of ``rows`` has arrived; after the last layer, send the questions."""

    def settle(self) -> None:
        """Wait for the answers to all questions that were sent."""

    def verdicts(self) -> list[Verdict]:
        """Compare the answers for the step's audited rows; return which R-workers are at fault where answers differ."""
        return []

    def abandon(self) -> None:
        """Drop the audit of the open step, since the pool abandons the step."""

    def close(self) -> None:
        """Free memory; may be called twice."""


def audit_by(calls: Calls, layout: KVLayout, asked: Sequence[AuditQuestion]) -> Callable[[], list[AuditAnswer]]:
    """Send the questions ``asked`` to an R-worker in another process; return a function that waits for the answers."""

    @interrupts_deferred()
    def answers() -> list[AuditAnswer]:
        calls.answer(Kind.AUDITED)
        damaged = np.empty(len(asked), np.uint8)
        found = np.empty(sum(answer_bytes(layout, each) for each in asked), np.uint8)
        with calls.losses as link:
            for part in (damaged, found):
                if part.nbytes:
                    link.read_into(part)
            return decode_answers(damaged, found, asked, layout)

    calls.send(Kind.AUDIT, *encode_questions(asked))
    return answers
