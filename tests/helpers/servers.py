"""``fastdecode serve`` as a process of its own, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FASTDECODE = str(Path(sys.executable).parent / "fastdecode")
MODEL = "demo"
PATIENCE_SECONDS = 60
BARE = ["--port", "0", "--device", "cpu", "--s-threads", "1"]
FLAGS = [*BARE, "--max-model-len", "256", "--kv-cache-memory", "64MiB", "--r-threads", "1"]
"""One thread each: tests share the cores with each other."""

CHAT_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class RunningServer:
    """The process and where it listens."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed body of a GET, or of a POST of ``body`` (bytes, or what is sent as JSON)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(asked, timeout=60) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())


@contextlib.contextmanager
def serving(folder: Path, *flags: str, is_bare: bool = False, **environment: str) -> Iterator[RunningServer]:
    """A server of the demo model on a free port, killed at the end; its log is in ``folder``.

    ``is_bare``: without the flags of a small cache, for ``flags`` that say which.
    """
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [FASTDECODE, "serve", *(BARE if is_bare else FLAGS), *flags],
            stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment},
        )  # fmt: skip
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r" at (https?://\S+) ", line)
        assert found, f"{line}\n{log.read_text()}"
        yield RunningServer(process, found[1], log)
    finally:
        process.kill()
        process.wait()


def metrics(server: RunningServer, headers: dict[str, str] | None = None) -> dict[str, float]:
    """All of them by name and labels."""
    status, text = server.request("/metrics", headers=headers)
    if status != 200:
        raise AssertionError(text)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def total(server: RunningServer, name: str) -> float:
    """A metric without its labels."""
    return sum(value for each, value in metrics(server).items() if each.partition("{")[0] == name)


def wait_until_idle(server: RunningServer) -> None:
    """And holds nothing."""
    names = ("num_requests_running", "num_requests_waiting", "num_api_requests", "kv_cache_usage_perc")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while held := {name: found for name in names if (found := total(server, f"fastdecode:{name}"))}:
        if time.monotonic() > deadline:
            raise AssertionError(held)
        time.sleep(0.05)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


@dataclass
class Streamed:
    """What came of a streamed completion: the status, the text, the reason for its end, and an error's message."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    num_events: int = 0


async def stream(
    server: RunningServer, body: dict[str, Any], leave_after: int | None = None, started: asyncio.Event | None = None
) -> Streamed:
    """Ask for a streamed completion, see ``read_stream``. ``started`` is set with the first event."""
    found = Streamed()

    def take(event: dict[str, Any]) -> None:
        _take(found, event)
        if started:
            started.set()

    await read_stream(server, {"stream": True, **body}, found, take, leave_after)
    return found


async def read_stream(
    server: RunningServer,
    body: dict[str, Any],
    found: Any,
    take: Callable[[dict[str, Any]], None],
    leave_after: int | None,
) -> bool:
    """POST ``body`` as a completion over a plain socket, which is closed after ``leave_after`` events: True then.

    ``take`` gets each event; ``found`` the status, and the message of a refusal as its error.
    """
    address = urllib.parse.urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    num_events = 0
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        found.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                take(json.loads(line[6:]))
                num_events += 1
                if num_events == leave_after:
                    return True
            elif line.startswith(b'{"error"'):
                found.error = json.loads(line)["error"]["message"]
    finally:
        writer.transport.abort()
    return False


def _take(found: Streamed, event: dict[str, Any]) -> None:
    found.num_events += 1
    found.error = event.get("error", {}).get("message", "")
    for choice in event.get("choices", ()):
        found.text += choice["text"]
        found.finish_reason = choice["finish_reason"]
