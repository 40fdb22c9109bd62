"""Ports at which something will listen later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_DRAW = random.SystemRandom()


def free_port(count: int = 1) -> int:
    """Return a port at which nothing listens, nor at the ``count`` - 1 ports after it.

    The port is outside the range from which the system chooses ports. Otherwise another process of a test could take it
    before it is used.
    """
    while True:
        first = _DRAW.randrange(10_000, max(first_given() - count, 20_000))
        with contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            for port in range(first, first + count):
                listeners.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def first_given() -> int:
    """Return the first port of the range from which the system chooses."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
