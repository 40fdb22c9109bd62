"""Log-probabilities as clients read them: the likeliest tokens, and bytes that join to the text."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import RunningServer

from fastdecode.api.outputs import CompletionOutput, Logprob
from fastdecode.server.logprobs import LogprobForm, TextOffsets, chosen

pytestmark = pytest.mark.slow

TEXT = "é😀 a"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}], "structured_outputs": {"choice": [TEXT]}, "logprobs": True,
    "max_tokens": 40, "temperature": 2,
}  # fmt: skip


def events(server: RunningServer, path: str, body: Any) -> list[Any]:
    asked = urllib.request.Request(server.url + path, json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_chat_tells_the_likeliest_and_bytes(chat_server: RunningServer, num_top: int) -> None:
    """The chosen token is listed only if it is among the likeliest, whole, streamed, and in a response."""
    body = {**CHAT, "top_logprobs": num_top}
    status, answer = chat_server.request("/v1/chat/completions", body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == TEXT
    told = answer["choices"][0]["logprobs"]["content"]
    deltas = [event["choices"][0] for event in events(chat_server, "/v1/chat/completions", body)]
    assert [each for delta in deltas for each in (delta["logprobs"] or {"content": []})["content"]] == told
    asked = {"input": "x", "structured_outputs": CHAT["structured_outputs"], "top_logprobs": num_top}
    asked |= {"include": ["message.output_text.logprobs"], "max_output_tokens": 40, "temperature": 2}
    _, response = chat_server.request("/v1/responses", asked)
    for tokens in (told, response["output"][0]["content"][0]["logprobs"]):
        assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == TEXT and len(tokens) == len(TEXT.encode())
        for each in tokens:
            likeliest = [entry["logprob"] for entry in each["top_logprobs"]]
            assert len(likeliest) == num_top and likeliest == sorted(likeliest, reverse=True)
            assert not likeliest or likeliest[0] >= each["logprob"]


def test_a_completion_tells_parts_of_characters_by_their_bytes(chat_server: RunningServer) -> None:
    body = {"prompt": "x", "structured_outputs": {"choice": [TEXT]}, "logprobs": 2, "max_tokens": 40, "temperature": 0}
    _, answer = chat_server.request("/v1/completions", body)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == [
        "bytes:\\xc3",
        "bytes:\\xa9",
        *(f"bytes:\\x{each:02x}" for each in "😀".encode()),
        " ",
        "a",
    ]
    assert told["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    for token, worth, likeliest in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert likeliest[token] == worth and len(likeliest) in (2, 3)
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
    pieces = [event["choices"][0]["logprobs"] for event in events(chat_server, "/v1/completions", body)]
    assert {kind: [each for piece in pieces if piece for each in piece[kind]] for kind in told} == told


def test_tokens_that_the_text_leaves_out_have_no_bytes() -> None:
    entries = ({5: Logprob(-1.0, 1, "<|end|>")}, {6: Logprob(-1.0, 1, "é")})
    output = CompletionOutput(0, "é", (5, 6), "stop", None, entries)
    form = LogprobForm(0, lambda token_id: {5: b"<|end|>", 6: "é".encode()}[token_id], frozenset({5}))
    assert [each["bytes"] for each in form.of_chat(output)] == [[], list("é".encode())]
    assert form.of_completion(chosen(output), TextOffsets())["text_offset"] == [0, 0]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]},
            "structured_outputs and allowed_token_ids",
        ),
        ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["e"]}, "structured_outputs and bad_words"),
        ({"allowed_token_ids": [66], "bad_words": ["A", "B", "C", "D"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2}, "allowed_token_ids and min_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_limits_that_leave_no_token_are_told(
    chat_server: RunningServer, limits: Any, message: str, stream: bool
) -> None:
    """The status is 400, and a stream that has begun sends the error in an event."""
    body = {"prompt": "x", "max_tokens": 4, "stream": stream, **limits}
    status, answer = chat_server.request("/v1/completions", body)
    if status == 200 and stream:
        answer = json.loads(str(answer).split("\n\n")[-3].removeprefix("data: "))
    assert answer["error"]["code"] == 400
    assert answer["error"]["message"] == f"no token is left to choose: {message} exclude each other"
