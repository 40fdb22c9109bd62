"""The bodies of frames between an S-worker and its prefill workers, with every value checked.

Keys and values are sent as ``KV`` frames to the next prefill worker and to R-workers (``wire/messages.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fastdecode.api.settings import split_address
from fastdecode.cluster.wire.json_bodies import Text, decode_json, encode_json
from fastdecode.cluster.wire.messages import MAX_CORES, MAX_ROWS
from fastdecode.core.dtypes import KV_BITS, WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.types import ISAS, PREFILL_METHODS
from fastdecode.kinds.kind import MAX_LAYERS, Heads

MAX_PARTS = 1 << 12
"""Most prefill workers that share a prompt."""

MAX_PLACES = 1 << 12
"""Most R-workers that may store one prompt."""

MAX_PORTS = 1 << 10
"""Most KV ports of one logical R-worker, one port per rank."""

PREFILLED = struct.Struct("<qdqqq")
"""The first part of PREFILLED.

Its fields: job id, seconds of computing, bytes sent to other prefill workers, bytes sent to R-workers, bytes read from
R-workers. The tickets of R-workers that lack some rows follow. The second part is the last row's logits, or empty.
"""

TICKETS = np.dtype("<i8")

JOB = struct.Struct("<q")
"""The body of CANCEL: the job id."""

Position = Annotated[int, Meta(ge=0, le=MAX_ROWS)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The "host:port" of a port that receives keys and values, and the epoch that frames to it must carry."""

    address: Text
    epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class PlacedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The R-worker at ``places`` has tokens ``start`` to ``end`` of a prompt; it counts positions from ``start``.

    The R-worker knows these tokens as job ``ticket``. If ranks share the model, there is one place per rank.
    """

    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=MAX_PORTS)]
    start: Position
    end: Position
    ticket: Annotated[int, Meta(ge=1, lt=1 << 62)]


class PrefillHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An S-worker's request for a session. ``model`` identifies the model that both must have.

    ``kv_dtype``: dtype of the R-workers' caches. ``state_dtype``: dtype of state matrices. ``isa``: the R-workers'
    instruction set; "auto" if they differ. ``kv_heads``: by layer, how many KV heads one KV port takes. The ports of
    an R-worker have all heads in order, each equally often.
    """

    name: Text
    model: Text
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    kv_dtype: Annotated[str, Meta(pattern=f"^({'|'.join(KV_BITS)})$")]
    state_dtype: Annotated[str, Meta(pattern=f"^({'|'.join(WIRE_DTYPE)})$")]
    isa: Annotated[str, Meta(pattern=f"^({'|'.join(('auto', *ISAS))})$")]
    kv_heads: Annotated[tuple[Heads, ...], Meta(min_length=1, max_length=MAX_LAYERS)]


class PrefillWelcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill worker's description: it computes with ``num_threads`` on ``cores`` of the machine ``host_id``."""

    num_threads: Annotated[int, Meta(ge=1, le=1 << 16)]
    cores: tuple[Annotated[int, Meta(ge=0, lt=MAX_CORES)], ...]
    host_id: Text
    device: Text
    model: Text
    port_epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a prompt: part ``part`` has the tokens from position ``bounds[part]`` to ``bounds[part + 1]``.

    Tokens before ``bounds[0]`` are a prefix, held by the R-workers in ``prefix``. The R-workers in ``stores`` store the
    prompt's keys and values. ``next``: the prefill worker that gets this part's keys and values, or None. The token ids
    follow in another part of the frame.
    """

    job_id: Annotated[int, Meta(ge=1, lt=1 << 62)]
    method: Annotated[str, Meta(pattern=f"^({'|'.join(PREFILL_METHODS)})$")]
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    bounds: Annotated[tuple[Position, ...], Meta(min_length=2, max_length=MAX_PARTS + 1)]
    next: Place | None
    stores: Annotated[tuple[PlacedRows, ...], Meta(min_length=1, max_length=MAX_PLACES)]
    prefix: Annotated[tuple[PlacedRows, ...], Meta(max_length=MAX_PLACES)] = ()

    @property
    def context_len(self) -> int:
        """Number of tokens of the prefix."""
        return self.bounds[0]

    @property
    def start(self) -> int:
        """The position of the part's first token."""
        return self.bounds[self.part]

    @property
    def end(self) -> int:
        """The position after the part's last token."""
        return self.bounds[self.part + 1]

    @property
    def own_stores(self) -> list[PlacedRows]:
        """The entries of ``stores`` whose R-workers get rows of this part."""
        return [each for each in self.stores if each.start < self.end and self.start < each.end]

    @property
    def own_prefix(self) -> tuple[PlacedRows, ...]:
        """The R-workers from which this part reads the prefix. Only the first part reads it."""
        return () if self.part else self.prefix

    def depends_on(self, place: Place, numbers: Collection[int]) -> bool:
        """Return whether the part cannot be computed without ``place``.

        ``place``: a prefill worker, or an R-worker. ``numbers``: job ids or tickets of transfers to or from ``place``.
        The part depends on the next prefill worker, and on R-workers with some of the prefix.
        """
        if self.next == place and self.job_id in numbers:
            return True
        return any(place in each.places and each.ticket in numbers for each in self.own_prefix)

    @property
    def num_parts(self) -> int:
        """The number of prefill workers that share the prompt."""
        return len(self.bounds) - 1

    @property
    def is_last(self) -> bool:
        """True for the part whose last row gives the first output token."""
        return self.part == self.num_parts - 1


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason why a job was not computed."""

    job_id: Annotated[int, Meta(ge=1, lt=1 << 62)]
    reason: Text


def encode(message: msgspec.Struct) -> bytes:
    return encode_json(message)


def decode_prefill_hello(data: bytes | bytearray) -> PrefillHello:
    return decode_json("HELLO", data, PrefillHello)


def decode_prefill_welcome(data: bytes | bytearray) -> PrefillWelcome:
    return decode_json("WELCOME", data, PrefillWelcome)


def decode_failure(data: bytes | bytearray) -> Failure:
    return decode_json("FAILED", data, Failure)


def decode_prompt(data: bytes | bytearray, tokens: np.ndarray, max_model_len: int, vocab_size: int) -> Prompt:
    """Return the prompt part in ``data``. ``tokens``: int64 [rows], the part's token ids.

    Raise FrameError for ``bounds`` that do not ascend, a malformed address, or a wrong number of tokens.
    """
    prompt = decode_json("PROMPT", data, Prompt)
    bounds = np.array(prompt.bounds)
    if not (np.diff(bounds) > 0).all() or bounds[-1] > max_model_len:
        raise FrameError(f"PROMPT: bounds must ascend to {max_model_len} at most, not {list(prompt.bounds)[:8]}")
    if prompt.context_len and prompt.method != "kvr":
        raise FrameError(f"PROMPT: with a prefix the method must be kvr, not {prompt.method}")
    if prompt.part >= prompt.num_parts:
        raise FrameError(f"PROMPT: part {prompt.part}; the parts are 0 to {prompt.num_parts - 1}")
    if len(tokens) != prompt.end - prompt.start:
        raise FrameError(f"PROMPT: {len(tokens)} tokens; by its bounds the part has {prompt.end - prompt.start}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise FrameError(f"PROMPT: tokens must be 0 to {vocab_size - 1}")
    _check_places(prompt)
    return prompt


def _check_places(prompt: Prompt) -> None:
    """Raise FrameError if the ranges to read or to store have gaps, repeat a port, or name a malformed address."""
    placed = (*prompt.stores, *prompt.prefix)
    if any(each.start >= each.end for each in placed):
        raise FrameError("PROMPT: a range of tokens to store or to read is empty")
    ports = [(place.address, place.epoch, each.ticket) for each in prompt.stores for place in each.places]
    if len(set(ports)) < len(ports):
        raise FrameError("PROMPT: two ranges are stored under one ticket")
    ends = [0, *(each.end for each in prompt.prefix)]
    if [each.start for each in prompt.prefix] != ends[:-1] or ends[-1] != prompt.context_len:
        raise FrameError(f"PROMPT: the prefix of {prompt.context_len} tokens has gaps")
    reached = prompt.context_len
    for each in sorted(prompt.stores, key=lambda store: store.start):
        reached = max(reached, each.end) if each.start <= reached else reached
    if reached < prompt.bounds[-1]:
        raise FrameError(f"PROMPT: no R-worker stores token {reached}")
    for place in (*(place for each in placed for place in each.places), *((prompt.next,) if prompt.next else ())):
        _check_address(place.address)


def _check_address(address: str) -> None:
    try:
        split_address("PROMPT", address)
    except ValueError as error:
        raise FrameError(str(error)) from None
