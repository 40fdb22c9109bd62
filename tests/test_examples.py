"""The examples that are scripts do what they say, with the demo model.

tests/test_tour.py runs examples/tour.py.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import runpy
import signal
import socket
import socketserver
import subprocess
import threading
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import serving

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the processes that a script would end at its exit."""
    register = atexit.register
    with contextlib.ExitStack() as end:

        def at_exit(function: Callable[..., object]) -> object:
            process = getattr(function, "__self__", None)
            if not isinstance(process, subprocess.Popen):
                return register(function)
            end.callback(process.communicate)
            return end.callback(function)

        monkeypatch.setattr(atexit, "register", at_exit)
        yield


def printed_by(name: str, capfd: pytest.CaptureFixture[str]) -> str:
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        signal.alarm(0)  # The alarm is the script's own limit, and stays set if it fails.
    return capfd.readouterr().out


@pytest.mark.usefixtures("ends_with_the_test")
def test_three_r_workers_and_a_kill(capfd: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"1 R-worker lost in \d+ steps; 6 of 6 texts", printed_by("three_r_workers.py", capfd))


@pytest.mark.usefixtures("ends_with_the_test")
def test_a_spot_host_that_has_notice_one_that_vanishes_and_a_new_one(capfd: pytest.CaptureFixture[str]) -> None:
    printed = printed_by("spot_hosts.py", capfd)
    assert "1 R-worker left, 1 lost" in printed and "1 joined; 6 of 6 texts are the same" in printed


def test_shared_documents_are_computed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Three questions for each of two documents compute nearly a third of the tokens."""
    printed = printed_by("shared_documents.py", capfd)
    found = re.search(r"(\d+) tokens of prompts computed, (\d+) without", printed)
    assert found and int(found[1]) < 0.45 * int(found[2])
    assert "6 of 6 answers are the same" in printed


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@contextlib.contextmanager
def cut_off(url: str, num_bytes: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the address of a proxy of ``url`` that breaks connections, and the bytes of each connection.

    The first one breaks after ``num_bytes``. Each later one breaks after as many more, since an event holds all that is
    new.
    """
    address = urllib.parse.urlsplit(url)
    brought: list[int] = []

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            brought.append(0)
            with socket.create_connection((address.hostname, address.port)) as server:
                threading.Thread(target=forward, args=(self.request, server), daemon=True).start()
                most = num_bytes * len(brought)
                while brought[-1] < most and (data := server.recv(most - brought[-1])):
                    brought[-1] += len(data)
                    self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{door.server_address[1]}", brought
        door.shutdown()


def test_a_stream_outlives_its_connections(tmp_path: Path) -> None:
    """Each event comes once, wherever a connection breaks, and a wrong request is not repeated for ever."""
    stream = runpy.run_path(str(EXAMPLES / "reconnect.py"))["stream"]
    asked = {"prompt": "def f(x):\n", "max_tokens": 24, "temperature": 0, "stream": True, "logprobs": 1}
    with serving(tmp_path, "--journal", str(tmp_path / "journal")) as server:
        whole = list(stream(f"{server.url}/v1/completions", json.dumps(asked).encode()))
        with cut_off(server.url, 1501) as (url, brought):
            found = list(stream(f"{url}/v1/completions", json.dumps(asked).encode()))
        with pytest.raises(urllib.error.HTTPError, match="400"):
            next(stream(f"{server.url}/v1/completions", b"{}"))
    texts, tokens = zip(*(_said(events) for events in (whole, found)), strict=True)
    assert texts[0] == texts[1] and tokens[0] == tokens[1] and len(tokens[0]) == 24 and len(brought) > 1


def _said(events: list[Any]) -> tuple[str, list[str]]:
    """Return text and tokens, however they were cut."""
    choices = [event["choices"][0] for event in events]
    told = [choice["logprobs"]["tokens"] for choice in choices if choice["logprobs"]]
    return "".join(choice["text"] for choice in choices), [token for tokens in told for token in tokens]


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*.sh")], ids=lambda path: path.name)
def test_every_example_has_a_time_limit(path: Path) -> None:
    assert re.search(
        r"^ *signal\.alarm\(\d+\)$|^(exec )?timeout \w+ |^#SBATCH .*--time=", path.read_text(), re.MULTILINE
    )
