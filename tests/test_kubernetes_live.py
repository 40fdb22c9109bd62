"""The command lines of examples/kubernetes, run as processes with addresses of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import kubernetes
from helpers.kubernetes import FOLDER, container, parsed, pods
from helpers.ports import free_port
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import RunningServer, metrics

pytestmark = pytest.mark.slow

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
API_KEY = "an-api-key"
HEADERS = {"authorization": f"Bearer {API_KEY}"}
SMALL = {
    "s-worker": ["--device=cpu", "--max-model-len=256", "--s-threads=1", "--max-num-seqs=8", "--silence-seconds=60"],
    "r-worker": ["--kv-cache-memory=64MiB", "--threads=1"],
}
"""Flags that make each component small, and override all others.

On a busy machine, an R-worker may send no heartbeat for seconds. If an R-worker is killed, its connection closes.
"""


@dataclass
class Pod:
    """A container's process, and the URL of its probes."""

    process: subprocess.Popen[str]
    url: str

    def health(self) -> int:
        """Return the status that the kubelet sees."""
        path = container(kubernetes.base(), "r-worker")["readinessProbe"]["httpGet"]["path"]
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


class Cluster:
    """Starts the manifests' containers, init containers first, with Services' names and ports replaced."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        pool = f"127.0.0.1:{free_port()}"
        manifests = kubernetes.base()
        self._here = {
            parsed(manifests, "s-worker").pool_listen: pool,
            parsed(manifests, "r-worker").join: pool,
            parsed(manifests, "r-worker").health_listen: "127.0.0.1:0",
            "tcp://*:5580": "tcp://*:0",
            "0.0.0.0": "127.0.0.1",
            "8000": "0",
        }
        (folder / "secret").write_text("k" * 64 + "\n")
        (folder / "secret").chmod(0o440)

    def start(self, component: str) -> subprocess.Popen[str]:
        """Start a pod of that component."""
        pod = pods(kubernetes.base())[component]["spec"]
        *install, _, mounted = pod["initContainers"][0]["command"]
        key = self._folder / f"{component}.key"
        subprocess.run([*install, str(self._folder / "secret"), str(key)], check=True)
        here = self._here | {mounted: str(key)}
        flags = [flag.partition("=") for flag in pod["containers"][0]["args"][1:]]
        command = [pod["containers"][0]["args"][0], *(f"{name}={here.get(value, value)}" for name, _, value in flags)]
        with (self._folder / f"{component}.log").open("a") as log:
            process = subprocess.Popen(
                [FASTDECODE, *command, *SMALL[component], "--log-level=info"],
                stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "FASTDECODE_API_KEY": API_KEY},
            )  # fmt: skip
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def wait(self, process: subprocess.Popen[str], pattern: str) -> Pod:
        """Return the pod once it has printed where its probes are answered."""
        assert process.stdout
        for line in process.stdout:
            if found := re.search(pattern, line):
                return Pod(process, found[1])
        raise AssertionError("".join(path.read_text() for path in self._folder.glob("*.log")))

    def r_worker(self) -> Pod:
        """Start an R-worker, and return its pod."""
        return self.wait(self.start("r-worker"), r"health at (http://[^/]+)/health")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metric(server: RunningServer, name: str) -> float:
    return sum(v for each, v in metrics(server, HEADERS).items() if each.partition("{")[0] == f"fastdecode:{name}")


def complete(server: RunningServer, number: int) -> str:
    """Return a greedy completion of some length."""
    body = {"prompt": f"def f{number}(self):", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    status, answer = server.request("/v1/completions", body, HEADERS)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


@contextlib.contextmanager
def under_load(server: RunningServer, expected: list[str]) -> Iterator[None]:
    """Send requests before, during and after what happens inside; each must get its expected tokens.

    Each client goes on until the end, so that requests run however slow this machine is.
    """
    ended = threading.Event()

    def answers(number: int) -> set[str]:
        found = {complete(server, number)}
        while not ended.is_set():
            found.add(complete(server, number))
        return found

    with ThreadPoolExecutor(len(expected)) as clients:
        found = [clients.submit(answers, number) for number in range(len(expected))]
        try:
            until(lambda: metric(server, "num_requests_running") >= 4)
            yield
        finally:
            ended.set()
        assert [each.result() for each in found] == [{text} for text in expected]


def test_the_service_survives_what_a_cluster_does_to_it(tmp_path: Path) -> None:
    """Requests go on while a cluster adds, drains, kills and replaces R-workers.

    R-workers join with the key, and one drains as by `kubectl scale`; the server ends in order.
    """
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        process = cluster.start("s-worker")
        first, second = cluster.r_worker(), cluster.r_worker()
        server_pod = cluster.wait(process, r" at (https?://\S+) ")
        server = RunningServer(process, server_pod.url, tmp_path / "s-worker.log")
        assert [pod.health() for pod in (server_pod, first, second)] == [200, 200, 200]
        assert server.request("/v1/models")[0] == 401, "the key of the Secret is asked for"
        assert metric(server, "r_workers_alive") == 2
        with ThreadPoolExecutor(6) as clients:
            expected = list(clients.map(lambda number: complete(server, number), range(6)))

        with under_load(server, expected):
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(PATIENCE_SECONDS) == 0
            until(lambda: metric(server, "r_workers_alive") == 1)
        assert metric(server, "r_workers_lost_total") == metric(server, "num_preemptions_total") == 0
        third = cluster.r_worker()
        until(lambda: metric(server, "r_workers_alive") == 2)

        with under_load(server, expected):
            second.process.kill()
            until(lambda: metric(server, "r_workers_lost_total") == 1)
            fourth = cluster.r_worker()
            until(lambda: metric(server, "r_workers_alive") == 2)
        _check_metrics(server)

        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
        # The R-workers wait for the next S-worker.
        until(lambda: [pod.health() for pod in (third, fourth)] == [200, 200])
        for pod in (third, fourth):
            pod.process.send_signal(signal.SIGTERM)
            assert pod.process.wait(PATIENCE_SECONDS) == 0


def test_a_server_that_waits_for_r_workers_ends_when_told(tmp_path: Path) -> None:
    """The server, pid 1 of a container, would otherwise be killed after the whole grace period."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        process = cluster.start("s-worker")
        until(lambda: "R-workers may join at" in (tmp_path / "s-worker.log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 143


def _check_metrics(server: RunningServer) -> None:
    """Check that the server has the metrics that the autoscaler's rules read."""
    text: Any = server.request("/metrics", headers=HEADERS)[1]
    read = re.findall(r"fastdecode:\w+", (FOLDER / "autoscaling" / "prometheus-adapter.yaml").read_text())
    assert read and all(f"# TYPE {name} gauge\n" in text for name in read)
