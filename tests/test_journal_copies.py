"""A journal in the memory of R-workers: what they keep, for whom and how much, and engines that go on with it."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import contract, r_workers
from helpers.forks import relayed
from helpers.processes import script
from helpers.sessions import make

from fastdecode.api.config import EngineConfig
from fastdecode.cluster.pool.journal_copies import JournalCopies
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker.lease import Lease, LeaseError
from fastdecode.cluster.r_worker.session_journal import SessionJournal
from fastdecode.cluster.wire.leases import MOST_JOURNAL_BYTES, AskedLease
from fastdecode.cluster.wire.messages import Hello
from fastdecode.core.errors import CapacityError, ConfigError, FrameError, SupersededError, WorkerLostError
from fastdecode.journal.kept_journal import KeptJournal
from fastdecode.journal.past import pasts_of
from fastdecode.journal.records import Asked, Began, Chain, Record, Stepped, read


def test_a_journal_is_bounded_and_grows_at_its_end() -> None:
    journal = SessionJournal()
    journal.write(0, bytearray(b"abc"))
    journal.check(3, MOST_JOURNAL_BYTES - 3)
    journal.check(0, MOST_JOURNAL_BYTES)
    for start, num_bytes in ((0, MOST_JOURNAL_BYTES + 1), (3, MOST_JOURNAL_BYTES - 2)):
        with pytest.raises(CapacityError, match="an R-worker keeps 134,217,728 at most"):
            journal.check(start, num_bytes)
    for start in (1, 2, 4, -1):
        with pytest.raises(FrameError, match=rf"RECORD: bytes from {start} on, and the journal has 3"):
            journal.check(start, 1)
    journal.write(3, bytearray(b"de"))
    assert journal.data == b"abcde"
    journal.write(0, bytearray(b"f"))
    assert journal.data == b"f" and journal.num_bytes == 1


def hello(run: str, name: str = "a", keep: float = 60.0, model: str = "model ") -> Hello:
    return Hello("host:1", contract.LAYOUT, 16, AskedLease(name, model + run, model, keep, any_run=True))


def test_a_journal_is_for_its_session() -> None:
    """The journal stays after an orderly end, for any run of the model; another session has to wait."""
    lease = Lease()
    worker = lease.open(hello("first"), make)
    lease.journal.write(0, bytearray(b"abc"))
    lease.leave(worker, is_broken=True)
    assert lease.open(hello("second"), make) is worker and lease.kept_of == "model first"
    lease.leave(worker, is_broken=False)
    with pytest.raises(LeaseError, match="this R-worker keeps the caches of session a"):
        lease.open(hello("third", name="b"), make)
    worker = lease.open(hello("third", model="another "), make)
    assert lease.journal.data == b"abc" and not lease.goes_on
    lease.leave(worker, is_broken=True)
    lease._until = time.monotonic() - 1
    lease.expire()
    worker = lease.open(hello("first", name="b"), make)
    assert lease.journal.num_bytes == 0
    lease.journal.write(0, bytearray(b"abc"))
    lease.leave(worker, is_broken=False)
    lease._until = time.monotonic() - 1
    lease.expire()
    lease.open(Hello("host:2", contract.LAYOUT, 16), make)
    assert lease.journal.num_bytes == 0


class Listed:
    """A ``Place`` of given copies."""

    name, growth_bytes, is_own = "list", 1 << 20, True

    def __init__(self, copies: list[bytes]) -> None:
        self.found, self.data = copies, b""
        self.most_bytes = math.inf

    def copies(self) -> list[bytes]:
        return self.found

    def written(self) -> bytes:
        return self.data

    def replace(self, data: bytes) -> None:
        self.data = data
        self.found = [data]

    end = replace

    def append(self, data: bytes) -> None:
        self.replace(self.data + data)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def copy_of(epoch: int, edition: int, num_steps: int, run: str) -> bytes:
    records: list[Record] = [Began("model", run, epoch, edition), Asked(0, run, None, [1], {})]
    return Chain().encode([*records, *(Stepped([(0, [each])]) for each in range(num_steps))])


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(1, 1, 9, "a"), (2, 1, 3, "b")], "b"),
        ([(2, 3, 3, "a"), (2, 2, 9, "b")], "a"),
        ([(2, 3, 3, "a"), (2, 3, 9, "b")], "b"),
    ],
    ids=["epoch", "edition", "length"],
)
def test_the_copy_that_was_written_last_counts(copies: list[tuple[int, int, int, str]], expected: str) -> None:
    """The whole beginnings of damaged copies count, and what is written from then on is later than all."""
    place = Listed(
        [*(copy_of(*each) for each in copies), b"", b"FastDecode journal 1\nnonsense", copy_of(9, 9, 9, "c")[:30]]
    )
    journal = KeptJournal(place, "model", "next", epoch=1)
    assert (journal.before, list(journal._known)) == (expected, [expected])
    assert journal._began.epoch > max(epoch for epoch, *_ in copies)
    torn = [copy_of(2, 1, 9, "a")[:-100], copy_of(2, 1, 5, "b")]
    assert KeptJournal(Listed(torn), "model", "next").before == "b"
    assert KeptJournal(Listed([]), "model", "next", epoch=7)._began == Began("model", "next", 7, 1)


def test_what_is_kept_goes_on_with_the_journal() -> None:
    """Kept requests go on with the journal, also with another model's and where all is written anew.

    A journal without other requests is empty in the end.
    """
    place = Listed([])
    journal = KeptJournal(place, "model", "first")
    for name in ("a", "b", "c"):
        journal.keep(name, name.encode())
    journal.keep("a", b"d")
    journal.forget("b")
    journal.forget("x")
    second = KeptJournal(place, "another", "second")
    assert [(each.name, each.data) for each in second.kept.values()] == [("c", b"c"), ("a", b"d")]
    assert (second.was_found, second.before) == (True, "")
    second.close()
    third = KeptJournal(place, "model", "third")
    third.forget("a")
    third.forget("c")
    third.close()
    assert read(place.written())[0] == [third._began]


def test_a_bounded_place_has_room_for_what_has_not_ended() -> None:
    """Ended requests are dropped once they fill half of the place."""
    logprobs = [dict.fromkeys(range(20), (-0.5, 1))] * 9000
    ended = [Asked(0, "a", None, [1], {}), Stepped([(0, [1] * 9000)], [(0, logprobs)], [(0, "stop", None)])]
    runs = [Asked(1, "b", None, [1], {}), Stepped([(1, [2])])]
    place = Listed([Chain().encode([Began("model", "first"), *ended, *runs])])
    assert [each.asked.request_id for each in pasts_of(read(written_anew(place))[0]).values()] == ["a", "b"]
    place.most_bytes = len(place.written())
    assert [each.asked.request_id for each in pasts_of(read(written_anew(place))[0]).values()] == ["b"]


def written_anew(place: Listed) -> bytes:
    """Return the bytes of the journal written anew."""
    KeptJournal(place, "model", "next")
    return place.written()


def opened(addresses: list[str], run: str) -> TcpBackend:
    lease = AskedLease("s", f"model {run}", "model ", 60.0, any_run=True)
    backend = TcpBackend(addresses, contract.BLOCK_SIZE, lease=lease, may_miss=True)
    backend.open(contract.LAYOUT)
    return backend


@pytest.fixture
def three() -> Iterator[tuple[list[Any], list[str]]]:
    with ExitStack() as stack:
        started = [stack.enter_context(r_workers.listening()) for _ in range(3)]
        yield [process for process, _ in started], [address for _, address in started]


def test_two_r_workers_have_it(three: tuple[list[Any], list[str]]) -> None:
    """After a loss the third R-worker gets all of it; the next S-worker reads it, and the earlier one stops writing."""
    processes, addresses = three
    backend = opened(addresses, "first")
    copies = JournalCopies(backend)
    copies.replace(b"abc")
    copies.append(b"de")
    assert backend.workers[0].journal.recall() == b"abcde"  # Pending answers are read before anything else is asked.
    copies.settle()
    copies.settle()
    assert copies.copies() == [b"abcde"] * 2
    processes[0].kill()
    processes[0].wait()
    copies.append(b"f")
    copies.settle()
    assert copies.copies() == [b"abcdef"] * 2 and copies.written() == b"abcdef"
    with pytest.raises(OSError, match="a journal of 134,217,731 bytes is more than an R-worker keeps, 134,217,728"):
        copies.replace(bytes(MOST_JOURNAL_BYTES + 3))
    with pytest.raises(CapacityError, match="a journal of 134,217,731 bytes; an R-worker keeps 134,217,728"):
        journal = backend.workers[1].journal
        journal.record(6, bytes(MOST_JOURNAL_BYTES - 3))  # type: ignore[union-attr]
        journal.recorded()  # type: ignore[union-attr]
    second = opened(addresses[1:], "second")
    then = JournalCopies(second)
    assert then.copies() == [b"abcdef"] * 2
    with pytest.raises(SupersededError, match=r"session (continues with|s was continued by)"):
        copies.append(b"g")
        copies.settle()
    assert then.copies() == [b"abcdef"] * 2
    then.end(b"nothing")
    assert then.copies() == []
    backend.close()
    second.close()


def test_a_kept_session_opens_without_one_that_is_lost(
    three: tuple[list[Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An R-worker is killed while asked; if nothing is kept and it cannot come back, that is an error."""
    processes, addresses = three
    processes[0].send_signal(signal.SIGSTOP)
    threading.Timer(0.5, processes[0].kill).start()
    backend = opened(addresses, "first")
    assert [worker.name for worker in backend.workers] == addresses[1:]
    copies = JournalCopies(backend)
    copies.replace(b"abc")
    assert copies.copies() == [b"abc"] * 2
    copies.end(b"")
    backend.close()
    monkeypatch.setattr("fastdecode.cluster.pool.remote.OPEN_SECONDS", 0.3)
    with pytest.raises(WorkerLostError, match=f"R-worker {addresses[0]} is lost"):
        TcpBackend(addresses, contract.BLOCK_SIZE).open(contract.LAYOUT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "journal: r-workers keep it as long as the session's sequences: give --session and --keep-session"),
        ({"keep_session": 9.0}, "keep_session: R-workers keep sequences of the session that --session names: give one"),
        (
            {"keep_session": 9.0, "session": "a", "r_workers": "localhost:1", "tensor_parallel_size": 2},
            "keep no journal with tensor",
        ),
    ],
)
def test_what_it_needs_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(journal="r-workers", **settings)


KILLED = """
import sys, tempfile
from pathlib import Path
from chaos.killed import KINDS, Round, run_round
from chaos.configuration import Ask

params = {"max_tokens": 60, "ignore_eos": True}
asks = {str(n): Ask(0, f"def f{n}(x):", params | kind, None)
        for n, kind in enumerate(({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "n": 3}))}
for number in (0, 1):
    with tempfile.TemporaryDirectory() as name:
        drawn = Round(3 + number, list(KINDS)[number], {"max_num_seqs": 8}, asks, Path(name))
        found = run_round(drawn, 1, {"journal": "r-workers"})
        print(found.counts, (drawn.folder / "log").read_text() if found.faults else "")
        assert not found.faults and found.counts["kills"] == 1 and not (drawn.folder / "journal").exists(), found
        assert number or found.counts["known"] > found.counts["again"] == 0, found
"""


@pytest.mark.slow
def test_killed_engines_go_on_with_an_empty_disk() -> None:
    """The engine is killed alone, and together with one of two R-workers, which starts again, empty."""
    done = subprocess.run(relayed(script(KILLED)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
