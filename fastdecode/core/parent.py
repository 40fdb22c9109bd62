"""Child processes that end with their parent."""

from __future__ import annotations

import os
import select
import signal
import threading

from fastdecode.core.errors import BackendError


def parent_flags() -> list[str]:
    """Return the command-line flags that make a child process call ``die_with`` for this process."""
    return ["--parent", str(os.getpid())]


def die_with(parent: int) -> None:
    """Kill this process when process ``parent`` ends. Raise BackendError if ``parent`` has already ended.
    A thread waits for this. Linux's own signal would come as soon as the parent's thread that started this process
    ends.
    """
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = -1
    if watched < 0 or os.getppid() != parent:
        raise BackendError(f"the S-worker, process {parent}, has ended already")
    threading.Thread(target=_die_after, args=(watched,), name="parent", daemon=True).start()


def _die_after(watched: int) -> None:
    """Kill this process when process descriptor ``watched`` becomes readable, which says that its process has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
