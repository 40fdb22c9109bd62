"""The bodies of frames, to bytes and back, with every value checked."""

from __future__ import annotations

import hashlib
import json
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from fastdecode.addresses import split_address
from fastdecode.config import BLOCK_SIZES
from fastdecode.errors import ConfigError, FrameError
from fastdecode.types import CONTROL, ISAS, KV_BITS, SPAN, WIRE_DTYPE, KVLayout, LayerLayout, WorkerPlan, WorkerReport

MAX_JSON_BYTES = 1 << 22
"""As Python objects JSON may take some thirty times its bytes; this keeps it below a frame's limit."""

MAX_LAYERS = 4096
MAX_MINI_BATCHES = 1024
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 512
MAX_ROWS = 1 << 24
MAX_CORES = 1 << 12
MAX_TEXT = 4096
MAX_NUMBER = float(np.finfo(np.float32).max)
"""R-workers compute with float32."""

CHUNK_BYTES = 1 << 22
"""Bytes of a sequence in one DATA frame."""

SEQUENCE_ID = struct.Struct("<q")
"""The body of EXPORT."""

NUM_BYTES = struct.Struct("<q")
"""The body of EXPORTED."""

IMPORT = struct.Struct("<qqq")
"""The body of IMPORT: sequence id, tokens, bytes."""

CLOCK = struct.Struct("<d")
"""The body of PONG: seconds."""

_COUNTS = struct.Struct("<QQ")
_REPORT = struct.Struct("<qqQ")


@dataclass(frozen=True)
class Hello:
    """The S-worker that asks for a session, and the cache it needs."""

    name: str
    layout: KVLayout
    block_size: int


@dataclass(frozen=True)
class Welcome:
    """What an R-worker is: ``cores`` it may use on the machine ``host_id``; ``fingerprint`` of what it opened."""

    num_blocks: int
    num_threads: int
    isa: str
    read_gb_per_s: float
    cores: tuple[int, ...]
    host_id: str
    fingerprint: str


def fingerprint(layout: KVLayout, block_size: int) -> str:
    """Identifies what both sides must agree on: dtypes, every layer's shape and scoring rule, and the block size."""
    return hashlib.sha256(_canonical(_cache_json(layout, block_size))).hexdigest()


def encode_hello(hello: Hello) -> bytes:
    """As canonical JSON with its fingerprint."""
    cache = _cache_json(hello.layout, hello.block_size)
    return _canonical({"name": hello.name, "cache": cache, "fingerprint": fingerprint(hello.layout, hello.block_size)})


def decode_hello(data: bytes | bytearray) -> Hello:
    """FrameError names the field that is wrong."""
    message = _object(data, "HELLO")
    cache = message.get("cache")
    if not isinstance(cache, dict):
        raise FrameError("HELLO: cache must be an object")
    block_size = _whole(cache, "block_size", min(BLOCK_SIZES), max(BLOCK_SIZES))
    hello = Hello(_text(message, "name"), _layout(cache), block_size)
    if message.get("fingerprint") != fingerprint(hello.layout, hello.block_size):
        raise FrameError("HELLO: the fingerprint is not that of its cache")
    return hello


def encode_welcome(welcome: Welcome) -> bytes:
    """As canonical JSON."""
    return _canonical(asdict(welcome))


def decode_welcome(data: bytes | bytearray) -> Welcome:
    """FrameError names the field that is wrong."""
    message = _object(data, "WELCOME")
    cores = message.get("cores")
    if not isinstance(cores, list) or not all(type(core) is int and 0 <= core < MAX_CORES for core in cores):
        raise FrameError(f"WELCOME: cores must be core numbers below {MAX_CORES}")
    return Welcome(
        num_blocks=_whole(message, "num_blocks", 1, 1 << 31),
        num_threads=_whole(message, "num_threads", 1, 1 << 16),
        isa=_one_of(message, "isa", ISAS),
        read_gb_per_s=_number(message, "read_gb_per_s", 0),
        cores=tuple(cores),
        host_id=_text(message, "host_id"),
        fingerprint=_text(message, "fingerprint"),
    )


def encode_plan(plan: WorkerPlan) -> bytes:
    """Counts (controls, mini-batches), spans of each mini-batch, as u64, then CONTROL and SPAN records."""
    counts = np.array([len(spans) for spans in plan.mini_batches], "<u8")
    head = _COUNTS.pack(len(plan.controls), len(counts)) + counts.tobytes()
    return b"".join([head, plan.controls.tobytes(), *(spans.tobytes() for spans in plan.mini_batches)])


def decode_plan(data: bytes | bytearray) -> WorkerPlan:
    """FrameError unless the lengths agree and the rows are few enough; the rest is the R-worker's to check."""
    if len(data) < _COUNTS.size:
        raise FrameError(f"PLAN: {len(data)} bytes are too few")
    num_controls, num_mini_batches = _COUNTS.unpack_from(data)
    if num_mini_batches > MAX_MINI_BATCHES or len(data) < _COUNTS.size + 8 * num_mini_batches:
        raise FrameError(f"PLAN: {num_mini_batches} mini-batches in {len(data)} bytes")
    counts = np.frombuffer(data, "<u8", num_mini_batches, _COUNTS.size).tolist()
    start = _COUNTS.size + 8 * num_mini_batches
    wanted = start + num_controls * CONTROL.itemsize + sum(counts) * SPAN.itemsize
    if len(data) != wanted:
        raise FrameError(f"PLAN: {len(data)} bytes, and its counts take {wanted}")
    controls = np.frombuffer(data, CONTROL, num_controls, start)
    spans = np.frombuffer(data, SPAN, sum(counts), start + controls.nbytes)
    if len(spans) and not 0 <= spans["num_rows"].min() <= spans["num_rows"].max() <= MAX_ROWS:
        raise FrameError(f"PLAN: a span must have 0 to {MAX_ROWS:,} rows")
    return WorkerPlan(controls, tuple(np.split(spans, np.cumsum(counts)[:-1])) if counts else ())


def encode_report(report: WorkerReport) -> bytes:
    """Bytes read, blocks free and whether the R-worker asks to leave (1), then busy starts and ends as float64."""
    head = _REPORT.pack(report.bytes_read, report.blocks_free, report.leaving)
    return head + report.busy_start.astype("<f8").tobytes() + report.busy_end.astype("<f8").tobytes()


def decode_report(data: bytes | bytearray, num_mini_batches: int, num_layers: int) -> WorkerReport:
    """Times on the R-worker's clock; FrameError for another length, times that are not finite, or negative counts."""
    wanted = _REPORT.size + 16 * num_mini_batches * num_layers
    if len(data) != wanted:
        raise FrameError(f"REPORT: {len(data)} bytes, not {wanted}")
    bytes_read, blocks_free, leaving = _REPORT.unpack_from(data)
    if leaving > 1:
        raise FrameError(f"REPORT: leaving must be 0 or 1, not {leaving}")
    busy = np.frombuffer(data, "<f8", offset=_REPORT.size).reshape(2, num_mini_batches, num_layers)
    if min(bytes_read, blocks_free) < 0 or not np.isfinite(busy).all():
        raise FrameError(f"REPORT: {bytes_read} bytes read, {blocks_free} blocks free, or times that are not finite")
    return WorkerReport(busy[0].copy(), busy[1].copy(), 0.0, bytes_read, blocks_free, bool(leaving))


def encode_join(address: str) -> bytes:
    """``address``: "host:port" at which an R-worker listens."""
    return _canonical({"address": address})


def decode_join(data: bytes | bytearray) -> str:
    """The address; FrameError when it is none."""
    address = _text(_object(data, "JOIN"), "address")
    try:
        split_address("JOIN", address)
    except ConfigError as error:
        raise FrameError(str(error)) from None
    return address


def encode_refusal(error: str, message: str) -> bytes:
    """``error``: "capacity" (too little memory), "busy" (serving another), "key", "frame" or "refused" (any other)."""
    shown = message[:MAX_TEXT]
    if not shown.isprintable():
        shown = "".join(each if each.isprintable() else "?" for each in shown)
    return _canonical({"error": error, "message": shown})


def decode_refusal(data: bytes | bytearray) -> tuple[str, str]:
    """The error and its message."""
    refusal = _object(data, "REFUSED")
    return _text(refusal, "error"), _text(refusal, "message")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _cache_json(layout: KVLayout, block_size: int) -> dict[str, Any]:
    return {**asdict(layout), "block_size": block_size}


def _layout(cache: Mapping[str, Any]) -> KVLayout:
    layers = cache.get("layers")
    if not isinstance(layers, list) or not 1 <= len(layers) <= MAX_LAYERS:
        raise FrameError(f"HELLO: layers must be a list of 1 to {MAX_LAYERS}")
    return KVLayout(
        tuple(_layer(layer) for layer in layers),
        model_dtype=_one_of(cache, "model_dtype", tuple(WIRE_DTYPE)),
        kv_dtype=_one_of(cache, "kv_dtype", tuple(KV_BITS)),
        isa=_one_of(cache, "isa", ("auto", *ISAS)),
    )


def _layer(layer: Any) -> LayerLayout:
    if not isinstance(layer, dict) or set(layer) != {each.name for each in fields(LayerLayout)}:
        raise FrameError("HELLO: a layer must have exactly the fields of LayerLayout")
    sinks = layer["sinks"]
    if not isinstance(sinks, list) or len(sinks) > MAX_HEADS:
        raise FrameError("HELLO: sinks must be a list")
    return LayerLayout(
        num_heads=_whole(layer, "num_heads", 1, MAX_HEADS),
        num_kv_heads=_whole(layer, "num_kv_heads", 1, MAX_HEADS),
        key_head_dim=_whole(layer, "key_head_dim", 1, MAX_HEAD_DIM),
        value_head_dim=_whole(layer, "value_head_dim", 1, MAX_HEAD_DIM),
        scale=_number(layer, "scale"),
        window=_whole(layer, "window", 0, 1 << 40),
        soft_cap=_number(layer, "soft_cap"),
        sinks=tuple(_number({"sinks": sink}, "sinks") for sink in sinks),
    )


def _object(data: bytes | bytearray, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FrameError(f"{what}: must be a JSON object")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers differ in which of two equal keys they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _whole(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise FrameError(f"{name} must be a whole number of {low} to {high}, not {reprlib.repr(value)}")
    return value


def _number(message: Mapping[str, Any], name: str, low: float = -MAX_NUMBER) -> float:
    """Compared and not converted: a whole number of JSON may be larger than any float."""
    value = message.get(name)
    if type(value) not in (int, float) or not low <= value <= MAX_NUMBER:  # type: ignore[operator]
        raise FrameError(f"{name} must be a number of {low:g} to {MAX_NUMBER:g}, not {reprlib.repr(value)}")
    return value  # type: ignore[return-value]


def _one_of(message: Mapping[str, Any], name: str, choices: Sequence[str]) -> str:
    value = message.get(name)
    if value not in choices:
        raise FrameError(f"{name} is {reprlib.repr(value)}; known are {', '.join(choices)}")
    return str(value)


def _text(message: Mapping[str, Any], name: str) -> str:
    """For logs and terminals, so without line breaks, escape codes and halves of characters."""
    value = message.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise FrameError(f"{name} must be a short text that can be printed, not {reprlib.repr(value)}")
    return value
