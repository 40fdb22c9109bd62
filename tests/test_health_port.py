"""Tests an R-worker's health port: its answers, and that no client of the port disturbs the R-worker."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import contract, r_workers
from helpers.ports import free_port
from helpers.processes import PATIENCE_SECONDS
from helpers.sessions import log_of, make_key, opened, serves, works

from fastdecode.cli.main import main
from fastdecode.cluster.pool.tcp import listen_for_joins
from fastdecode.cluster.r_worker import vitals as vitals_module
from fastdecode.cluster.r_worker.health import MOST_BYTES, MOST_CLIENTS, HealthPort
from fastdecode.cluster.r_worker.host import take_host
from fastdecode.cluster.r_worker.vitals import PREFIX, Vitals
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import has_cpu_quota

Place = tuple[str, int]


def ask(place: Place, path: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and the body of the answer."""
    connection = http.client.HTTPConnection(*place, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def metrics(place: Place) -> dict[str, float]:
    """Return the values of /metrics, by name without the prefix."""
    status, text = ask(place, "/metrics")
    assert status == 200
    lines = [line.removeprefix(PREFIX).split() for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@contextlib.contextmanager
def watched() -> Iterator[tuple[subprocess.Popen[str], str, Place]]:
    """Yield an R-worker, its address, and the address of its health port."""
    with r_workers.listening("--health-listen", "127.0.0.1:0") as (process, address):
        yield process, address, place_told(process)


def place_told(process: subprocess.Popen[str]) -> Place:
    """Return the health port that an R-worker prints when it starts."""
    line = process.stdout.readline() if process.stdout else ""
    host, _, port = line.partition("http://")[2].removesuffix("/health\n").partition(":")
    return host, int(port)


@pytest.fixture
def port() -> Iterator[HealthPort]:
    """Yield a health port in this process, of an R-worker that is ready."""
    vitals = Vitals()
    vitals.is_ready = True
    health = HealthPort("127.0.0.1", 0, vitals)
    yield health
    health.close()


def place_of(health: HealthPort) -> Place:
    host, _, number = health.address.partition(":")
    return host, int(number)


@pytest.mark.slow
def test_an_r_worker_that_cannot_join_says_why(tmp_path: Path) -> None:
    """Nobody listens at the pool's address at first. Then the key is wrong. /live answers ok all the time."""
    key, other = (make_key(tmp_path / name, name * 32) for name in ("key", "other"))
    pool = f"127.0.0.1:{free_port()}"

    def until(status: int, reason: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while reason not in (found := ask(place, "/health"))[1] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found[0] == status and reason in found[1]
        assert ask(place, "/live") == (200, "ok\n")

    with r_workers.joining(pool, "--key-file", str(key), "--health-listen", "127.0.0.1:0") as (process, _):
        place = place_told(process)
        until(503, f"cannot join {pool}: nobody answers there\n")
        with contextlib.closing(listen_for_joins(pool, contract.BLOCK_SIZE, str(other))):
            until(503, "do not agree on a key")
        with contextlib.closing(listen_for_joins(pool, contract.BLOCK_SIZE, str(key))):
            until(200, "ok")
        log = log_of(process)
        assert log.count("nobody answers there") == log.count("do not agree on a key") == 1


def test_metrics_show_the_session_and_its_work() -> None:
    with watched() as (_, address, place):
        assert ask(place, "/health") == (200, "ok\n")
        assert metrics(place)["serving"] == 0 and metrics(place)["kv_blocks"] == 0
        backend = opened(address)
        assert works(backend)
        found = metrics(place)
        assert found["serving"] == found["sessions_total"] == found["steps_total"] == found["sequences"] == 1
        used = -(-4 // contract.BLOCK_SIZE)
        assert found["kv_blocks_used"] == used and found["kv_blocks_free"] == found["kv_blocks"] - used > 0
        assert 0 < found["busy_seconds_total"] < 10 and found["kv_bytes_read_total"] > 0
        backend.close()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while metrics(place)["serving"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert metrics(place)["kv_blocks"] == 0
        assert ask(place, "/health")[0] == 200, "it is ready for the next session"


def test_it_speaks_prometheus(port: HealthPort) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(port.vitals.metrics()))
    assert {family.type for family in families} == {"gauge", "counter"}
    assert all(family.name.startswith(PREFIX) and family.documentation and family.samples for family in families)


def test_a_worker_that_leaves_starts_or_hangs_is_not_healthy(port: HealthPort, monkeypatch: pytest.MonkeyPatch) -> None:
    place, vitals = place_of(port), port.vitals
    assert ask(place, "/health")[0] == 200
    vitals.is_leaving = True
    assert ask(place, "/health") == (503, "the R-worker is leaving\n")
    vitals.is_leaving, vitals.is_ready = False, False
    assert ask(place, "/health") == (503, "the R-worker is starting\n")
    vitals.is_ready = True
    monkeypatch.setattr(vitals_module, "STUCK_SECONDS", -1.0)
    status, text = ask(place, "/health")
    assert status == 503 and "main loop has been stuck" in text
    assert metrics(place)["healthy"] == 0


def test_other_paths_and_methods(port: HealthPort) -> None:
    place = place_of(port)
    assert ask(place, "/")[0] == ask(place, "/healthy")[0] == 404
    assert ask(place, "/health", "POST")[0] == 501
    assert ask(place, "/health", "HEAD") == (200, "")
    assert ask(place, "/health?probe=1")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\r\n" * 100,
        b"GET /" + b"a" * (2 * MOST_BYTES) + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * MOST_BYTES,
        b"GET /health HTTP/1.1\r\nx: " + b"\xff" * 100 + b"\r\n\r\n",
    ],
)
def test_malformed_requests_harm_only_themselves(sent: bytes, port: HealthPort) -> None:
    place = place_of(port)
    with socket.create_connection(place, PATIENCE_SECONDS) as client, contextlib.suppress(OSError):
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"Traceback" not in client.recv(1 << 16)
    assert ask(place, "/health")[0] == 200


def test_clients_that_say_nothing_are_sent_away(port: HealthPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow clients hold all connections; one client sends a byte now and then."""
    monkeypatch.setattr("fastdecode.cluster.r_worker.health.CLIENT_SECONDS", 0.5)
    place = place_of(port)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(place, PATIENCE_SECONDS)) for _ in range(MOST_CLIENTS)]
        deadline, answer = time.monotonic() + PATIENCE_SECONDS, 0
        while answer != 200:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                clients[0].send(b"G")
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = ask(place, "/health")[0]
            time.sleep(0.05)


def test_the_r_worker_serves_while_its_port_is_abused() -> None:
    with watched() as (process, address, place), contextlib.ExitStack() as stack:
        for _ in range(3 * MOST_CLIENTS):
            client = stack.enter_context(socket.create_connection(place, PATIENCE_SECONDS))
            with contextlib.suppress(OSError):
                client.sendall(b"\x00" * 100_000)
        assert serves(address)
        process.terminate()
        out, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0 and "ended" in out and "Traceback" not in log and "Exception" not in log


def test_a_port_that_cannot_be_used_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"health_listen: cannot listen at 127.0.0.1:{number}"):
            HealthPort("127.0.0.1", number, Vitals())
    for flags, message in (
        (["--health-listen", "8080"], "health_listen: an address is host:port"),
        (["--health-listen", "127.0.0.1:0", "--transport", "mpi"], "health_listen: R-workers of an MPI job"),
    ):
        assert main(["r-worker", *flags]) == 2
        assert message in capfd.readouterr().err


def test_threads_are_not_pinned_under_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """If containers pinned their threads, all would use the host's first cores."""
    free = take_host(None, 1, 1 << 20)
    assert free.size.cores == free.cores or has_cpu_quota()
    with monkeypatch.context() as quota:
        quota.setattr("fastdecode.core.cgroups.cpu_limit", lambda: 1.0)
        cores = sorted(os.sched_getaffinity(0))
        limited = take_host(None, None, 1 << 20)
        assert limited.size.num_threads == 1 and limited.size.cores == ((), (cores[0],))[len(cores) == 1]
        assert take_host([cores[0]], None, 1 << 20).size.cores == (cores[0],), "as asked"
        os.sched_setaffinity(0, cores)
