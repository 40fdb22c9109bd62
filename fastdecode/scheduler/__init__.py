"""Decides what runs in each step: admission, placement and chunking. Knows no torch, no sockets, no clock."""

from fastdecode.scheduler.placement import Placement
from fastdecode.scheduler.scheduler import Limits, Scheduler
from fastdecode.scheduler.sequence import Sequence

__all__ = ["Limits", "Placement", "Scheduler", "Sequence"]
