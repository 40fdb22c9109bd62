"""The loop over a scheduler's steps, for real, simulated and test environments."""

from fastdecode.cycle.contracts import JoinedWorker, Requests, RunningCycle, World
from fastdecode.cycle.cycle import Companion, Cycle
from fastdecode.cycle.membership import Membership
from fastdecode.cycle.parking import Parking

__all__ = ["Companion", "Cycle", "JoinedWorker", "Membership", "Parking", "Requests", "RunningCycle", "World"]
