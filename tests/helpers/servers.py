"""``fastdecode serve`` as a separate process, and the requests that tests send."""

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

from helpers.processes import PATIENCE_SECONDS

FASTDECODE = str(Path(sys.executable).parent / "fastdecode")
MODEL = "demo"
BARE = ["--port", "0", "--device", "cpu", "--s-threads", "1"]
FLAGS = [*BARE, "--max-model-len", "256", "--kv-cache-memory", "64MiB", "--r-threads", "1"]
"""Flags of a small server with one thread each, since tests share the cores."""

CHAT_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class RunningServer:
    """A server process and its address."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Return status and parsed body of a GET, or of a POST of ``body`` (bytes, or a value sent as JSON)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())


@contextlib.contextmanager
def serving(folder: Path, *flags: str, is_bare: bool = False, **environment: str) -> Iterator[RunningServer]:
    """Start a server of the demo model on a free port, and kill it at the end; its log is in ``folder``.

    ``is_bare``: without the flags of a small cache, if ``flags`` set it.
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
    """Return all metrics by name and labels."""
    status, text = server.request("/metrics", headers=headers)
    if status != 200:
        raise AssertionError(text)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def total(server: RunningServer, name: str) -> float:
    """Return a metric's sum over all labels."""
    return sum(value for each, value in metrics(server).items() if each.partition("{")[0] == name)


def wait_until_idle(server: RunningServer) -> None:
    """Wait until the server is idle and holds nothing."""
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
    """The outcome of a streamed completion: status, text, finish reason, and an error's message."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    num_events: int = 0


async def stream(
    server: RunningServer, body: dict[str, Any], leave_after: int | None = None, started: asyncio.Event | None = None
) -> Streamed:
    """Request a streamed completion (see ``read_stream``). ``started`` is set at the first event."""
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
    """POST ``body`` as a completion over a plain socket; return True if it was closed after ``leave_after`` events.

    ``take`` gets each event. ``found`` gets the status, and a refusal's message as its error.
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
