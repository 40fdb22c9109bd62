"""Serves the S-worker that started this process."""

from __future__ import annotations

import socket

from fastdecode.cluster.links.shared_memory import SharedMemoryLink
from fastdecode.cluster.r_worker.host import Host
from fastdecode.cluster.r_worker.session import Session
from fastdecode.cluster.wire.handshake import Security


def serve_parent(control: int, memory: int, host: Host, security: Security) -> None:
    """Serve the S-worker at the other end of the socket ``control``, over ``memory``, until it leaves.

    ``security``: of the KV port.
    """
    link = SharedMemoryLink(socket.socket(fileno=control), memory, is_s_worker=False)
    try:
        Session(link, host, security=security).run()
    finally:
        link.close()
