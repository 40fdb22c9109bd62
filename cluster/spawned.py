"""The other end of ``spawn.py``: an R-worker whose S-worker started it, and that ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket

from fastdecode.cluster.host import Host
from fastdecode.cluster.session import Session
from fastdecode.cluster.shared import SharedPath
from fastdecode.cluster.stream import StreamChannel
from fastdecode.errors import BackendError

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when process ``parent``, which started it, ends in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise BackendError(f"the S-worker, process {parent}, is gone already")


def serve_parent(control: int, memory: int, host: Host) -> None:
    """Serve the S-worker at the other end of the socket ``control``, over ``memory``, until it goes."""
    path = SharedPath(StreamChannel(socket.socket(fileno=control)), memory, is_s_worker=False)
    try:
        Session(path, host).run()
    finally:
        path.close()
