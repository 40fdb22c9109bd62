"""The scheduler: decides what runs in each step. It uses no torch, no sockets and no clock.
Policies decide on admission, placement, chunking and preemption, and the store carries out their decisions. Four parts
react to events: members, drafts, remote prompts and transfers.
"""

from fastdecode.scheduler.drafts import DraftCounts
from fastdecode.scheduler.scheduler import Scheduler, SchedulerStatistics
from fastdecode.scheduler.schedules import SCHEDULES, Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.snapshot import Snapshot
from fastdecode.scheduler.store.holdings import Transfer

Sequence = TokenSequence
"""The name of ``TokenSequence`` in programs that build sequences; unrelated to ``collections.abc.Sequence``."""

__all__ = [
    "SCHEDULES",
    "DraftCounts",
    "Limits",
    "Prefill",
    "Schedule",
    "Scheduler",
    "SchedulerStatistics",
    "Sequence",
    "Snapshot",
    "TokenSequence",
    "Transfer",
]
