"""Sends audits to R-workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastdecode.cluster.pool.calls import Calls
from fastdecode.cluster.wire.auditing import decode_answers, encode_questions
from fastdecode.cluster.wire.frames import Kind
from fastdecode.core.auditing import AuditAnswer, AuditQuestion, answer_bytes
from fastdecode.core.errors import interrupts_deferred
from fastdecode.kinds.layout import KVLayout


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
