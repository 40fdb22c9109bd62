"""Attention sources in the four routes of the server: equal whole and streamed, with messages and characters."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import MODEL, RunningServer

pytestmark = pytest.mark.slow

ASKED = {"model": MODEL, "temperature": 0, "attention_sources": 1024, "attention_source_block": 4}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo there, what is a tree?"},
]
TEXT = "<system>be brief\n<user>héllo there, what is a tree?\n<assistant>"
NUM_TOKENS = 8
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/chat/completions": {"messages": TALK, "max_completion_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/responses": {
        "instructions": "be brief", "input": TALK[1]["content"], "max_output_tokens": NUM_TOKENS, "ignore_eos": True,
    },
    "/v1/messages": {
        "system": "be brief", "messages": TALK[1:], "max_tokens": NUM_TOKENS, "ignore_eos": True,
    },
}  # fmt: skip


@pytest.fixture
def client(chat_server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=chat_server.url, timeout=PATIENCE_SECONDS)


def found_in(value: Any) -> list[Any]:
    """Return all values under ``attention_sources`` anywhere in ``value``, in order."""
    if isinstance(value, dict):
        own = value.get("attention_sources") or []
        return [*own, *(each for key, inner in value.items() if key != "attention_sources" for each in found_in(inner))]
    return [each for inner in value for each in found_in(inner)] if isinstance(value, list) else []


def streamed(client: httpx.Client, route: str, body: dict[str, Any]) -> list[Any]:
    """Return the sources in the stream's deltas; a response's last events repeat them."""
    with client.stream("POST", route, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if route == "/v1/responses":
        events = [each for each in events if each["type"] == "response.output_text.delta"]
    return found_in(events)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_tells_where_each_token_looked(route: str, client: httpx.Client) -> None:
    body = {**ASKED, **ROUTES[route]}
    with client:
        answer = client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        told = found_in(answer.json())
        assert streamed(client, route, body) == told
        plain = {name: value for name, value in body.items() if not name.startswith("attention")}
        assert found_in(client.post(route, json=plain).json()) == []
    assert len(told) == NUM_TOKENS
    num_added = 1 if route == "/v1/completions" else 0  # The token that begins a text is unknown to clients.
    num_bytes = len(TEXT.encode())
    for number, blocks in enumerate(told):
        assert abs(sum(each["weight"] for each in blocks) - 1) < 1e-5
        assert max(each["last_token"] for each in blocks) == num_added + num_bytes - 1 + number
        for each in blocks:
            check_place(each, num_bytes, num_added)


def check_place(block: dict[str, Any], num_bytes: int, num_added: int) -> None:
    """Check a block's characters; the demo model's tokens are bytes, and one letter of the text has two."""
    first, last = block["first_token"] - num_added, block["last_token"] - num_added
    if first >= num_bytes:
        assert (block["characters"], block["message"]) == (None, None)
        return
    begins = np.cumsum([0, *(byte & 0xC0 != 0x80 for byte in TEXT.encode())])
    start, end = (int(begins[min(max(place, 0), num_bytes)]) for place in (first, last + 1))
    assert block["characters"] == [start, end]
    shared = [len(range(max(start, at), min(end, at + len(each)))) for each, at in places()]
    wanted = shared.index(max(shared)) if max(shared) else None
    assert block["message"] == (None if num_added else wanted)


def places() -> list[tuple[str, int]]:
    """Return each message's text, and where it begins."""
    return [(each["content"], TEXT.index(each["content"])) for each in TALK]


def test_what_cannot_be_told_gets_400(client: httpx.Client) -> None:
    with client:
        for wrong in ({"attention_sources": 0}, {"attention_source_layers": [99]}, {"attention_source_block": 0}):
            answer = client.post("/v1/completions", json={**ASKED, "prompt": "a", **wrong})
            assert answer.status_code == 400 and next(iter(wrong)) in answer.json()["error"]["message"]
