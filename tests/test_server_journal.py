"""Servers that keep requests go on after a kill: returning clients get each token once, and responses are stored."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers import r_workers
from helpers.forks import relayed
from helpers.processes import script
from helpers.servers import CHAT_TEMPLATE, MODEL, RunningServer, serving, wait_until_idle
from helpers.streams import Client

pytestmark = pytest.mark.slow

FORM = {"regex": "[a-z ]{90,120}"}

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 90, "temperature": 0}),
    "several": ("/v1/completions", {"prompt": ["def f(", "class A"], "max_tokens": 60, "n": 2, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2, "stream_options": {"include_usage": True}}),
    "stopped": ("/v1/chat/completions", {**CHAT, "stop": ["zzzz", "e e"], "temperature": 1.2}),
    "formed": ("/v1/chat/completions", {**CHAT, "structured_outputs": FORM}),
    "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 90}),
}
"""All requests but one are unseeded, so that tokens drawn twice would differ."""


def merged(events: list[Any]) -> Any:
    """Return all that a stream says, however it was cut: texts, log-probabilities, ends and counts."""
    if events[0].get("type"):
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        return [{**each, "response": None} for each in events[2:]], _timeless(events[-1]["response"])
    found: dict[int, list[Any]] = {}
    usage = [each["usage"] for each in events if each.get("usage")]
    for choice in (choice for each in events for choice in each["choices"]):
        text, logprobs, ends = found.setdefault(choice["index"], ["", [], []])
        told = choice.get("text", choice.get("delta", {}).get("content") or "")
        found[choice["index"]][0] = text + told
        logprobs += (choice["logprobs"] or {}).get("tokens", [])
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert all(len(ends) == 1 for _, _, ends in found.values())
    return found, usage


def _timeless(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "created_at": 0}


Start = Callable[..., contextlib.AbstractContextManager[RunningServer]]


@contextlib.contextmanager
def servers(place: str, folder: Path) -> Iterator[Start]:
    """Yield a function that starts servers one after another.

    Their journal is in ``place``: a folder, or R-workers that outlive them.
    """
    with contextlib.ExitStack() as stack:
        flags = ["--journal", str(folder / "journal")]
        if place == "r-workers":
            addresses = [stack.enter_context(r_workers.listening())[1] for _ in range(2)]
            flags = ["--journal", place, "--session", "s", "--keep-session", "60", "--r-workers", ",".join(addresses)]
            flags += ["--max-model-len", "256"]
        (folder / "template").write_text(CHAT_TEMPLATE)
        flags += ["--chat-template", str(folder / "template"), "--served-model-name", MODEL]
        yield lambda *more: serving(folder, *flags, *more, is_bare=place == "r-workers")


@pytest.mark.parametrize(
    ("place", "num_kills"),
    [
        ("folder", 1),
        pytest.param("r-workers", 2, marks=pytest.mark.thorough),  # test_standby.py covers it.
        pytest.param("folder", 5, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_server_s_clients_get_each_token_once(tmp_path: Path, place: str, num_kills: int) -> None:
    """Clients that return after ``kill -9`` have all that clients have who ask when the answer is complete.

    Some return to streams with the last event's id, and one waits for a whole answer.
    """
    with servers(place, tmp_path) as start:
        kill_and_compare(start, num_kills)
    assert place == "folder" or not (tmp_path / "journal").exists()


def kill_and_compare(start: Start, num_kills: int) -> None:
    clients = {name: Client(*asked, name) for name, asked in ASKED.items()}
    waiting = "/v1/completions", {"prompt": "x = ", "max_tokens": 150, "temperature": 1}, {"x-request-id": "waits"}
    rng = random.Random(num_kills)
    for kill in range(num_kills + 1):
        with start() as server, ThreadPoolExecutor(len(clients) + 1) as threads:
            before = sum(len(client.events) for client in clients.values())
            reading = [threads.submit(client.read, server.url) for client in clients.values()]
            whole = threads.submit(asked_once, server, *waiting)
            if kill < num_kills:
                while sum(len(client.events) for client in clients.values()) < before + rng.randrange(20, 80):
                    assert server.process.poll() is None and not all(each.done() for each in reading)
                    time.sleep(0.001)
                server.process.kill()
                assert whole.result() is None
                continue
            [each.result() for each in reading]
            again = {name: heard(server, *asked, name) for name, asked in ASKED.items()}
            assert server.request(waiting[0], {**waiting[1], "n": 2}, waiting[2])[0] == 409
    assert whole.result()["id"] == "cmpl-waits" and whole.result()["usage"]["completion_tokens"] == 150
    for name, client in clients.items():
        assert client.ended and merged(client.events) == merged(again[name]), name


def asked_once(server: RunningServer, *asked: Any) -> Any:
    """Return the answer, or None where the connection breaks."""
    try:
        return server.request(*asked)[1]
    except (OSError, http.client.HTTPException):
        return None


def heard(server: RunningServer, path: str, body: dict[str, Any], name: str) -> list[Any]:
    """Return all events of the stream of that name, from its beginning."""
    status, text = server.request(path, {"stream": True, **body}, {"x-request-id": name})
    assert status == 200, text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("place", [pytest.param("folder", marks=pytest.mark.thorough), "r-workers"])
def test_responses_are_stored_over_servers(tmp_path: Path, place: str) -> None:
    """Responses are kept that were asked for, or in the background at the kill, with later ones and their ends."""
    with servers(place, tmp_path) as start:
        store_and_ask(start)


def store_and_ask(start: Start) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 1, "max_output_tokens": 24}
    with start() as server, api_of(server) as api:
        stored = api.responses.create(input="hi", store=True, instructions="be brief", metadata={"a": "b"}, **asked)
        lost = api.responses.create(input="hi", **asked)
        assert stored.model_extra and stored.model_extra["store"] is True
        behind = api.responses.create(input="hi", background=True, **{**asked, "max_output_tokens": 150})
        assert behind.status == "queued" and behind.background and not behind.output
        with api.responses.retrieve(behind.id, stream=True) as stream:
            seen = [next(stream).to_dict() for _ in range(9)]
        server.process.kill()
    with start() as server, api_of(server) as api:
        assert api.responses.retrieve(stored.id) == stored
        events = [each.to_dict() for each in api.responses.retrieve(stored.id, stream=True)]
        rest = [each.to_dict() for each in api.responses.retrieve(stored.id, stream=True, starting_after=7)]
        assert rest == events[8:] and merged(events)[1] == _timeless(stored.to_dict())
        assert "there is no stored response" in refused(server, "GET", f"/v1/responses/{lost.id}", 404)
        seen += [each.to_dict() for each in api.responses.retrieve(behind.id, stream=True, starting_after=8)]
        whole = api.responses.retrieve(behind.id)
        assert merged(seen)[1] == _timeless(whole.to_dict()) and whole.usage and whole.usage.output_tokens == 150
        more = api.responses.create(input="go on", previous_response_id=stored.id, **{**asked, "temperature": 0})
        said = [("user", "hi"), ("assistant", stored.output_text), ("user", "go on")]
        chat = {"messages": [{"role": role, "content": text} for role, text in said], "max_tokens": 24}
        _, same = server.request("/v1/chat/completions", {**chat, "temperature": 0})
        assert more.output_text == same["choices"][0]["message"]["content"] and more.previous_response_id == stored.id
        runs = api.responses.create(input="hi", background=True, **{**asked, "max_output_tokens": 200})
        assert "has not ended" in refused(
            server, "POST", "/v1/responses", 400, {"input": "x", "previous_response_id": runs.id}
        )
        assert api.responses.cancel(runs.id).status == "cancelled" == api.responses.cancel(runs.id).status
        assert api.responses.cancel(behind.id) == whole
        assert "does not run in the background" in refused(server, "POST", f"/v1/responses/{stored.id}/cancel", 400, {})
        api.responses.delete(stored.id)
        assert "there is no stored" in refused(
            server, "POST", "/v1/responses", 400, {"input": "x", "previous_response_id": stored.id}
        )
        wait_until_idle(server)
    with start("--stored-responses", "2") as server, api_of(server) as api:
        assert api.responses.retrieve(runs.id).status == "cancelled" and api.responses.retrieve(behind.id) == whole
        api.responses.create(input="hi", store=True, **asked)
        while server.request(f"/v1/responses/{behind.id}")[0] == 200:
            time.sleep(0.01)
        for path, body, message in (
            ("/v1/chat/completions", None, "a GET resumes a stream: send Last-Event-ID"),
            ("/v1/responses", {"input": "x", "background": True, "store": False}, "background needs store: true"),
        ):
            assert message in refused(server, "POST" if body else "GET", path, 400, body)
        for place in ("12", "1,2", "x", "resp_a:1"):
            last = {"last-event-id": f"chatcmpl-gone:{place}"}
            assert server.request("/v1/chat/completions", CHAT, last)[0] == 404
        assert "X-Request-ID must be" in str(
            server.request("/v1/completions", {"prompt": "x"}, {"x-request-id": "a/b"})
        )
        assert api.responses.retrieve(runs.id).status == "cancelled"


def api_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def refused(server: RunningServer, method: str, path: str, status: int, body: Any = None) -> str:
    """Return the message of a refusal."""
    found, answer = server.request(path, body if method == "POST" else None)
    assert found == status, answer
    return str(answer["error"]["message"])


KILLED = """
import argparse, tempfile
from pathlib import Path
from chaos.killed_servers import KINDS, draw, run_round

options = argparse.Namespace(r_workers=2, journal="r-workers")
for seed in (1, 2):
    with tempfile.TemporaryDirectory() as name:
        load = draw(seed, Path(name), tuple(KINDS))
        found = run_round(load, options)
        print(found.counts, (load.folder / "log").read_text() if found.faults else "")
        assert not found.faults and found.counts["kills"] and found.counts["requests"] == 12, found
"""


@pytest.mark.thorough
def test_servers_are_killed_within_streams() -> None:
    """A standby goes on; one kill also takes one of two R-workers."""
    done = subprocess.run(relayed(script(KILLED)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
