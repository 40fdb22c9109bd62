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
    A thread watches the parent. Linux's parent-death signal would come when the thread that started this process ends.
    """
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = -1
    if watched < 0 or os.getppid() != parent:
        raise BackendError(f"the S-worker, process {parent}, is gone already")
    threading.Thread(target=_die_after, args=(watched,), name="parent", daemon=True).start()


def _die_after(watched: int) -> None:
    """Kill this process when its parent ends: the parent's process descriptor ``watched`` then becomes readable."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
