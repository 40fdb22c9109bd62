"""Waiting without sleeping, for as long as that disturbs nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

SPIN_SECONDS = 0.01
"""Most time of one spin: longer than most layers are away, and what it costs to be woken is nothing beside more."""

DISTURBED_SECONDS = 1e-3
"""Who is off its core for so long, between two looks, shares it: its own threads of libzmq take less."""

REST_SECONDS = 1.0
"""How long one that was disturbed does not spin."""

Found = TypeVar("Found")


class Spin:
    """Looks again and again, since to wake a process that sleeps takes longer (about 0.1 ms on a virtual machine).

    It needs not be told whose cores it runs on: at every look it lets go of its core, and once somebody else was seen
    to use that, it leaves it alone for a while.
    """

    def __init__(self, most_seconds: float = SPIN_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._rests_until = 0.0

    def until(self, look: Callable[[], Found]) -> Found:
        """What ``look`` returns: anything that counts as true, or its last answer when it is time to sleep instead."""
        found = look()
        now = time.perf_counter()
        end = now + self._most_seconds
        while not found and self._rests_until < now < end:
            os.sched_yield()
            before, now = now, time.perf_counter()
            found = look()
            if not found and now - before > DISTURBED_SECONDS:
                self._rests_until = now + REST_SECONDS
        return found
