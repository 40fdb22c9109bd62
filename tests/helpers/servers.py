"""``fastdecode serve`` as a process of its own, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FASTDECODE = str(Path(sys.executable).parent / "fastdecode")
FLAGS = ["--port", "0", "--max-model-len", "256", "--kv-cache-memory", "64MiB", "--device", "cpu"]
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
def serving(folder: Path, *flags: str, **environment: str) -> Iterator[RunningServer]:
    """A server of the demo model on a free port, killed at the end; its log is in ``folder``."""
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [FASTDECODE, "serve", *FLAGS, *flags],
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


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()
