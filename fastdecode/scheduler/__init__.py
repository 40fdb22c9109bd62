"""Decides what runs in each step: admission, placement, chunking, preemption. Knows no torch, no sockets, no clock.

Policies decide, the store carries out, and four parts react to events: members, drafts, remote prompts and transfers.
"""

from fastdecode.scheduler.drafts import DraftCounts
from fastdecode.scheduler.scheduler import Scheduler, SchedulerStatistics
from fastdecode.scheduler.schedules import SCHEDULES, Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.snapshot import Snapshot
from fastdecode.scheduler.store.holdings import Transfer

Sequence = TokenSequence
"""The name under which programs make one; it is no ``collections.abc.Sequence``."""

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
