"""Processes of this project that end with the one that started them."""

from __future__ import annotations

import os
import select
import signal
import threading

from fastdecode.core.errors import BackendError


def parent_flags() -> list[str]:
    """Return flags of a process that is to call ``die_with`` this one."""
    return ["--parent", str(os.getpid())]


def die_with(parent: int) -> None:
    """Kill this process when process ``parent``, which started it, ends in whatever way. BackendError if it has ended.

    A thread watches it: Linux's own signal for this comes when the thread ends that started this process.
    """
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = -1
    if watched < 0 or os.getppid() != parent:
        raise BackendError(f"the S-worker, process {parent}, is gone already")
    threading.Thread(target=_die_after, args=(watched,), name="parent", daemon=True).start()


def _die_after(watched: int) -> None:
    """Once the descriptor of a process can be read, it has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
