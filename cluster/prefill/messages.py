"""The bodies of frames between an S-worker and its prefill workers, with every value checked.

Keys and values travel as ``KV`` frames from one prefill worker to the next and to R-workers (``wire/messages.py``).
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
"""Prefill workers that share one prompt."""

MAX_PLACES = 1 << 12
"""R-workers that store one prompt."""

MAX_PORTS = 1 << 10
"""Ranks whose R-workers are one."""

PREFILLED = struct.Struct("<qdqqq")
"""The first part of PREFILLED: job id, seconds that the part took, and bytes of keys and values that went to other
prefill workers and to R-workers, and came from those; then TICKETS of places that lack some of the part. The second
part is the last row's logits, or empty."""

TICKETS = np.dtype("<i8")

JOB = struct.Struct("<q")
"""The body of CANCEL."""

Position = Annotated[int, Meta(ge=0, le=MAX_ROWS)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A port, "host:port", that keys and values are sent to, and the number that shows that they are welcome."""

    address: Text
    epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class PlacedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The R-worker at ``places`` has tokens ``start`` to ``end`` of a prompt; its positions count from ``start``.

    It knows them as job ``ticket``. Of several places, the R-workers of ranks that share the model, each has its KV
    heads.
    """

    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=MAX_PORTS)]
    start: Position
    end: Position
    ticket: Annotated[int, Meta(ge=1, lt=1 << 62)]


class PrefillHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The S-worker that asks for a session; ``model`` identifies the model that both must have.

    ``kv_dtype``: what its R-workers' caches store. ``state_dtype``: of its states' matrices. ``isa``: in whose
    arithmetic they attend, "auto" where they differ. ``kv_heads``: of each layer, how many of the model's KV heads one
    KV port takes; those of an R-worker have them all in order, each head as often as there are ports for it.
    """

    name: Text
    model: Text
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    kv_dtype: Annotated[str, Meta(pattern=f"^({'|'.join(KV_BITS)})$")]
    state_dtype: Annotated[str, Meta(pattern=f"^({'|'.join(WIRE_DTYPE)})$")]
    isa: Annotated[str, Meta(pattern=f"^({'|'.join(('auto', *ISAS))})$")]
    kv_heads: Annotated[tuple[Heads, ...], Meta(min_length=1, max_length=MAX_LAYERS)]


class PrefillWelcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prefill worker is: it computes with ``num_threads`` on ``cores`` of the machine ``host_id``."""

    num_threads: Annotated[int, Meta(ge=1, le=1 << 16)]
    cores: tuple[Annotated[int, Meta(ge=0, lt=MAX_CORES)], ...]
    host_id: Text
    device: Text
    model: Text
    port_epoch: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a prompt: part ``part`` has the tokens from position ``bounds[part]`` to ``bounds[part + 1]``.

    Tokens before ``bounds[0]`` are a prefix that the R-workers of ``prefix`` have; each of ``stores`` gets its rows.
    ``next``: where its keys and values go on to, None at the end of a chain. The tokens are the frame's second part.
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
        """Tokens of the prefix."""
        return self.bounds[0]

    @property
    def start(self) -> int:
        """The part's first position."""
        return self.bounds[self.part]

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.bounds[self.part + 1]

    @property
    def own_stores(self) -> list[PlacedRows]:
        """Those of ``stores`` that get rows of the part."""
        return [each for each in self.stores if each.start < self.end and self.start < each.end]

    @property
    def own_prefix(self) -> tuple[PlacedRows, ...]:
        """Where the part gets the prefix from: the first part alone from R-workers."""
        return () if self.part else self.prefix

    def depends_on(self, place: Place, numbers: Collection[int]) -> bool:
        """Whether the part cannot be computed without ``place``, the next prefill worker or an R-worker with some of
        the prefix, which knows what goes there, or is read there, by one of ``numbers``."""
        if self.next == place and self.job_id in numbers:
            return True
        return any(place in each.places and each.ticket in numbers for each in self.own_prefix)

    @property
    def num_parts(self) -> int:
        """Prefill workers that share the prompt."""
        return len(self.bounds) - 1

    @property
    def is_last(self) -> bool:
        """True for the part whose last row gives the first output token."""
        return self.part == self.num_parts - 1


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a job was not computed."""

    job_id: Annotated[int, Meta(ge=1, lt=1 << 62)]
    reason: Text


def encode(message: msgspec.Struct) -> bytes:
    """As JSON."""
    return encode_json(message)


def decode_prefill_hello(data: bytes | bytearray) -> PrefillHello:
    """FrameError names the field that is wrong."""
    return decode_json("HELLO", data, PrefillHello)


def decode_prefill_welcome(data: bytes | bytearray) -> PrefillWelcome:
    """FrameError names the field that is wrong."""
    return decode_json("WELCOME", data, PrefillWelcome)


def decode_failure(data: bytes | bytearray) -> Failure:
    """FrameError names the field that is wrong."""
    return decode_json("FAILED", data, Failure)


def decode_prompt(data: bytes | bytearray, tokens: np.ndarray, max_model_len: int, vocab_size: int) -> Prompt:
    """``tokens``: int64 [rows]. FrameError for parts that do not ascend, an address that is none, or other tokens than
    the part's."""
    prompt = decode_json("PROMPT", data, Prompt)
    bounds = np.array(prompt.bounds)
    if not (np.diff(bounds) > 0).all() or bounds[-1] > max_model_len:
        raise FrameError(f"PROMPT: bounds must ascend to {max_model_len} at most, not {list(prompt.bounds)[:8]}")
    if prompt.context_len and prompt.method != "kvr":
        raise FrameError(f"PROMPT: after a prefix the method is kvr, not {prompt.method}")
    if prompt.part >= prompt.num_parts:
        raise FrameError(f"PROMPT: part {prompt.part} of {prompt.num_parts}")
    if len(tokens) != prompt.end - prompt.start:
        raise FrameError(f"PROMPT: {len(tokens)} tokens, and its part has {prompt.end - prompt.start}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise FrameError(f"PROMPT: tokens must be 0 to {vocab_size - 1}")
    _check_places(prompt)
    return prompt


def _check_places(prompt: Prompt) -> None:
    """Raise FrameError for a prefix or stores with gaps, a place named twice, or an address that is none."""
    placed = (*prompt.stores, *prompt.prefix)
    if any(each.start >= each.end for each in placed):
        raise FrameError("PROMPT: a range of a place is empty")
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
        raise FrameError(f"PROMPT: no place stores token {reached}")
    for place in (*(place for each in placed for place in each.places), *((prompt.next,) if prompt.next else ())):
        _check_address(place.address)


def _check_address(address: str) -> None:
    try:
        split_address("PROMPT", address)
    except ValueError as error:
        raise FrameError(str(error)) from None
