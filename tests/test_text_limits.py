"""A text that is too long for a model is refused before it is tokenised."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from helpers.examples import examples
from helpers.servers import RunningServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from fastdecode.api.text import encode_text
from fastdecode.api.text_limits import TextBound, check_conversation_can_fit
from fastdecode.core.errors import RequestError
from fastdecode.server.json_bounds import MOST_NODES, MOST_VALUES, outside_strings, parse_json
from fastdecode.sworker.model.token_bytes import NFC_SHRINKS, _spellings, text_bound


def byte_level() -> Tokenizer:
    """Return a tokenizer with a token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


class Counted:
    """A tokenizer that counts the texts that it was given."""

    eos_token_id = None

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.text_bound, self.num_texts = backend, text_bound(backend), 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_texts += 1
        return self.backend.encode(text).ids

    def encode_chat(self, messages: object, max_model_len: int | None = None, /, **arguments: object) -> list[int]:
        raise NotImplementedError


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    tokenizer = Counted(byte_level())
    assert tokenizer.text_bound == TextBound(1)
    with pytest.raises(RequestError, match=r"21 bytes of text.*cannot fit"):
        encode_text("a" * 21, tokenizer, 10)
    assert tokenizer.num_texts == 0
    assert len(encode_text("a" * 10, tokenizer, 10)) == 10


def test_added_tokens_and_normalizers_count() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|separator|>"])
    assert text_bound(tokenizer) == TextBound(13)
    tokenizer.normalizer = normalizers.NFC()
    assert text_bound(tokenizer) == TextBound(13 * NFC_SHRINKS)
    tokenizer.normalizer = normalizers.Strip()
    assert text_bound(tokenizer) is None


def test_bytes_without_a_token_do_not_count() -> None:
    """Control characters have no token in some chat models, so any number of them is allowed."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ą"})
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Counted(backend)
    assert tokenizer.text_bound == TextBound(1, b"\x04")
    assert len(encode_text("a" + "\x04" * 100, tokenizer, 10)) == 1
    with pytest.raises(RequestError, match=r"11 bytes of text.*cannot fit"):
        encode_text("\x04" * 100 + "a" * 11, tokenizer, 10)
    backend.normalizer = normalizers.NFC()
    assert text_bound(backend) is None


def test_the_spelling_of_every_byte_is_known() -> None:
    """A vocabulary that lacks one character lacks that byte."""
    step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert sorted(_spellings().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for character in map(chr, [*range(0x800), 0x1000, 0xFFFF, 0x10000, 0x50000, 0xFFFFF, 0x10FFFF]):
        pieces = "".join(piece for piece, _ in step.pre_tokenize_str(character))
        assert [_spellings()[byte] for byte in character.encode()] == list(pieces)


def test_a_tokenizer_with_an_unknown_token_has_no_bound() -> None:
    tokenizer = Counted(Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    assert tokenizer.text_bound is None
    assert encode_text("a" * 1000, tokenizer, 1) == [0]


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process, without its waits for a core."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Template:
    """A template that leaves out the roles in ``drops``, and keeps the lengths of all texts that it has rendered."""

    def __init__(self, *drops: str) -> None:
        self.drops, self.lengths = drops, list[int]()

    def __call__(self, messages: list[dict[str, str]]) -> str:
        text = "".join(each["content"] for each in messages if each["role"] not in self.drops)
        self.lengths.append(len(text))
        return text


def conversation(**texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in texts.items()]


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    template = Template()
    with pytest.raises(RequestError, match=r"messages have 1001 bytes of text.*over 20 bytes cannot fit"):
        check_conversation_can_fit(conversation(system="a", user="b" * 1000), template, TextBound(2), 10)
    assert max(template.lengths) < 50
    template = Template()
    check_conversation_can_fit(conversation(user="b" * 20), template, TextBound(2), 10)
    assert template.lengths == []


@pytest.mark.parametrize(
    ("messages", "drops"),
    [
        (conversation(user="b" * 1000), ("user",)),
        (conversation(user="b", assistant="reasoning" * 100), ()),
        (conversation(user="b" + " " * 1000), ()),
    ],
    ids=["a template that drops it", "the assistant's own", "space"],
)
def test_what_a_template_may_leave_out_does_not_count(messages: list[dict[str, str]], drops: tuple[str, ...]) -> None:
    check_conversation_can_fit(messages, Template(*drops), TextBound(1), 100)


def test_a_template_that_raises_is_asked_again_for_the_conversation_itself() -> None:
    def render(messages: list[dict[str, str]]) -> str:
        raise ValueError("no such role")

    check_conversation_can_fit(conversation(user="b" * 1000), render, TextBound(1), 100)


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/completions", {"prompt": "a" * (30 << 20)}),
        ("/v1/chat/completions", {"messages": conversation(user="a" * (30 << 20))}),
    ],
    ids=["prompt", "conversation"],
)
def test_long_texts_hold_up_nobody(chat_server: RunningServer, route: str, field: dict[str, object]) -> None:
    """Three texts of 30 MiB are refused, and a short prompt beside them is answered, at little cost."""
    long, server = {**field, "max_tokens": 2}, psutil.Process(chat_server.process.pid)
    before = processor_seconds(server)
    with ThreadPoolExecutor(4) as clients:
        refused = [clients.submit(chat_server.request, route, long) for _ in range(3)]
        status, _ = chat_server.request("/v1/completions", {"prompt": "a short", "max_tokens": 2})
        answers = [each.result() for each in refused]
    assert status == 200 and processor_seconds(server) - before < 30  # Tokenising one of the texts takes longer.
    assert [each[0] for each in answers] == [400] * 3 and "cannot fit" in str(answers[0][1])


def test_a_body_of_millions_of_values_is_not_read() -> None:
    """Reading millions of values would delay every other request."""
    assert len(parse_json(b"[" + b"1," * (MOST_VALUES - 2) + b"1]")) == MOST_VALUES - 1
    assert len(parse_json(b"[" + b"{}," * (MOST_NODES - 2) + b"1]")) == MOST_NODES - 1
    for many, number, what in (
        (b"1,", MOST_VALUES, "1048576 values"),
        (b'"a",', MOST_VALUES, "1048576 values"),
        (b"[1],", MOST_NODES, "65536 lists, objects and fields"),
        (b'"a":1,', MOST_NODES + 1, "65536 lists, objects and fields"),
    ):
        with pytest.raises(RequestError, match=f"more than {what}: send several requests"):
            parse_json(b"[" + many * number + b"1]")


@pytest.mark.parametrize("text", ["a", '{"a":[1],', "\\", '"', '\\"[', "é,"])
def test_a_long_text_is_one_value_whatever_it_says(text: str) -> None:
    long = text * (MOST_VALUES + 1)
    assert parse_json(json.dumps({"prompt": long}, ensure_ascii=False).encode()) == {"prompt": long}


def test_half_of_a_character_is_named() -> None:
    """JavaScript clients that cut a text within an emoji send half of its escape."""
    for body in (
        rb'{"prompt": "\uD83D"}',
        rb'["\ud83d\ude00 \\ \ud83d b", 1]',
        rb'"\ude00 b"',
        rb'"\ud83d\ud83d\ude00"',
    ):
        with pytest.raises(RequestError, match=r"\\u[dD][0-9a-fA-F]{3} is half of a character"):
            parse_json(body)
    assert parse_json(rb'"\ud83d\ude00 \\ud83d"') == "\U0001f600 \\ud83d"
    with pytest.raises(RequestError, match="truncated"):
        parse_json(rb'["\ud83d\ude00 \\ud83d", 1')


@given(st.recursive(st.text('a\\",[{:é', max_size=9) | st.integers(0, 99), st.lists), st.integers(1, 9))
@settings(max_examples=examples(100), deadline=None)
def test_strings_are_left_out_wherever_a_piece_ends(value: Any, piece_bytes: int) -> None:
    data = json.dumps(value).encode()
    without = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)
    assert b"".join(outside_strings(data, piece_bytes)) == without
