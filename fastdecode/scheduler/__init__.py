"""Decides what runs in each step: admission, placement, chunking, preemption. Knows no torch, no sockets, no clock."""

from fastdecode.scheduler.limits import Limits
from fastdecode.scheduler.migration import Move
from fastdecode.scheduler.policy import POLICIES, Policy
from fastdecode.scheduler.scheduler import Scheduler
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.statistics import SchedulerStatistics

__all__ = ["POLICIES", "Limits", "Move", "Policy", "Scheduler", "SchedulerStatistics", "Sequence"]
