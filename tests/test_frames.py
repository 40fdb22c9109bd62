"""The wire format: what is written is read back, and all else is refused before it is obeyed or allocated."""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.pool.remote import RemoteWorker
from fastdecode.cluster.pool.worker_info import NUM_PINGS
from fastdecode.cluster.wire import auditing, messages, payload, weighing
from fastdecode.cluster.wire.frames import FRAME_LIMIT, HEADER, MAGIC, VERSION, Conversation, Frame, Kind, decode
from fastdecode.cluster.wire.json_bodies import MAX_TEXT
from fastdecode.cluster.wire.payload import PayloadSlots, RowCounts, aligned_memory
from fastdecode.core.auditing import AuditAnswer, AuditMode, AuditQuestion, answer_bytes, query_bytes
from fastdecode.core.errors import FrameError, WorkerLostError
from fastdecode.core.types import CONTROL, SPAN, WorkerPlan, WorkerReport
from fastdecode.core.weighing import WeighedPart, Weighing
from fastdecode.kinds import Absorption, Dense, Latent
from fastdecode.kinds.layout import KVLayout

LAYOUT = KVLayout(
    (Dense(4, 2, 8, 16, 0.25), Dense(4, 4, 16, 8, 0.3, 9, 2.0, (0.5,) * 4, (0.25,) * 4)), "bfloat16", "int8"
)


class Pipe:
    """Both ends of a channel in one process; a test may change the messages between them."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def send(self, parts: list[Any]) -> None:
        self.messages.append([bytes(part) for part in parts])

    def receive(self, timeout_seconds: float) -> bytes | None:
        self.parts = list(self.messages.pop(0)) if self.messages else []
        return self.parts.pop(0) if self.parts else None

    def read_into(self, buffer: Any) -> None:
        memoryview(buffer).cast("B")[:] = self.parts.pop(0)

    def close(self) -> None: ...


def header(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "kind": int(Kind.PAYLOAD), "epoch": 5, "sequence": 9}
    fields |= {"mini_batch": 1, "layer": 2, "q": 10, "k": 20, "v": 30} | changes
    return HEADER.pack(*fields.values())


def test_a_header_is_read_as_it_was_written() -> None:
    assert HEADER.size == 56
    assert decode(header()) == Frame(Kind.PAYLOAD, 5, 9, 1, 2, (10, 20, 30))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (header()[:-1], "header has 55 bytes, not 56"),
        (b"", "header has 0 bytes"),
        (header(magic=b"HTTP"), "not FastDecode's"),
        (header(version=VERSION + 1), f"version {VERSION + 1}; this side speaks {VERSION}"),
        (header(kind=0), "unknown kind 0"),
        (header(kind=999), "unknown kind 999"),
        (header(v=FRAME_LIMIT + 1), "announces 268,435,457 bytes"),
        (header(q=2**64 - 1), "announces 18,446,744,073,709,551,615 bytes"),
    ],
)
def test_every_field_of_a_header_is_checked(bad: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode(bad)


@given(st.binary(max_size=80) | st.binary(min_size=48, max_size=48).map(lambda rest: header()[:8] + rest))
def test_any_header_is_read_or_refused(data: bytes) -> None:
    try:
        frame = decode(data)
    except FrameError:
        return
    assert max(frame.lengths) <= FRAME_LIMIT


def test_frames_are_numbered_and_belong_to_one_session() -> None:
    """Replayed, late and other sessions' frames are refused, and a number may be skipped."""
    pipe = Pipe()
    sender, receiver = Conversation(pipe), Conversation(pipe)
    sender.epoch = receiver.epoch = 7
    for _ in range(3):
        sender.send(Kind.PING)
    first, second, third = pipe.messages
    pipe.messages[:] = [first, first, third, second, third]
    assert receiver.receive(0) is not None
    with pytest.raises(FrameError, match="came before: number 0, not 1"):
        receiver.receive(0)
    assert receiver.receive(0) is not None
    for number in (1, 2):
        with pytest.raises(FrameError, match=f"came before: number {number}, not 3"):
            receiver.receive(0)
    assert receiver.receive(0) is None
    sender.next_sent = 1 << 40
    sender.send(Kind.PING)
    with pytest.raises(FrameError, match="from far ahead: number 1099511627776, not 3"):
        receiver.receive(0)
    sender.epoch = 8
    sender.send(Kind.PING)
    with pytest.raises(FrameError, match="another session"):
        receiver.receive(0)


def test_a_body_is_no_larger_than_its_kind_allows() -> None:
    pipe = Pipe()
    sender, receiver = Conversation(pipe), Conversation(pipe)
    sender.send(Kind.EXPORT, b"123456789")
    frame = receiver.receive(0)
    assert frame is not None
    with pytest.raises(FrameError, match="8 at most"):
        receiver.body(frame, 8)
    assert receiver.body(frame, 9) == b"123456789"
    with pytest.raises(FrameError, match="more than a frame may hold"):
        sender.send(Kind.DATA, np.broadcast_to(np.uint8(0), FRAME_LIMIT + 1))


def test_hello_carries_the_layout_and_its_fingerprint() -> None:
    hello = messages.Hello("host:1", LAYOUT, 32)
    assert messages.decode_hello(messages.encode_hello(hello)) == hello
    assert messages.fingerprint(LAYOUT, 32) != messages.fingerprint(LAYOUT, 16)
    layer = Dense(4, 2, 8, 16, 1, soft_cap=2, sinks=(0,) * 4, alibi_slopes=(1,) * 4)
    whole = KVLayout((layer,), "float32", "float32")
    assert messages.decode_hello(messages.encode_hello(messages.Hello("host:1", whole, 32))).layout == whole


def test_hello_carries_sizes_of_absorption_without_weights() -> None:
    layer = Latent(4, 1, 24, 16, 0.5, absorption=Absorption(8, 12))
    latent = KVLayout((layer,), "float32", "float32", weights={0: lambda: np.zeros(1)})
    (found,) = messages.decode_hello(messages.encode_hello(messages.Hello("host:1", latent, 32))).layout.layers
    assert found.row_shapes == layer.row_shapes == ((4, 16), (1, 24), (1, 0), (4, 12))
    assert messages.fingerprint(latent, 32) != messages.fingerprint(latent.absorbed, 32)
    assert found == layer


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["cache", "layers", 0, "num_heads"], 0),
        (["cache", "layers", 0, "num_heads"], 4.0),
        (["cache", "layers", 0, "num_heads"], True),
        (["cache", "layers", 0, "key_head_dim"], 513),
        (["cache", "layers", 0, "scale"], None),
        (["cache", "layers", 0, "scale"], float("inf")),
        (["cache", "layers", 0, "sinks"], ["a"]),
        (["cache", "layers", 0, "alibi_slopes"], 0.5),
        (["cache", "layers", 0, "alibi_slopes"], [0.5, None]),
        (["cache", "layers", 0, "alibi_slopes"], [float("nan")]),
        (["cache", "layers", 0, "alibi_slopes"], [1e39]),
        (["cache", "layers", 0, "alibi_slopes"], [0.0] * 5000),
        (["cache", "layers", 0, "unknown"], 1),
        (["cache", "layers", 0, "absorption"], {"nope_dim": 0, "value_dim": 8}),
        (["cache", "layers", 0], 3),
        (["cache", "layers"], []),
        (["cache", "layers"], [1] * 5000),
        (["cache", "model_dtype"], "int8"),
        (["cache", "kv_dtype"], ["float32"]),
        (["cache", "kv_port"], "everywhere"),
        (["cache", "kv_port"], "any\n"),
        (["cache", "kv_port"], None),
        (["cache", "rotation"], "hadamard"),
        (["cache", "rotation"], "identity"),
        (["cache", "layers", 0, "scale"], 10**400),
        (["cache", "layers", 0, "scale"], 1e39),
        (["cache", "layers", 0, "soft_cap"], float("nan")),
        (["cache", "layers", 0, "window"], 1 << 63),
        (["cache", "layers", 0, "num_heads"], 1 << 20),
        (["cache", "block_size"], -1),
        (["cache", "block_size"], 8),
        (["cache", "block_size"], 512),
        (["cache", "block_size"], 32.0),
        (["name"], "\ud800"),
        (["name"], "a\nrefused: b"),
        (["name"], "\x1b[2J"),
        (["name"], "x" * 5000),
        (["cache"], []),
        (["name"], 5),
        (["fingerprint"], "0" * 64),
    ],
)
def test_a_lying_hello_is_refused(path: list[Any], value: Any) -> None:
    message = json.loads(messages.encode_hello(messages.Hello("host:1", LAYOUT, 32)))
    place = message
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(FrameError):
        messages.decode_hello(json.dumps(message).encode())


def test_a_peer_that_rotates_otherwise_is_refused_by_name() -> None:
    message = json.loads(messages.encode_hello(messages.Hello("host:1", replace(LAYOUT, kv_dtype="int4"), 32)))
    message["cache"]["rotation"] = ""
    with pytest.raises(FrameError, match=r"HELLO: `rotation` is ''.*int4"):
        messages.decode_hello(json.dumps(message).encode())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 900 + "]" * 900, "HELLO: Expected `int`, got `array` - at `.*block_size`"),
        ("[" * 100_000 + "]" * 100_000, "HELLO: Expected `int`, got `array`"),
        ("9" * 5000, "HELLO: .*out of range"),
        ("32, " + '"' + "\\n" * 4000 + '": 32', "unknown field"),
        ('{"a": "' + "x" * 1_000_000 + '"}', "HELLO: Expected `int`, got `object`"),
    ],
)
def test_json_that_is_hard_to_read_or_to_show_is_refused(value: str, message: str) -> None:
    """The refusals are short, since they go to the log and back to the peer."""
    good = messages.encode_hello(messages.Hello("host:1", LAYOUT, 32)).decode()
    with pytest.raises(FrameError, match=message) as caught:
        messages.decode_hello(good.replace('"block_size":32', f'"block_size": {value}').encode())
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cores", [1 << 40]),
        ("cores", [-1]),
        ("cores", 3),
        ("num_blocks", 0),
        ("read_gb_per_s", -1),
        ("read_gb_per_s", 10**400),
        ("isa", "\x07"),
        ("fingerprint", None),
        ("kv_address", ""),
        ("kv_address", ":0"),
        ("kv_address", "host"),
        ("kv_address", "a host:5580"),
        ("kv_address", "host:70000"),
        ("kv_epoch", 0),
        ("kv_epoch", -1),
        ("kv_epoch", 1 << 63),
    ],
)
def test_a_lying_welcome_is_refused(name: str, value: Any) -> None:
    whole = messages.Welcome(8, 1, "avx2", 1.5, (0, 3), "boot", "f", ":5580", (1 << 63) - 1)
    assert messages.decode_welcome(messages.encode_welcome(whole)) == whole
    welcome = json.loads(messages.encode_welcome(whole))
    with pytest.raises(FrameError):
        messages.decode_welcome(json.dumps(welcome | {name: value}).encode())


def test_a_refusal_can_be_printed() -> None:
    """Any text of an error can be printed, however long."""
    error, message = messages.decode_refusal(messages.encode_refusal("frame", "a\n\x1b[2J\ud800é" + "x" * 9999))
    assert error == "frame" and message.startswith("a??[2J?éx") and len(message) == MAX_TEXT


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = WorkerPlan(
        np.array([(1, 2, 3, 4)] * 2, CONTROL),
        (np.array([(1, 2, 3, 1)] * 3, SPAN), np.zeros(0, SPAN), np.array([(7, 0, 1, 0)], SPAN)),
    )
    found = payload.decode_plan(bytearray(payload.encode_plan(plan)))
    assert found.controls.tobytes() == plan.controls.tobytes()
    assert [spans.tobytes() for spans in found.mini_batches] == [spans.tobytes() for spans in plan.mini_batches]
    empty = WorkerPlan(np.zeros(0, CONTROL), ())
    assert payload.decode_plan(payload.encode_plan(empty)).mini_batches == ()


@given(st.data())
def test_a_changed_plan_is_read_or_refused(data: st.DataObject) -> None:
    plan = WorkerPlan(np.array([(1, 2, 3, 4)], CONTROL), (np.array([(1, 2, 3, 1)] * 2, SPAN),))
    encoded = bytearray(payload.encode_plan(plan))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = encoded[: data.draw(st.integers(0, len(encoded)))]
    for each in (encoded, cut):
        try:
            payload.decode_plan(each)
        except FrameError:
            continue


AUDITED = [
    AuditQuestion(AuditMode.CHECK, 7, 0, 40, 41),
    AuditQuestion(AuditMode.PARTIAL, 7, 1, 40, 41),
    AuditQuestion(AuditMode.READ, 8, 0, 600, 1),
    AuditQuestion(AuditMode.ROWS, -3, 1, 0, 5),
    AuditQuestion(AuditMode.BLOCKS, 7, 0, 40, 41),
]
"""Questions of every form about both layers of LAYOUT."""


def test_questions_of_an_audit_are_read_as_they_were_written() -> None:
    sizes = [query_bytes(LAYOUT, each) for each in AUDITED]
    assert [size > 0 for size in sizes] == [False, True, True, False, False]
    memory = np.arange(sum(sizes), dtype=np.int64).astype(np.uint8)
    asked = auditing.with_queries(AUDITED, LAYOUT, memory)
    numbers, queries = auditing.encode_questions(asked)
    assert queries.tobytes() == memory.tobytes()
    found = auditing.decode_questions(numbers, LAYOUT)
    assert all(each.query is None for each in found)
    wanted = [(each.mode, each.sequence_id, each.layer, each.position, each.num_tokens) for each in AUDITED]
    assert [(each.mode, each.sequence_id, each.layer, each.position, each.num_tokens) for each in found] == wanted


def test_answers_of_an_audit_are_read_as_they_were_written() -> None:
    answers = [
        AuditAnswer(number % 2 == 1, np.full(answer_bytes(LAYOUT, each), number, np.uint8))
        for number, each in enumerate(AUDITED)
    ]
    read = auditing.decode_answers(*auditing.encode_answers(answers), AUDITED, LAYOUT)
    assert [each.is_damaged for each in read] == [False, True, False, True, False]
    assert [each.found.tobytes() for each in read] == [each.found.tobytes() for each in answers]
    read = auditing.decode_answers(*auditing.encode_answers(answers[:2]), AUDITED[:2], LAYOUT)
    assert [each.found.tobytes() for each in read] == [each.found.tobytes() for each in answers[:2]]
    with pytest.raises(FrameError, match="must be 0 or 1"):
        auditing.decode_answers(np.array([2], np.uint8), np.zeros(0, np.uint8), AUDITED[:1], LAYOUT)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([(6, 7, 0, 40, 41)], "mode 6 is unknown"),
        ([(-1, 7, 0, 40, 41)], "mode -1 is unknown"),
        ([(0, 7, 2, 40, 41)], "layer 2 does not exist"),
        ([(0, 7, -1, 40, 41)], "layer -1 does not exist"),
        ([(1, 7, 0, 41, 41)], "a row at position 41 of 41 tokens"),
        ([(1, 7, 0, -1, 41)], "position must be"),
        ([(3, 7, 0, 1 << 41, 1)], "position must be"),
        ([(4, 7, 0, 0, 0)], "num_tokens 1 to"),
        ([(4, 7, 0, 0, 1 << 39)], "its answer has"),
        ([(0, 7, 0, 0, 1)] * 257, "bytes of numbers"),
    ],
)
def test_lying_questions_of_an_audit_are_refused(asked: list[Any], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        auditing.decode_questions(np.array(asked, auditing.QUESTION).tobytes(), LAYOUT)


def weighing_of(layers: tuple[int, ...] = (0, 1)) -> Weighing:
    """Return a query of both layers of LAYOUT at position 40, whose elements all differ."""
    memory = np.arange(weighing.num_query_bytes(LAYOUT, layers), dtype=np.uint8)
    return Weighing(WeighedPart(0, 7, 40, 512, 30), 16, layers, weighing.queries_of(LAYOUT, layers, memory))


def test_a_question_about_attention_is_read_as_it_was_written() -> None:
    for norms in (None, np.ones((1, 8, 2), np.float32)):
        asked = replace(weighing_of(), norms=norms)
        numbers, queries, *told = weighing.encode_weighing(asked)
        found = weighing.decode_numbers(numbers, LAYOUT)
        assert (found.part, found.block, found.layers) == (asked.part, 16, (0, 1))
        assert queries.tobytes() == b"".join(each.tobytes() for each in asked.queries)
        assert [each.nbytes for each in told] == ([] if norms is None else [norms.nbytes])
    assert weighing.answer_shape(LAYOUT, asked) == (asked.num_blocks,) == (2,)
    assert weighing.answer_shape(LAYOUT, replace(asked, finds_norms=True)) == (1, 8, 2)


@pytest.mark.parametrize(
    ("numbers", "layers", "message"),
    [
        ((7, 40, 0, 41, 16, False), (), "bytes of numbers"),
        ((7, 40, 0, 41, 16, False), (1, 0), "layers must ascend"),
        ((7, 40, 0, 41, 16, 2), (0,), "must be 0 or 1"),
        ((7, 40, 0, 41, 16, False), (2,), "from 0 to 1"),
        ((7, -1, 0, 1, 16, False), (0,), "position and offset"),
        ((7, 40, 1 << 41, 41, 16, False), (0,), "position and offset"),
        ((7, 40, 0, 42, 16, False), (0,), "none after its own"),
        ((7, 40, 0, 0, 16, False), (0,), "at least 1 token"),
        ((7, 40, 0, 41, 0, False), (0,), "blocks have at least 1"),
        ((7, 1 << 39, 0, 1 << 39, 1, False), (0,), "blocks; 16,777,216 at most"),
    ],
)
def test_a_lying_question_about_attention_is_refused(numbers: Any, layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        weighing.decode_numbers(weighing.HEAD.pack(*numbers) + np.array(layers, "<i8").tobytes(), LAYOUT)


@pytest.mark.parametrize("weights", [[0.5, 0.6], [-0.1, 0.2], [np.inf, 0.0]])
def test_shares_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(FrameError, match="at most 1 together"):
        weighing.checked_answer(np.array(weights, np.float32), weighing_of())
    with pytest.raises(FrameError, match="a sum is negative"):
        weighing.checked_answer(np.full((1, 8, 2), -1, np.float32), replace(weighing_of(), finds_norms=True))


@given(st.binary(max_size=120))
def test_any_question_about_attention_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert weighing.decode_numbers(data, LAYOUT).num_blocks <= weighing.MOST_BLOCKS


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_every_reader(data: bytes) -> None:
    for read in (messages.decode_hello, messages.decode_welcome, messages.decode_refusal):
        with pytest.raises(FrameError):
            read(data)


def test_a_report_is_read_as_it_was_written() -> None:
    times = WorkerReport(np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 1, 0.0, 123, 45, leaving=True)
    found = payload.decode_report(payload.encode_report(times), 2, 3)
    assert (found.bytes_read, found.blocks_free, found.leaving) == (123, 45, True)
    assert found.busy_start.tolist() == times.busy_start.tolist() and found.busy_end.tolist() == times.busy_end.tolist()
    with pytest.raises(FrameError, match="120 bytes, not 88"):
        payload.decode_report(payload.encode_report(times), 1, 4)
    for bad in (
        WorkerReport(times.busy_start, times.busy_end, 0.0, -1, 45),
        WorkerReport(times.busy_start, times.busy_end, 0.0, 123, -1),
        WorkerReport(times.busy_start, times.busy_end + np.nan, 0.0, 123, 45),
        WorkerReport(times.busy_start + np.inf, times.busy_end, 0.0, 123, 45),
    ):
        with pytest.raises(FrameError, match="times that are not finite"):
            payload.decode_report(payload.encode_report(bad), 2, 3)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (Kind.PONG, bytes(7), "a PONG frame has 7 bytes, not 8"),
        (Kind.PONG, struct.pack("<d", float("nan")), "a PONG frame has the number nan"),
        (Kind.EXPORTED, struct.pack("<q", -1), "the R-worker exports -1 bytes, and its cache holds"),
        (
            Kind.EXPORTED,
            struct.pack("<q", 1 << 62),
            "the R-worker exports 4,611,686,018,427,387,904 bytes, and its cache holds",
        ),
        (Kind.REPORT, bytes(9), "REPORT: 9 bytes, not 24"),
        (Kind.REFUSED, b"nonsense", "REFUSED: JSON is malformed"),
    ],
)
def test_an_r_worker_that_answers_nonsense_is_lost(kind: Kind, body: bytes, message: str) -> None:
    """The loss names the R-worker, so that the others go on."""
    pipe, script = Pipe(), Pipe()
    pipe.send = lambda parts: None  # type: ignore[method-assign]
    answers = Conversation(script)
    known = messages.fingerprint(LAYOUT, 32)
    for _ in range(9):
        answers.send(Kind.WELCOME, messages.encode_welcome(messages.Welcome(8, 1, "avx2", 1.5, (0,), "boot", known)))
        answers.send(Kind.PONG, bytes(8))
    whole = script.messages[:1] + script.messages[1::2][:NUM_PINGS]
    pipe.messages = whole[:1] if kind is Kind.PONG else whole
    answers.send(kind, body)
    pipe.messages = [*pipe.messages, script.messages[-1]]
    worker = RemoteWorker("liar", lambda: Link(pipe), 32)
    worker.open(LAYOUT)
    with pytest.raises(WorkerLostError, match=f"R-worker liar is lost: {message}"):
        worker.opened()
        worker.begin_step(WorkerPlan(np.zeros(0, CONTROL), ()))
        if kind is Kind.EXPORTED:
            worker.export(1, 0, None)
        worker.ended()


def test_slots_do_not_overlap() -> None:
    """Every array of every mini-batch keeps what was written to it."""
    slots = PayloadSlots(LAYOUT, [RowCounts(2, 3, 2), RowCounts(0, 5, 0), RowCounts(0, 0, 0), RowCounts(7, 1, 1, 9)])
    slots.place(aligned_memory(slots.num_bytes))
    for layer in range(2):
        every = [array for mini_batch in range(4) for array in slots.views(mini_batch, layer)]
        for value, array in enumerate(every):
            assert array.ctypes.data % 64 == 0 or array.size == 0
            array[:] = value
        for value, array in enumerate(every):
            assert (array == value).all()
    assert [array.shape for array in slots.views(0, 1)] == [
        (2, 4, 16),
        (3, 4, 16),
        (3, 4, 8),
        (2, 4, 8),
        (0, 4, 10),
    ]
    assert slots.answer(0, 1) is slots.views(0, 1)[3]
    o, partials = slots.views(3, 1)[3:]
    assert slots.answer(3, 1).ctypes.data == o.ctypes.data and partials.shape == (9, 4, 10)
    assert slots.answer(3, 1).nbytes == partials.ctypes.data + partials.nbytes - o.ctypes.data
