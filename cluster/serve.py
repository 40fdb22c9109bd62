"""An R-worker that listens: one S-worker after another, until it is told to end."""

from __future__ import annotations

import logging

from fastdecode.cluster.frames import Conversation
from fastdecode.cluster.host import Host
from fastdecode.cluster.messages import Hello, encode_refusal
from fastdecode.cluster.path import FramePath
from fastdecode.cluster.session import TICK_SECONDS, Session
from fastdecode.cluster.zeromq import ZmqListener

log = logging.getLogger("fastdecode.r_worker")


def serve(listener: ZmqListener, host: Host) -> None:
    """Serve whoever asks first, free everything when it goes, and serve the next; does not return."""

    def on_open(hello: Hello) -> None:
        log.info("serving %s", hello.name)
        listener.busy_refusal = encode_refusal("busy", f"it serves another S-worker, {hello.name}")

    while True:
        channel = listener.accept(TICK_SECONDS)
        if channel is not None:
            Session(FramePath(Conversation(channel)), host, on_open).run()
            channel.close()
            log.info("free")
