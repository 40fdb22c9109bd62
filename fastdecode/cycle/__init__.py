"""The one loop over a scheduler's steps, in any world."""

from fastdecode.cycle.contracts import JoinedWorker, Requests, World
from fastdecode.cycle.cycle import Companion, Cycle
from fastdecode.cycle.membership import Membership

__all__ = ["Companion", "Cycle", "JoinedWorker", "Membership", "Requests", "World"]
