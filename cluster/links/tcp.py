"""A link to an R-worker over TCP, and a diagnosis if no R-worker answers at its address."""

from __future__ import annotations

import math
import socket
from functools import partial

from fastdecode.api.settings import split_address
from fastdecode.cluster.links.link import SILENCE_SECONDS, Link
from fastdecode.cluster.links.zeromq import ZmqChannel
from fastdecode.cluster.links.zmq_socket import PATIENCE_SECONDS, Beats
from fastdecode.cluster.wire.handshake import Security, proven

GREETING_SECONDS = 2.0
"""Most seconds until a ZeroMQ socket's greeting arrives; libzmq sends it without the other end's Python."""


def connect(
    address: str,
    security: Security,
    silence_seconds: float = SILENCE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
    beats: bool = False,
    meeting_seconds: float = math.inf,
) -> Link:
    """Return a link to the R-worker at ``address`` ("host:port").

    Raise BackendError if the two sides do not share a key. ``patience_seconds``: time without a sign of life after
    which the R-worker drops this process. ``beats``: send separate heartbeats, which tell a stopped process from a busy
    one. ``meeting_seconds``: after this time without a handshake the R-worker counts as lost.
    """
    channel = ZmqChannel(
        address,
        security.curve_secret,
        silence_seconds=silence_seconds,
        patience_seconds=patience_seconds,
        meeting_seconds=meeting_seconds,
    )
    channel.diagnose = partial(_diagnose, address)
    link = Link(proven(channel, security, address))
    if beats:
        link.make_beats = partial(Beats, address, security.curve_secret, patience_seconds=patience_seconds)
    return link


def _diagnose(address: str) -> str:
    """Return why the listener at ``address`` is no ZeroMQ socket; "" if it is one, or if nothing listens there.

    A ZeroMQ socket sends 0xFF, eight bytes and 0x7F on every new connection (ZMTP 3.1, section 3.2).
    """
    greeting_bytes = 10
    try:
        with socket.create_connection(split_address("r_workers", address), GREETING_SECONDS) as probe:
            greeting = probe.recv(greeting_bytes, socket.MSG_WAITALL)
    except TimeoutError:
        return "the address accepts connections and sends nothing: no R-worker listens there, or its process hangs"
    except OSError:
        return ""
    if len(greeting) == greeting_bytes and (greeting[0], greeting[-1]) == (0xFF, 0x7F):
        return ""
    return "no R-worker listens there: what answers does not use FastDecode's protocol"
