"""R-workers on other hosts, or listening on this one: the pool over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastdecode.addresses import split_address
from fastdecode.cluster.frames import Conversation
from fastdecode.cluster.keys import Security, read_security
from fastdecode.cluster.lobby import Lobby
from fastdecode.cluster.path import FramePath
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.proof import prove
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.zeromq import S_WORKER, ZmqChannel, ZmqListener
from fastdecode.errors import ConfigError


class TcpBackend(PoolBackend):
    """``AttentionBackend`` over R-workers that listen at ``addresses`` ("host:port").

    ``key_file``: the secret both sides hold, else connections are neither authenticated nor encrypted. ``security``:
    "encrypt" (None, too) or "authenticate", after which the data is clear.
    """

    def __init__(
        self, addresses: Sequence[str], block_size: int, key_file: str | None = None, security: str | None = None
    ) -> None:
        both = read_security(key_file, security)
        super().__init__([RemoteWorker(each, partial(_connect, each, both), block_size) for each in addresses])


def make_lobby(address: str, block_size: int, key_file: str | None = None, security: str | None = None) -> Lobby:
    """A lobby at ``address`` ("host:port"), for a pool of any kind; ConfigError where that cannot be listened on.

    What is said there is encrypted wherever there is a key; ``security`` is for the R-workers that join.
    """
    both = read_security(key_file, security)
    host, port = split_address("pool_listen", address, least_port=0)
    try:
        listener = ZmqListener("127.0.0.1" if host == "localhost" else host, port, both.secret, role=S_WORKER)
    except OSError as error:
        raise ConfigError(f"pool_listen: {error.strerror}") from None
    return Lobby(listener, lambda newcomer: _connect(newcomer, both), block_size)


def _connect(address: str, security: Security) -> FramePath:
    channel = ZmqChannel(address, security.curve_secret)
    try:
        if security.proof_key is not None:
            prove(channel, security.proof_key, address)
    except BaseException:
        channel.close()
        raise
    return FramePath(Conversation(channel))
