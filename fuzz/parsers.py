"""Fuzz targets without state: each parses one header, body, handshake message or stream of bytes."""

from __future__ import annotations

import json
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import atheris
import msgspec
import numpy as np
from mutations import Message, mutated

from fastdecode.cluster.links import shared_memory
from fastdecode.cluster.prefill import messages as prefill
from fastdecode.cluster.r_worker.host import RWorkerSize, make_rworker
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader, ChainWriter, Head
from fastdecode.cluster.wire import auditing, frames, handshake, leases, messages, parked, payload, weighing
from fastdecode.cluster.wire.frames import Kind
from fastdecode.cluster.wire.messages import Hello, Welcome
from fastdecode.core.auditing import answer_bytes, query_bytes
from fastdecode.core.errors import CapacityError, ChainError, FrameError
from fastdecode.core.parked import Chain, Parked, Progress
from fastdecode.core.types import CONTROL, SPAN, WorkerPlan, WorkerReport
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LAYOUT = KVLayout(
    (Dense(4, 2, 8, 16, 0.25), Dense(4, 4, 16, 8, 0.3, 9, 2.0, (0.5,) * 4, (0.25,) * 4)), "bfloat16", "int8"
)
HELLO = Hello("host:1", LAYOUT, 32, leases.AskedLease("s", "a", "b", 1.5, 3))
WELCOME = Welcome(100, 2, "avx2", 10.5, (0, 1), "boot", "0" * 64, lease_epoch=2, goes_on=True, kept_of="a")
PLAN = WorkerPlan(
    np.array([(0, 2, 1, 4)], CONTROL), (np.array([(1, 512, 3, 3), (1, 2, 3, 1)], SPAN), np.zeros(0, SPAN))
)
REPORT = WorkerReport(np.ones((2, 3)), np.ones((2, 3)), 0.0, 123, 45)
PLACE = prefill.Place("10.0.0.1:5580", 7)
PROMPT = prefill.Prompt(1, "kvr", 1, (0, 4, 8), PLACE, (prefill.PlacedRows((PLACE,), 0, 8, 1),))
PREFILL_WELCOME = prefill.PrefillWelcome(2, (0, 1), "boot", "", "0" * 64, 7)
KEY = bytes(32)
CHAIN = Chain.of([bytes([number]) * 16 for number in range(17)], 32)


def header(data: bytes) -> None:
    """Check that a header is refused, or has fields within the limits."""
    with suppress(FrameError):
        frame = frames.decode(data)
        _require(max(frame.lengths) <= frames.FRAME_LIMIT)


def hello(data: bytes) -> None:
    """Check that a parsed HELLO survives encoding and parsing, and that R-workers refuse it only with known errors."""
    with suppress(FrameError):
        found = messages.decode_hello(mutated(data, messages.encode_hello(HELLO), _sign))
        _require(messages.decode_hello(messages.encode_hello(found)) == found)
        with suppress(ValueError, CapacityError, MemoryError):
            make_rworker(found.layout, found.block_size, RWorkerSize(1 << 20, 1)).close()


def held(data: bytes) -> None:
    """Check that a parsed HELD body survives encoding and parsing."""
    with suppress(FrameError):
        found = leases.decode_held(data, 8, 16)
        _require(leases.decode_held(leases.encode_held(found), 8, 16) == found)


def welcome(data: bytes) -> None:
    """Check that a parsed WELCOME survives encoding and parsing."""
    with suppress(FrameError):
        found = messages.decode_welcome(mutated(data, messages.encode_welcome(WELCOME)))
        _require(messages.decode_welcome(messages.encode_welcome(found)) == found)


def refusal(data: bytes) -> None:
    """Check that a parsed refusal can be printed, and encoded again."""
    with suppress(FrameError):
        found = messages.decode_refusal(mutated(data, messages.encode_refusal("busy", "it serves another")))
        _require(messages.decode_refusal(messages.encode_refusal(*found)) == found)
        "".join(found).encode()


def join(data: bytes) -> None:
    """Check that a parsed JOIN survives encoding and parsing."""
    with suppress(FrameError):
        found = messages.decode_join(mutated(data, messages.encode_join("10.0.0.1:5580")))
        _require(messages.decode_join(messages.encode_join(*found)) == found)


def prompt(data: bytes) -> None:
    """Check that a parsed part of a prompt is within its limits, and can be encoded again."""
    tokens = np.frombuffer(data[: len(data) // 8 * 8], "<i8")[:4]
    with suppress(FrameError):
        found = prefill.decode_prompt(mutated(data, prefill.encode(PROMPT)), tokens, 100, 1000)
        _require(len(tokens) == found.end - found.start and found.bounds[-1] <= 100)
        _require(msgspec.json.decode(prefill.encode(found), type=prefill.Prompt) == found)


def prefill_answers(data: bytes) -> None:
    """Check that messages of prefill workers are parsed, or refused with FrameError."""
    with suppress(FrameError):
        prefill.decode_prefill_hello(
            mutated(
                data, prefill.encode(prefill.PrefillHello("host:1", "0" * 64, 512, "int8", "float32", "avx2", (2,)))
            )
        )
    with suppress(FrameError):
        prefill.decode_prefill_welcome(mutated(data, prefill.encode(PREFILL_WELCOME)))
    with suppress(FrameError):
        "".join(prefill.decode_failure(mutated(data, prefill.encode(prefill.Failure(1, "lost")))).reason).encode()


def plan(data: bytes) -> None:
    """Check that a parsed plan encodes to the same bytes."""
    with suppress(FrameError):
        _require(payload.encode_plan(payload.decode_plan(data)) == data)


def report(data: bytes) -> None:
    """Check that a parsed report encodes to the same bytes."""
    with suppress(FrameError):
        _require(payload.encode_report(payload.decode_report(data, 2, 3)) == data)


def weigh(data: bytes) -> None:
    """Check that a parsed question about attention encodes to the same bytes, and is within limits."""
    with suppress(FrameError):
        asked = weighing.decode_numbers(data, LAYOUT)
        sized = np.zeros(weighing.num_query_bytes(LAYOUT, asked.layers), np.uint8)
        queries = weighing.queries_of(LAYOUT, asked.layers, sized)
        _require(weighing.encode_weighing(replace(asked, queries=queries))[0] == data)
        _require(asked.num_blocks <= weighing.MOST_BLOCKS)


def audit(data: bytes) -> None:
    """Check that parsed audit questions encode to the same bytes, and that their answer fits a frame."""
    with suppress(FrameError):
        asked = auditing.decode_questions(data, LAYOUT)
        _require(auditing.encode_questions(asked)[0] == data)
        _require(sum(answer_bytes(LAYOUT, each) for each in asked) <= frames.FRAME_LIMIT)
        queries = np.zeros(sum(query_bytes(LAYOUT, each) for each in asked), np.uint8)
        _require(len(auditing.with_queries(asked, LAYOUT, queries)) == len(asked))


def parking(data: bytes) -> None:
    """Check that a parsed message about parked chains encodes to the same bytes."""
    with suppress(FrameError):
        _require(parked.encode_park(*parked.decode_park(data, 32)) == data)
    with suppress(FrameError):
        _require(parked.WAKE.pack(*parked.decode_wake(data)) == data)
    with suppress(FrameError):
        _require(parked.encode_parked(parked.decode_parked(data)) == data)
    with suppress(FrameError):
        _require(parked.encode_chains(parked.decode_chains(data, 32)) == data)
    with suppress(FrameError):
        parked.decode_parking(mutated(data, parked.encode_parking("model")))


def chain_file(data: bytes) -> None:
    """Check that a chain file is refused, or equals the file that is written from its parsed content."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, again = Path(folder) / "a.chain", Path(folder) / "b.chain"
        path.write_bytes(data)
        with suppress(ChainError), ChainReader(path) as reader:
            writer = ChainWriter(again, reader.head, reader.marks)
            for piece in reader.pieces():
                writer.append(piece)
            writer.finish()
            _require(again.read_bytes() == data)


def _chain_bytes() -> bytes:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer = ChainWriter(Path(folder) / "a.chain", Head("0" * 64, 32, CHAIN.num_blocks, 32), CHAIN.marks)
        for tokens in (512, 32):
            writer.append(np.zeros(tokens, np.uint8))
        writer.finish()
        return (Path(folder) / "a.chain").read_bytes()


def gate(data: bytes) -> None:
    """Check that no peer without the key is admitted, whatever it sends, and that few of its bytes are kept."""
    door, provider = handshake.Gate(KEY), atheris.FuzzedDataProvider(data)
    while provider.remaining_bytes():
        kind = provider.PickValueInList([*[Kind.CHALLENGE, Kind.PROOF] * 2, Kind.HELLO, Kind.BYE, 77])
        body = provider.ConsumeBytes(provider.PickValueInList([32, 32, 0, 31, 33]))
        length = provider.PickValueInList([len(body), len(body), 32, frames.FRAME_LIMIT, 1 << 63])
        head = frames.HEADER.pack(
            frames.MAGIC, frames.VERSION, kind, 0, provider.ConsumeIntInRange(0, 3), 0, 0, length, 0, 0
        )
        _require(not door.admits(Message([head, body]), provider.ConsumeBytes(1)))
    _require(len(door._pending) <= handshake.MOST_PENDING)


def stream(data: bytes) -> None:
    """Check that bytes are split into frames or end the connection, and that no part is longer than announced."""
    mine, theirs = socket.socketpair()
    with mine, theirs, suppress(ConnectionError, FrameError):
        theirs.sendall(data)
        theirs.close()
        channel = shared_memory.StreamChannel(mine)
        while (head := channel.receive(0)) is not None:
            lengths = frames.decode(head).lengths
            if head[24] % 2:  # The other frames' parts are not read: the channel must skip them.
                for length in lengths:
                    channel.read_into(bytearray(length))


def lying_stream(data: bytes) -> None:
    """Check a stream of many frames that are correct except for lengths or kinds."""
    provider, written = atheris.FuzzedDataProvider(data), b""
    while provider.remaining_bytes() and len(written) < 20_000:
        body = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 80))
        length = provider.PickValueInList([len(body), len(body), len(body), 0, 1 << 20, 1 << 40])
        fields = [
            provider.PickValueInList([provider.ConsumeIntInRange(1, 20), 7, 99]),
            5,
            provider.ConsumeIntInRange(0, 9),
        ]
        written += frames.HEADER.pack(frames.MAGIC, frames.VERSION, *fields, 0, 0, length, 0, 0) + body
    stream(written)


def _sign(value: Any) -> None:
    """Set the fingerprint of a HELLO to the one of its mutated contents, so that the check of it passes."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        cache = msgspec.json.decode(json.dumps(value["cache"]), type=messages._Cache)
        value["fingerprint"] = messages._fingerprint(cache)


def _require(holds: bool) -> None:
    if not holds:
        raise RuntimeError("a property of the target does not hold")


_ALL = (
    header,
    hello,
    welcome,
    held,
    refusal,
    join,
    prompt,
    prefill_answers,
    plan,
    report,
    weigh,
    audit,
    parking,
    chain_file,
    gate,
)
TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__.replace("_", "-"): each for each in (*_ALL, stream, lying_stream)
}
HEADER = frames.HEADER.pack(frames.MAGIC, frames.VERSION, 7, 5, 9, 1, 2, 10, 20, 30)
SEEDS: dict[str, list[bytes]] = {
    "header": [HEADER],
    "hello": [messages.encode_hello(HELLO), b"\x01" + bytes(40), b"\x01" + bytes(range(64))],
    "held": [bytes(24), np.array([0, 40, 3, 0, 1, 2, -1, 16, 1, 0], "<i8").tobytes()],
    "welcome": [messages.encode_welcome(WELCOME), b"\x01" + bytes(40), b"\x01" + bytes(range(64))],
    "refusal": [messages.encode_refusal("busy", "it serves another"), b"\x01" + bytes(40)],
    "join": [messages.encode_join("10.0.0.1:5580"), messages.encode_join("*:1"), b"\x01" + bytes(40)],
    "prompt": [bytes(32) + prefill.encode(PROMPT), b"\x01" + bytes(40), b"\x01" + bytes(range(64))],
    "prefill-answers": [prefill.encode(PREFILL_WELCOME), b"\x01" + bytes(40), b"\x01" + bytes(range(64))],
    "plan": [payload.encode_plan(PLAN), struct.pack("<QQ", 0, 0)],
    "report": [payload.encode_report(REPORT)],
    "weigh": [weighing.HEAD.pack(1, 40, 0, 41, 16, False) + np.array([0, 1], "<i8").tobytes()],
    "audit": [np.array([(1, 7, 0, 40, 41), (4, 7, 1, 0, 1), (3, 7, 0, 99, 1), (5, 7, 0, 0, 40)], "<i8").tobytes()],
    "parking": [
        parked.encode_park(2, 1, CHAIN, CHAIN.marks),
        parked.WAKE.pack(2, 1, 40, bytes(16)),
        parked.encode_parked(Parked(Progress.DONE, 40, 9, CHAIN.marks)),
        parked.encode_chains([CHAIN, CHAIN]),
        b"\x01" + bytes(40),
    ],
    "chain-file": [_chain_bytes()],
    "gate": [bytes(200), bytes(range(256))],
    "stream": [HEADER + bytes(60), HEADER + bytes(60) + HEADER],
    "lying-stream": [bytes(300), bytes(range(256))],
}
