"""How long is a stream silent when its server is killed or stopped? python benchmarks/server_takeover.py

One R-worker process, a server with --session, and a stream of one client. "standby": another server stands by; the
stream's first is killed (SIGKILL) or stopped (SIGSTOP), and the client comes back with Last-Event-ID as soon as the
standby says 200. "restart": the first is killed and started again; of that the time until it says that it serves is
taken apart, as is that of a first start with an empty journal. Printed: seconds of each, per round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
BODY: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 1900, "temperature": 1, "seed": 3, "stream": True}


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command of fastdecode and its first line, killed at the end."""
    started = subprocess.Popen([FASTDECODE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = started.stdout.readline() if started.stdout else ""
        yield started, line
    finally:
        started.kill()
        started.wait()


def server(folder: Path, address: str, *flags: str) -> Any:
    """One of the demo model over the R-worker at ``address``."""
    common = ("--r-workers", address, "--keep-session", "60", "--journal", str(folder), "--max-model-len", "2048")
    return process("serve", "--port", "0", "--device", "cpu", "--s-threads", "1", *common, *flags)


def url_in(line: str) -> str:
    """The address that a server's first line names."""
    return line.split(" at ")[1].split()[0]


def read(url: str, last: str, count: int) -> tuple[str, float]:
    """Id of the last of ``count`` events, and when the first of them came."""
    headers = {"content-type": "application/json", **({"last-event-id": last} if last else {})}
    asked = urllib.request.Request(url + "/v1/completions", json.dumps(BODY).encode(), headers)
    first = 0.0
    with urllib.request.urlopen(asked, timeout=60) as response:
        for line in response:
            if line.startswith(b"id: "):
                last = line[4:].decode().strip()
            elif line.startswith(b"data: {"):
                first, count = first or time.monotonic(), count - 1
                if not count:
                    break
    return last, first


def wait_ready(url: str) -> float:
    """When /health says 200."""
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return time.monotonic()
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            time.sleep(0.005)


def standby(folder: Path, address: str, name: str) -> dict[str, float]:
    """Seconds from the signal to ready, and to the next token."""
    with ExitStack() as stack:
        first, line = stack.enter_context(server(folder, address, "--session", "s"))
        _, line_of_second = stack.enter_context(server(folder, address, "--standby", "s"))
        time.sleep(8)  # in which it loads its weights
        last, _ = read(url_in(line), "", 50)
        start = time.monotonic()
        first.send_signal(getattr(signal, name))
        ready = wait_ready(url_in(line_of_second))
        _, token = read(url_in(line_of_second), last, 1)
        return {"ready": ready - start, "token": token - start}


def restart(folder: Path, address: str) -> dict[str, float]:
    """Seconds of a first start, of one that goes on, and from that it serves to the next token."""
    start = time.monotonic()
    with server(folder, address, "--session", "s") as (first, line):
        plain = time.monotonic() - start
        last, _ = read(url_in(line), "", 50)
        first.kill()
        first.wait()
    start = time.monotonic()
    with server(folder, address, "--session", "s") as (_, line):
        serves = time.monotonic()
        _, token = read(url_in(line), last, 1)
        return {"first start": plain, "serves": serves - start, "token": token - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="SIGKILL,SIGSTOP,restart")
    args = parser.parse_args()
    for way in args.ways.split(","):
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                size = ("--kv-cache-memory", "256MiB", "--threads", "1")
                _, line = stack.enter_context(process("r-worker", *size, "--listen", "tcp://127.0.0.1:0"))
                address = line.split("tcp://")[1].split()[0]
                run = Path(folder) / "journal"
                found = restart(run, address) if way == "restart" else standby(run, address, way)
                print(way, {name: round(seconds, 2) for name, seconds in found.items()}, flush=True)


if __name__ == "__main__":
    main()
