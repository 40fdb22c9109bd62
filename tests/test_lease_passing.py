"""A session passes to another S-worker if its own is busy, stopped or gone, at each security level.

The tests also cover the answers of R-workers to those that ask, and R-workers that are lost meanwhile.
"""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import contract, r_workers
from helpers.processes import PATIENCE_SECONDS, script
from helpers.sessions import log_of, works

from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.wire.leases import LEASE_SECONDS, AskedLease
from fastdecode.core.errors import BusyError, SupersededError
from fastdecode.core.types import RWorkerInfo

SECURITY = [None, pytest.param("authenticate", marks=pytest.mark.slow), pytest.param("encrypt", marks=pytest.mark.slow)]


def backend(addresses: str, key: Path | None, security: str | None, **asked: Any) -> TcpBackend:
    """Return the backend of an S-worker of session "s"; ``asked`` has the settings of its lease."""
    lease = AskedLease("s", "second" if asked else "first", "first" if asked else "", 60.0, **asked)
    guard = (str(key), security) if security else (None, None)
    return TcpBackend(addresses.split(","), 16, *guard, lease=lease, in_order=bool(asked), may_miss=True)


def asks_until(
    holds: Callable[[], bool], make: Callable[[], TcpBackend]
) -> tuple[TcpBackend, list[RWorkerInfo]] | None:
    """Ask again and again while ``holds``, and return what was opened."""
    while holds():
        try:
            return (found := make()), found.open(contract.LAYOUT)
        except BusyError:
            time.sleep(0.1)
    return None


@pytest.mark.parametrize("security", SECURITY)
def test_a_busy_s_worker_keeps_its_session_and_a_stopped_one_does_not(key_file: Path, security: str | None) -> None:
    """A busy S-worker sends only heartbeats for longer than a lease's time, and keeps its session.

    It is told once of the standby that asks meanwhile.
    """
    arguments = ("--key-file", str(key_file), "--security", security) if security else ()
    with r_workers.listening(*arguments) as (process, address):
        (first := backend(address, key_file, security)).open(contract.LAYOUT)

        def standby() -> TcpBackend:
            return backend(address, key_file, security, waits=True)

        end = time.monotonic() + LEASE_SECONDS + 1
        assert asks_until(lambda: time.monotonic() < end, standby) is None
        assert works(first)
        link = first.workers[0].link  # type: ignore[attr-defined]
        link.close()  # The S-worker sends no farewell, as if its process were killed.
        end = time.monotonic() + PATIENCE_SECONDS
        found = asks_until(lambda: time.monotonic() < end, standby)
        assert found and [each.num_tokens for each in found[1][0].held] == [4]
        found[0].close()
        log = log_of(process)
    assert len(re.findall(r"S-worker .+ stands by for session s\n", log)) == 1
    assert "refused" not in log, log


@pytest.mark.parametrize("security", SECURITY)
def test_one_without_heartbeats_gives_way(key_file: Path, security: str | None) -> None:
    """A standby gets the session, and later requests of the first S-worker are refused by name."""
    arguments = ("--key-file", str(key_file), "--security", security) if security else ()
    with r_workers.listening(*arguments) as (_, address):
        (first := backend(address, key_file, security)).open(contract.LAYOUT)
        first.workers[0].link.end_beats()  # type: ignore[attr-defined]
        end = time.monotonic() + PATIENCE_SECONDS
        found = asks_until(lambda: time.monotonic() < end, lambda: backend(address, key_file, security, waits=True))
        assert found and works(found[0])
        with pytest.raises(SupersededError, match="session continues with"):
            works(first)
        first.close()
        found[0].close()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_one_gets_the_session_among_many_that_ask(is_stopped: bool) -> None:
    """Five others ask all the time, so that the R-worker never waits for long without a message.

    The first S-worker stops its heartbeats, or ends.
    """
    with r_workers.listening() as (_, address), ThreadPoolExecutor() as pool:
        (first := backend(address, None, None)).open(contract.LAYOUT)
        is_over, asked = threading.Event(), queue.SimpleQueue[None]()

        def ask() -> None:
            while not is_over.wait(0.02):
                with pytest.raises(BusyError):
                    TcpBackend([address], 16).open(contract.LAYOUT)
                asked.put(None)

        others = [pool.submit(ask) for _ in range(5)]
        for _ in range(15):
            asked.get(timeout=PATIENCE_SECONDS)
        first.workers[0].link.end_beats() if is_stopped else first.break_off()  # type: ignore[attr-defined]
        end = time.monotonic() + PATIENCE_SECONDS
        found = asks_until(lambda: time.monotonic() < end, lambda: backend(address, None, None, waits=True))
        is_over.set()
        assert found and works(found[0])
        for each in others:
            each.result()
        found[0].close()
        first.close()


def test_the_garbage_collector_closes_a_forgotten_link() -> None:
    """The collector may free a context before its sockets; the context must not wait for them for ever."""
    program = """
        import gc
        from fastdecode.cluster.links.tcp import connect
        from fastdecode.cluster.wire.handshake import Security
        gc.disable()
        for _ in range(5):
            link = connect("127.0.0.1:9", Security(), beats=True)
            link.begin_beats()
            link.itself = link
        del link
        gc.collect()
    """
    subprocess.run(script(program), check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("security", SECURITY)
def test_one_opens_without_an_r_worker_that_is_gone(
    key_file: Path, security: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One R-worker was killed with the earlier S-worker, and the other has kept its sequences."""
    monkeypatch.setattr("fastdecode.cluster.pool.tcp.MEETING_SECONDS", 0.5)
    arguments = ("--key-file", str(key_file), "--security", security) if security else ()
    with r_workers.listening(*arguments) as (gone, lost), r_workers.listening(*arguments) as (_, address):
        (first := backend(f"{lost},{address}", key_file, security)).open(contract.LAYOUT)
        gone.kill()
        gone.wait()
        first.break_off()
        end = time.monotonic() + PATIENCE_SECONDS
        found = asks_until(
            lambda: time.monotonic() < end, lambda: backend(f"{lost},{address}", key_file, security, waits=False)
        )
        assert found and [(info.name, info.kept_of) for info in found[1]] == [(address, "first")]
        assert works(found[0])
        found[0].close()
    assert f"R-worker {lost} is lost" in caplog.text and "the others continue without it" in caplog.text


def test_what_one_took_that_did_not_get_all_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two R-workers serves another session, so the first is given back."""
    monkeypatch.setattr("fastdecode.cluster.pool.tcp.SETTLE_SECONDS", 0.2)
    with r_workers.listening() as (_, one), r_workers.listening() as (_, two):
        (first := backend(one, None, None)).open(contract.LAYOUT)
        assert works(first)
        first.break_off()
        (other := TcpBackend([two], 16)).open(contract.LAYOUT)
        for _ in range(2):
            time.sleep(0.1)
            with pytest.raises(BusyError, match="serves another S-worker"):
                backend(f"{one},{two}", None, None, waits=True).open(contract.LAYOUT)
        other.close()
        end = time.monotonic() + PATIENCE_SECONDS
        found = asks_until(lambda: time.monotonic() < end, lambda: backend(f"{one},{two}", None, None, waits=True))
        assert found and [info.kept_of for info in found[1]] == ["first", ""]
        found[0].close()
