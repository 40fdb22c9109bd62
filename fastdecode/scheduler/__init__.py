"""Decides what runs in each step: admission, placement, chunking, preemption. Knows no torch, no sockets, no clock."""

from fastdecode.scheduler.policy.drafts import DraftCounts
from fastdecode.scheduler.scheduler import Scheduler, SchedulerStatistics
from fastdecode.scheduler.schedules import SCHEDULES, Limits, Prefill, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.snapshot import Snapshot
from fastdecode.scheduler.store.transfers import Transfer

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
    "Transfer",
]
