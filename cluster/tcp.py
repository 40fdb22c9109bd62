"""R-workers on other hosts, or listening on this one: the pool over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastdecode.addresses import split_address
from fastdecode.cluster.frames import Conversation
from fastdecode.cluster.keys import read_secret
from fastdecode.cluster.lobby import Lobby
from fastdecode.cluster.path import FramePath
from fastdecode.cluster.pool import PoolBackend
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.zeromq import S_WORKER, ZmqChannel, ZmqListener
from fastdecode.errors import ConfigError


class TcpBackend(PoolBackend):
    """``AttentionBackend`` over R-workers that listen at ``addresses`` ("host:port").

    ``key_file``: the secret both sides hold, else connections are neither authenticated nor encrypted.
    """

    def __init__(self, addresses: Sequence[str], block_size: int, key_file: str | None = None) -> None:
        secret = read_secret(key_file) if key_file else None
        super().__init__([RemoteWorker(each, partial(_connect, each, secret), block_size) for each in addresses])


def make_lobby(address: str, block_size: int, key_file: str | None = None) -> Lobby:
    """A lobby at ``address`` ("host:port"), for a pool of any kind; ConfigError where that cannot be listened on."""
    secret = read_secret(key_file) if key_file else None
    host, port = split_address("pool_listen", address, least_port=0)
    try:
        listener = ZmqListener("127.0.0.1" if host == "localhost" else host, port, secret, role=S_WORKER)
    except OSError as error:
        raise ConfigError(f"pool_listen: {error.strerror}") from None
    return Lobby(listener, lambda newcomer: _connect(newcomer, secret), block_size)


def _connect(address: str, secret: bytes | None) -> FramePath:
    return FramePath(Conversation(ZmqChannel(address, secret)))
