"""A standby takes the session of a server that is killed or stopped, and only one of the two goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers
from helpers.ports import free_port
from helpers.processes import PATIENCE_SECONDS, children_of
from helpers.servers import BARE, FASTDECODE, RunningServer
from helpers.sessions import log_of
from helpers.streams import Client

from fastdecode.api.config import EngineConfig
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError


def test_what_a_standby_needs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="standby: a standby continues the session that --journal names: give one"):
        EngineConfig(stands_by=True, session="a", r_workers="localhost:1")
    assert main(["serve", "--standby", "a", "--session", "b"]) == 2
    assert "--session 'b' and --standby 'a': give one" in capsys.readouterr().err


@contextmanager
def server(folder: Path, name: str, *flags: str, rank: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """Yield a server that serves or is a standby, once its first line is there.

    ``rank``: the variables by which a launcher tells rank 0 its rank.
    """
    log = folder / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            serve(*flags), stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | (rank or {})
        )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r" at (https?://\S+)", line)
        assert found, f"{line}\n{log.read_text()}"
        yield RunningServer(process, found[1], log)
    finally:
        process.kill()
        process.wait()


def serve(*flags: str) -> list[str]:
    return [FASTDECODE, "serve", *BARE, "--max-model-len", "512", *flags]


@contextmanager
def server_of_ranks(
    folder: Path, name: str, size: int, launched: bool, *flags: str
) -> Iterator[tuple[RunningServer, list[int]]]:
    """Yield a server of ``size`` ranks, and the ranks' process ids. ``launched``: as torchrun would start the ranks."""
    flags = (*flags, "--tensor-parallel-size", str(size))
    if not launched:
        with server(folder, name, *flags) as running:
            yield running, [running.process.pid, *children_of(running.process.pid, "tensor_parallel.process")]
        return
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [shared | {"RANK": str(index), "LOCAL_RANK": str(index)} for index in range(size)]
    with (folder / f"{name}.ranks.log").open("w") as log:
        others = [subprocess.Popen(serve(*flags), stdout=log, stderr=log, env=os.environ | each) for each in ranks[1:]]
    try:
        with server(folder, name, *flags, rank=ranks[0]) as running:
            yield running, [running.process.pid, *(each.pid for each in others)]
    finally:
        for each in others:
            each.kill()
            each.wait()


def wait_for(server: RunningServer, status: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.request("/health")[0] != status:
        assert time.monotonic() < deadline and server.process.poll() is None, server.log.read_text()
        time.sleep(0.02)


def wait_until_it_asks(standby: RunningServer) -> None:
    """Wait until the standby has tried to take session s."""
    while "stands by for session s: R-worker" not in standby.log.read_text():
        assert standby.process.poll() is None, standby.log.read_text()
        time.sleep(0.05)


@contextmanager
def reading_on(client: Client, server: RunningServer) -> Iterator[Future[None]]:
    """Yield ``client``, reading in a thread within its stream: it has had 20 events."""
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(client.read, server.url)
        while len(client.events) < 20:
            assert not reading.done() and server.process.poll() is None
            time.sleep(0.005)
        yield reading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("SIGKILL", "r-workers"),
        pytest.param("SIGSTOP", "folder", marks=pytest.mark.thorough),
        pytest.param("SIGKILL", "folder", marks=pytest.mark.thorough),
        pytest.param("SIGSTOP", "r-workers", marks=pytest.mark.thorough),
    ],
)
def test_a_standby_takes_over(tmp_path: Path, way: str, place: str) -> None:
    """Within a stream a standby takes over, and the client has what it would have without the kill.

    A stopped server that wakes up ends by name. The journal is in a folder of both, or on R-workers without any folder.
    R-workers refuse nobody, and say once who is the standby.
    """
    asked: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 240, "temperature": 1, "seed": 3, "logprobs": 1}
    with ExitStack() as stack:
        started = [stack.enter_context(r_workers.listening()) for _ in range(2)]
        addresses = ",".join(address for _, address in started)
        journal = "r-workers" if place == "r-workers" else str(tmp_path / "journal")
        common = ("--r-workers", addresses, "--keep-session", "60", "--journal", journal)
        first = stack.enter_context(server(tmp_path, "first", *common, "--session", "s"))
        second = stack.enter_context(server(tmp_path, "second", *common, "--standby", "s"))
        wait_until_it_asks(second)
        status, answer = second.request("/v1/completions", asked)
        assert status == 503 and "stands by for session s" in answer["error"]["message"]
        assert second.request("/health")[0] == 503 and first.request("/health")[0] == 200
        client = Client("/v1/completions", asked, "a")
        reading = stack.enter_context(reading_on(client, first))
        first.process.send_signal(getattr(signal, way))
        start = time.monotonic()
        wait_for(second, 200)
        print(f"took over {time.monotonic() - start:.2f} s after {way}")
        if way == "SIGSTOP":
            first.process.send_signal(signal.SIGCONT)
            assert first.process.wait(PATIENCE_SECONDS) == 1
            assert re.search(r"session (s was continued by|continues with)", first.log.read_text()), (
                first.log.read_text()
            )
        reading.result()
        assert not client.ended
        client.read(second.url)
        _, whole = second.request("/v1/completions", asked)
        log = log_of(started[0][0])
    assert client.ended
    assert log.count("stands by for session s") == 1 and (way == "SIGSTOP" or "refused" not in log), log
    choices = [choice for event in client.events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ranks", "launched"),
    [
        ("SIGSTOP", (2, 2), True),
        pytest.param("SIGSTOP", (2, 2), False, marks=pytest.mark.thorough),
        pytest.param("SIGKILL", (2, 2), False, marks=pytest.mark.thorough),
        pytest.param("SIGKILL", (2, 1), False, marks=pytest.mark.thorough),
        pytest.param("SIGKILL", (1, 2), False, marks=pytest.mark.thorough),
        pytest.param("SIGSTOP", (2, 1), False, marks=pytest.mark.thorough),
    ],
)
def test_a_standby_of_ranks_takes_over(tmp_path: Path, way: str, ranks: tuple[int, int], launched: bool) -> None:
    """All ranks of a server are killed or stopped at once, and a standby takes over.

    Where both have as many ranks, R-workers' sequences are kept. No stopped rank goes on. ``launched``: as torchrun
    would start the ranks; otherwise rank 0 starts the others.
    """
    asked: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with ExitStack() as stack:
        addresses = ",".join(stack.enter_context(r_workers.listening())[1] for _ in range(2))
        common = ("--r-workers", addresses, "--keep-session", "60", "--journal", str(tmp_path / "journal"))
        common = (*common, "--dtype", "float32")
        first, group = stack.enter_context(
            server_of_ranks(tmp_path, "first", ranks[0], launched, *common, "--session", "s")
        )
        second, _ = stack.enter_context(
            server_of_ranks(tmp_path, "second", ranks[1], launched, *common, "--standby", "s")
        )
        assert len(group) == ranks[0]
        wait_until_it_asks(second)
        client = Client("/v1/completions", asked, "a")
        reading = stack.enter_context(reading_on(client, first))
        for pid in group:
            os.kill(pid, getattr(signal, way))
        start = time.monotonic()
        wait_for(second, 200)
        print(f"took over {time.monotonic() - start:.2f} s after {way}")
        if way == "SIGSTOP":
            for pid in group:
                os.kill(pid, signal.SIGCONT)
            assert first.process.wait(PATIENCE_SECONDS) == 1
            said = first.log.read_text()
            assert re.search(r"session (s was continued by|continues with)|is lost", said), said
        reading.result()
        assert not client.ended
        client.read(second.url)
        _, whole = second.request("/v1/completions", asked)
        log = second.log.read_text()
    assert client.ended and ("tokens of the session, which continues" in log) == (ranks[0] == ranks[1]), log
    assert (
        "".join(choice["text"] for event in client.events for choice in event["choices"]) == whole["choices"][0]["text"]
    )
