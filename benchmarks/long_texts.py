"""What do texts that cannot fit cost others? python benchmarks/long_texts.py --model FOLDER

``fastdecode serve`` with 2,048 tokens gets three texts of 30 MiB at once, as prompts and then as conversations, and
beside them a prompt of six characters. Printed for each round: seconds to the last refusal and to the short answer, and
the server's resident memory before and after, with its peak between.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

LENGTH = 30 << 20
ALIKE = "a" * LENGTH
WORDS = ("the quick brown fox jumps over it, and 42 more " * (LENGTH // 40))[:LENGTH]


def main() -> None:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a chat model, as scripts/get_model.py makes one")
    options = parser.parse_args()
    command = [str(Path(sys.executable).parent / "fastdecode"), "serve", "--model", options.model, "--port", "0"]
    command += ["--max-model-len", "2048", "--kv-cache-memory", "256MiB", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = re.search(r" at (https?://\S+) ", server.stdout.readline() if server.stdout else "")
            if not found:
                raise SystemExit("the server did not start")
            _ask(found[1], "/v1/completions", {"prompt": "Hello!", "max_tokens": 2})  # what is read once
            for name, text in (("one character", ALIKE), ("words", WORDS)):
                for route, body in (
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ):
                    _measure(found[1], server.pid, f"{route}, {name}", route, body)
        finally:
            server.kill()


def _measure(url: str, pid: int, title: str, route: str, body: dict[str, Any]) -> None:
    memory, peak, done = psutil.Process(pid).memory_info, [0], threading.Event()
    before = memory().rss

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], memory().rss)

    threading.Thread(target=watch).start()
    with ThreadPoolExecutor(4) as clients:
        start = time.monotonic()
        long = [clients.submit(_ask, url, route, {**body, "max_tokens": 2}) for _ in range(3)]
        time.sleep(0.2)
        short = clients.submit(_ask, url, "/v1/completions", {"prompt": "Hello!", "max_tokens": 2})
        status, end = short.result()
        statuses = [each.result() for each in long]
    done.set()
    last = max(each[1] for each in statuses) - start
    print(
        f"{title}: {', '.join(str(each[0]) for each in statuses)} after {last:.1f} s; the short prompt {status} after "
        f"{end - start - 0.2:.2f} s; {before / 2**20:.0f} MiB before, {peak[0] / 2**20:.0f} at most, "
        f"{memory().rss / 2**20:.0f} after",
        flush=True,
    )


def _ask(url: str, route: str, body: dict[str, Any]) -> tuple[int, float]:
    """The status, and when the answer was there."""
    asked = urllib.request.Request(url + route, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=900) as response:
            response.read()
            return response.status, time.monotonic()
    except urllib.error.HTTPError as error:
        return error.code, time.monotonic()


if __name__ == "__main__":
    main()
