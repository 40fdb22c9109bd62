"""Encodes, decodes and checks the bodies of frames, except for those of each step, which are in payload.py."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fastdecode.api.engine_fields import BLOCK_SIZES
from fastdecode.api.settings import split_address
from fastdecode.cluster.wire.json_bodies import MAX_TEXT, Text, decode_json, encode_json, printable
from fastdecode.cluster.wire.leases import AskedLease
from fastdecode.core.dtypes import KV_BITS, KV_ROTATION, WIRE_DTYPE
from fastdecode.core.errors import ConfigError, FrameError
from fastdecode.core.types import ISAS
from fastdecode.kinds import Layer
from fastdecode.kinds.kind import MAX_LAYERS, MAX_NUMBER
from fastdecode.kinds.layout import KVLayout

MAX_HELLO_BYTES = 1 << 27
"""Most bytes of a HELLO.

A HELLO has the convolution filters of a hybrid model, and for Mamba-1 a factor per element of a state.
"""

MAX_ROWS = 1 << 24
MAX_CORES = 1 << 12
MOST_IN_FLIGHT = 16
"""Most frames to a port that wait for answers, so that a port's queue never fills. It also bounds memory."""

CHUNK_BYTES = 1 << 22
"""Bytes of a sequence in one DATA frame."""

EXPORT = struct.Struct("<qqq")
"""The body of EXPORT: sequence id, first token, number of tokens (``ALL_TOKENS``: all that follow)."""

ALL_TOKENS = -1

NUM_BYTES = struct.Struct("<q")
"""The body of EXPORTED: the number of bytes that follow as DATA."""

IMPORT = struct.Struct("<qqqq")
"""The body of IMPORT: sequence id, first token, number of tokens, number of bytes."""

KV_ROWS = struct.Struct("<qqq")
"""The first part of KV, and the body of READ: job id, first token, number of rows. The layer is in the header."""

KV_STORED = struct.Struct("<qqqq")
"""The body of STORED: job id, layer, first token, number of rows."""

FIRST_HEAD = struct.Struct("<q")
"""The first part of WEIGHTS: the first head of the rows in the second part. The layer is in the header."""

CLOCK = struct.Struct("<d")
"""The body of PONG: seconds."""

R_WORKER, PREFILL_WORKER = "r-worker", "prefill-worker"
"""Kinds of workers that send JOIN."""

ANSWER = "fastdecode prefill-worker: "
"""The beginning of the line in which a started prefill worker prints its address."""


def _one_of(choices: Iterable[str]) -> Meta:
    return Meta(pattern=f"^({'|'.join(choices)})$")


class _Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``KVLayout`` within the limits of the wire, and the block size."""

    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    model_dtype: Annotated[str, _one_of(WIRE_DTYPE)]
    kv_dtype: Annotated[str, _one_of(KV_BITS)]
    isa: Annotated[str, _one_of(("auto", *ISAS))]
    kv_port: Literal["", "loopback", "any"]
    rotation: Literal["", "hadamard"]
    block_size: Annotated[int, Meta(ge=min(BLOCK_SIZES), le=max(BLOCK_SIZES))]


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Text
    cache: _Cache
    fingerprint: Text
    lease: AskedLease | None


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An R-worker's answer to HELLO.

    ``cores``: cores that the R-worker may use on the machine ``host_id``. ``fingerprint``: the opened cache's.
    ``state_blocks``: blocks of a sequence's states. ``kv_address``: "host:port" of its KV port, without the host if all
    reach it as the S-worker does; "" if it has none. ``kv_epoch``: the epoch that frames to that port must carry.
    ``park_after``: unused seconds until a prefix is parked; None without a disk. ``lease_epoch``: the named session's,
    or 0. ``goes_on``: the opened cache is that of the previous S-worker, whose lease had the fingerprint ``kept_of``.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=1 << 31)]
    num_threads: Annotated[int, Meta(ge=1, le=1 << 16)]
    isa: Annotated[str, _one_of(ISAS)]
    read_gb_per_s: Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
    cores: tuple[Annotated[int, Meta(ge=0, lt=MAX_CORES)], ...]
    host_id: Text
    fingerprint: Text
    kv_address: Text = ""
    kv_epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    state_blocks: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    park_after: Annotated[float, Meta(ge=0, le=MAX_NUMBER)] | None = None
    lease_epoch: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    goes_on: bool = False
    kept_of: Text = ""


class _Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: Text
    role: Annotated[str, _one_of((R_WORKER, PREFILL_WORKER))] = R_WORKER


class _Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: Text
    message: Text


@dataclass(frozen=True)
class Hello:
    """An S-worker's request for a session, and the cache it needs. ``lease``: set if the session is to be kept."""

    name: str
    layout: KVLayout
    block_size: int
    lease: AskedLease | None = None


def fingerprint(layout: KVLayout, block_size: int) -> str:
    """Return a hash of what both sides must agree on: dtypes, each layer's shape and scoring rule, the block size."""
    return _fingerprint(_cache(layout, block_size))


def encode_hello(hello: Hello) -> bytes:
    """Return the message as JSON with its fingerprint."""
    cache = _cache(hello.layout, hello.block_size)
    return encode_json(_Hello(hello.name, cache, _fingerprint(cache), hello.lease))


def decode_hello(data: bytes | bytearray) -> Hello:
    """Return the message in ``data``. A FrameError names the wrong field."""
    message = decode_json("HELLO", data, _Hello)
    cache = message.cache
    if cache.rotation != KV_ROTATION.get(cache.kv_dtype, ""):
        wanted = KV_ROTATION.get(cache.kv_dtype, "")
        raise FrameError(f"HELLO: `rotation` is '{cache.rotation}', not '{wanted}', for a cache of {cache.kv_dtype}")
    if message.fingerprint != _fingerprint(cache):
        raise FrameError("HELLO: the fingerprint does not match its cache")
    layout = msgspec.structs.asdict(cache)
    block_size = layout.pop("block_size")
    del layout["rotation"]  # ``KVLayout`` has no rotation, since the KV dtype determines it
    if message.lease is not None and not message.lease.session.isprintable():
        raise FrameError("HELLO: session must be a text that can be printed")
    return Hello(message.name, KVLayout(**layout), block_size, message.lease)


def encode_welcome(welcome: Welcome) -> bytes:
    return encode_json(welcome)


def decode_welcome(data: bytes | bytearray) -> Welcome:
    """Return the message in ``data``. A FrameError names the wrong field."""
    welcome = decode_json("WELCOME", data, Welcome)
    if bool(welcome.kv_address) != bool(welcome.kv_epoch):
        raise FrameError("WELCOME: kv_address and kv_epoch must both be there, or neither")
    if welcome.goes_on and not welcome.lease_epoch:
        raise FrameError("WELCOME: goes_on without lease_epoch")
    if welcome.goes_on != bool(welcome.kept_of):
        raise FrameError("WELCOME: goes_on and kept_of must both be there, or neither")
    if welcome.kv_address:
        _check_address("WELCOME", f"host{welcome.kv_address}" if welcome.kv_address[0] == ":" else welcome.kv_address)
    return welcome


def encode_join(address: str, role: str = R_WORKER) -> bytes:
    """Return a JOIN. ``address``: the "host:port" at which the worker listens; ``role``: the worker's role."""
    return encode_json(_Join(address, role))


def decode_join(data: bytes | bytearray) -> tuple[str, str]:
    """Return (address, role) of the worker that sent the JOIN ``data``. Raise FrameError if malformed."""
    join = decode_json("JOIN", data, _Join)
    _check_address("JOIN", join.address)
    return join.address, join.role


def encode_refusal(error: str, message: str) -> bytes:
    """Return a refusal.

    ``error``: "capacity" (too little memory), "busy" (serving another), "superseded" (by another S-worker of its
    session), "damaged" (its memory has changed), "key", "frame" or "refused" (any other).
    """
    return encode_json(_Refusal(error, printable(message[:MAX_TEXT])))


def decode_refusal(data: bytes | bytearray) -> tuple[str, str]:
    """Return (error, message) of the refusal in ``data``; ``error`` is as in ``encode_refusal``."""
    refusal = decode_json("REFUSED", data, _Refusal)
    return refusal.error, refusal.message


def _check_address(kind: str, address: str) -> None:
    try:
        split_address(kind, address)
    except ConfigError as error:
        raise FrameError(str(error)) from None


def _cache(layout: KVLayout, block_size: int) -> _Cache:
    rotation = KV_ROTATION.get(layout.kv_dtype, "")
    return _Cache(layout.layers, layout.model_dtype, layout.kv_dtype, layout.isa, layout.kv_port, rotation, block_size)


def _fingerprint(cache: _Cache) -> str:
    return hashlib.sha256(encode_json(cache)).hexdigest()
