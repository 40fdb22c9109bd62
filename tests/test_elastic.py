"""R-workers join a running job, leave it, stop and come back, and every sequence's tokens are unchanged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.elastic import GREEDY, NAME, Job, make_llm
from helpers.engine_checks import assert_nothing_held
from helpers.ports import free_port
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import MODEL, RunningServer, serving, total

from fastdecode.cluster.pool.attempts import MOST_ADDRESSES, Attempts
from fastdecode.core.errors import ConfigError, WorkerLostError
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun, throughput_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("k" * 64)
    path.chmod(0o600)
    return str(path)


def elsewhere(address: str) -> dict[str, Any]:
    """Return settings of an engine with an R-worker that listens at ``address``, and without a port for joining."""
    return {"r_workers": address, "pool_listen": None, "kv_cache_memory": None, "r_threads": None}


def pool_address(engine: LLMEngine) -> str:
    return engine.backend.join_listener.address  # type: ignore[attr-defined]


def num_on(engine: LLMEngine, worker: int) -> int:
    """Return the number of sequences on one R-worker, or 0 where it has not joined yet."""
    return engine.scheduler.snapshot().r_workers[worker].num_sequences if worker < len(engine.r_workers) else 0


def test_one_joins_takes_its_part_and_leaves(folder: Path, key: str) -> None:
    """Over CURVE an R-worker joins, gets some sequences, returns them when told to end, and ends."""
    with make_llm(folder, key_file=key) as llm:
        engine = llm.engine
        run = ThroughputRun()
        engine.on_step = run.steps.append
        job = Job(engine)
        with r_workers.joining(pool_address(engine), "--key-file", key) as (process, address):
            job.step_until(lambda: len(engine.r_workers) == 2, pause_seconds=0.1)
            assert engine.r_workers[1].name == address
            assert list(engine.backend.joined) == [address]  # type: ignore[attr-defined]
            job.step_until(lambda: num_on(engine, 1) > 3)
            process.send_signal(signal.SIGTERM)
            job.step_until(lambda: engine.scheduler.snapshot().present == [0])
            assert engine.scheduler.statistics.preemptions == 0, "all have moved, and none was computed again"
            job.finish()
            assert process.wait(PATIENCE_SECONDS) == 0
            assert "leaving as soon as its sequences have moved" in process.communicate()[0]
            assert throughput_report(run, separate_cores=False)["joined_workers"] == 1
        assert_nothing_held(engine)


def test_an_idle_engine_sees_them_come_and_go(folder: Path) -> None:
    """An idle engine lets one R-worker go at once and notices that another was killed, without any step."""
    with make_llm(folder) as llm:
        engine = llm.engine

        def look_until(*counts: int) -> None:
            """Wait until as many R-workers have joined, were let go and were lost."""
            seen: tuple[int, ...] = ()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while seen != counts and time.monotonic() < deadline:
                engine.look_around()
                changes = engine.membership.changes
                seen = changes.joined, changes.left, changes.lost
                time.sleep(0.05)
            assert seen == counts

        with r_workers.joining(pool_address(engine)) as (process, _):
            look_until(1, 0, 0)
            process.send_signal(signal.SIGTERM)
            look_until(1, 1, 0)
            assert process.wait(PATIENCE_SECONDS) == 0
        with r_workers.joining(pool_address(engine)) as (process, _):
            look_until(2, 1, 0)
            process.kill()
            look_until(2, 1, 1)
        Job(engine).finish()


def test_one_that_stands_still_is_lost_fenced_and_joins_anew(folder: Path) -> None:
    """A short silence changes nothing; after a long one sequences continue elsewhere, and the R-worker joins again.

    The limit is far above the delays that a loaded machine causes.
    """
    with make_llm(folder, silence_seconds=6.0) as llm:
        engine = llm.engine
        lost: list[int] = []
        engine.on_step = lambda record: lost.append(record.lost_workers)
        job = Job(engine)
        with r_workers.joining(pool_address(engine)) as (process, _):
            job.step_until(lambda: num_on(engine, 1) > 3, pause_seconds=0.1)
            process.send_signal(signal.SIGSTOP)
            wake = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {process.pid}"])
            for _ in range(3):
                job.step()
            assert wake.wait() == 0 and not any(lost)
            process.send_signal(signal.SIGSTOP)
            job.step_until(lambda: sum(lost) == 1)  # Only the silence tells of the loss.
            process.send_signal(signal.SIGCONT)
            job.step_until(lambda: num_on(engine, 2) > 0, pause_seconds=0.1)
            job.finish()
            assert engine.scheduler.snapshot().present == [0, 2]
            process.kill()
            assert "the S-worker is gone" in process.communicate()[1]


@pytest.mark.parametrize("kind", ["listening", pytest.param("spawned", marks=pytest.mark.thorough)])
def test_the_last_one_is_waited_for(folder: Path, kind: str) -> None:
    """An R-worker that stopped is taken again, one that was started here is started again, and requests go on."""
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(r_workers.listening()) if kind == "listening" else (None, "")
        place = elsewhere(address) if process else {"r_workers": "spawn:1", "pool_listen": None}
        llm = stack.enter_context(make_llm(folder, wait_for_r_workers=600, **place))
        engine = llm.engine
        job = Job(engine)
        for _ in range(3):
            job.step()
        pid = process.pid if process else r_workers.spawned_pids(llm)[0]
        os.kill(pid, signal.SIGSTOP)
        while not engine.trouble:
            job.step()
        assert "no other R-worker is left" in engine.trouble
        with contextlib.suppress(ProcessLookupError):  # A lost R-worker that was started here is killed.
            os.kill(pid, signal.SIGCONT)
        while engine.trouble:
            job.step()
        job.finish()
        assert engine.membership.changes.lost == engine.membership.changes.joined >= 1
        assert_nothing_held(engine)


def test_the_last_one_is_not_waited_for_for_ever(folder: Path) -> None:
    with (
        r_workers.listening() as (process, address),
        make_llm(folder, wait_for_r_workers=0.5, **elsewhere(address)) as llm,
    ):
        engine = llm.engine
        # The engine keeps the prompt's prefix.
        llm.generate([{"prompt_token_ids": list(range(1, 100))}], GREEDY, use_tqdm=False)
        process.kill()
        while not engine.trouble:
            engine.look_around()
        engine.add_request("a", [1, 2, 3], GREEDY)
        engine.abort_request("a")
        engine.reset_prefix_cache()
        assert engine.scheduler.snapshot().present == [0], "its loss is dealt with once another can take its place"
        with pytest.raises(WorkerLostError, match=r"no other R-worker is left; none joined within 0\.5 s"):
            while True:
                engine.look_around()


@pytest.mark.thorough  # The tests above check the same on an engine.
def test_an_idle_server_waits_for_its_last_one(tmp_path: Path) -> None:
    """The health of an idle server says why it waits, and it serves again with another process at the address.

    The loss and the return are counted.
    """

    def until(server: RunningServer, wanted: int) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := server.request("/health"))[0] != wanted and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found[0] == wanted
        return str(found[1])

    with r_workers.listening() as (process, address):
        flags = ("--r-workers", address, "--max-model-len", "256", "--served-model-name", MODEL)
        flags += ("--wait-for-r-workers", "600")
        with serving(tmp_path, *flags, is_bare=True) as server:
            process.kill()
            assert "no other R-worker is left" in until(server, 503)
            with r_workers.listening(listen=f"tcp://{address}"):
                until(server, 200)
                body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
                assert server.request("/v1/completions", body)[0] == 200
                counts = [total(server, f"fastdecode:r_workers_{name}_total") for name in ("joined", "left", "lost")]
                assert counts == [1, 0, 1]


@pytest.mark.thorough
def test_one_that_joins_takes_the_place_of_one_long_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine forgets R-workers that left, and only the present ones' blocks count."""
    monkeypatch.setattr("fastdecode.scheduler.places.workers.KEPT_GONE", 0)
    with make_llm(folder) as llm:
        engine = llm.engine
        job = Job(engine)
        addresses = set()
        for _ in range(2):
            with r_workers.joining(pool_address(engine)) as (process, address):
                job.step_until(lambda: num_on(engine, 1) > 3, pause_seconds=0.1)
                addresses.add(address)
                assert [engine.r_workers[1].name, engine.backend.workers[1].name] == [address] * 2  # type: ignore[attr-defined]
                process.kill()
                job.step_until(lambda: engine.scheduler.snapshot().present == [0])
        job.finish()
        assert len(addresses) == len(engine.r_workers) == len(engine.scheduler.snapshot().r_workers) == 2
        assert_nothing_held(engine)


@pytest.mark.thorough  # A test above checks the same with an R-worker that listens.
def test_a_spawned_one_that_stands_still_is_killed(folder: Path) -> None:
    with make_llm(folder, r_workers="spawn:2", pool_listen=None) as llm:
        job = Job(llm.engine)
        job.step_until(lambda: num_on(llm.engine, 1) > 3)
        process = llm.engine.backend.workers[1].link.process  # type: ignore[attr-defined]
        process.send_signal(signal.SIGSTOP)
        job.finish()
        assert process.poll() == -signal.SIGKILL


def test_one_of_two_can_be_drained(folder: Path) -> None:
    """The remaining R-worker goes on though it is to be drained as well, since there is no other."""
    with make_llm(folder, r_workers="spawn:2", pool_listen=None) as llm:
        job = Job(llm.engine)
        job.step_until(lambda: num_on(llm.engine, 0) > 3)
        llm.engine.drain_r_worker(0)
        llm.engine.drain_r_worker(1)
        job.step()
        job.finish()
        assert llm.engine.scheduler.snapshot().present == [0, 1]
        with pytest.raises(ConfigError, match=r"there is no R-worker 2; there are \[0, 1\]"):
            llm.engine.drain_r_worker(2)


@pytest.mark.thorough
def test_one_let_go_stays_away_until_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dismissed R-worker asks each second in vain; once it is silent another joins at its address."""
    monkeypatch.setattr("fastdecode.cluster.pool.joining.DISMISSED_SECONDS", 5.0)
    with make_llm(folder) as llm:
        engine = llm.engine
        job, listener = Job(engine), engine.backend.join_listener  # type: ignore[attr-defined]
        with r_workers.joining(pool_address(engine)) as (_, address):
            job.step_until(lambda: num_on(engine, 1) > 3, pause_seconds=0.1)
            engine.drain_r_worker(1)
            job.step_until(lambda: engine.scheduler.snapshot().present == [0])
            deadline = time.monotonic() + 6.5
            job.step_until(lambda: time.monotonic() > deadline, pause_seconds=0.1)
            assert engine.scheduler.snapshot().present == [0]
        job.step_until(lambda: not listener.dismissed_at, pause_seconds=0.1)
        with r_workers.joining(pool_address(engine), "--listen", f"tcp://{address}"):
            job.step_until(lambda: len(engine.scheduler.snapshot().present) == 2, pause_seconds=0.1)
        job.finish()


def test_one_that_ended_at_its_own_wish_is_forgotten_at_once(folder: Path) -> None:
    """A service manager may start it anew, with another version."""
    with make_llm(folder) as llm:
        engine = llm.engine
        job, flags = Job(engine), ()
        for _ in range(2):
            with r_workers.joining(pool_address(engine), *flags) as (process, address):
                job.step_until(lambda: len(engine.scheduler.snapshot().present) == 2, pause_seconds=0.1)
                process.send_signal(signal.SIGTERM)
                job.step_until(lambda: engine.scheduler.snapshot().present == [0])
                assert process.wait(PATIENCE_SECONDS) == 0
                flags = ("--listen", f"tcp://{address}")
        job.finish()


@pytest.mark.thorough
def test_who_is_refused_again_and_again_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is logged once, and the R-worker asks ever less often."""
    with make_llm(folder) as llm:
        job, attempts = Job(llm.engine), llm.engine.backend.join_listener.attempts  # type: ignore[attr-defined]
        with r_workers.joining(pool_address(llm.engine), "--kv-cache-memory", "1000") as (_, address):
            job.step_until(lambda: address in attempts.remembered and attempts.remembered[address].seconds > 2, 0.1)
            job.finish()
        assert caplog.text.count("an R-worker asked to join and cannot") == 1


def test_an_engine_begins_with_those_that_join(folder: Path, key: str) -> None:
    """An engine without R-workers waits for two to join, and goes on with the same tokens when one leaves."""
    pool = f"127.0.0.1:{free_port()}"
    flags = ("--key-file", key)
    with r_workers.joining(pool, *flags) as (first, _), r_workers.joining(pool, *flags):
        settings = {"kv_cache_memory": None, "r_threads": None, "key_file": key}
        with make_llm(folder, r_workers="join:2", pool_listen=pool, **settings) as llm:
            assert len(llm.engine.r_workers) == 2
            assert not llm.engine.backend.joined, "they are no newcomers"  # type: ignore[attr-defined]
            job = Job(llm.engine)
            job.step_until(lambda: num_on(llm.engine, 0) > 3 and num_on(llm.engine, 1) > 3)
            first.send_signal(signal.SIGTERM)
            job.step_until(lambda: len(llm.engine.scheduler.snapshot().present) == 1)
            job.finish()
            assert first.wait(PATIENCE_SECONDS) == 0


def test_attempts_are_spaced_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, now = Attempts(), [0.0]
    monkeypatch.setattr("fastdecode.cluster.pool.attempts.time.monotonic", lambda: now[0])
    waits = []
    for _ in range(7):
        assert attempts.failed("a:1", "its version") == (not waits)
        waits.append(next(seconds for seconds in range(100) if _may_try_after(attempts, now, seconds)))
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert attempts.failed("a:1", "another reason") and attempts.failed("b:1", "its version")
    attempts.succeeded("a:1")
    assert attempts.may_try("a:1") and attempts.failed("a:1", "its version")
    for number in range(2000):
        attempts.failed(f"c:{number}", "")
    assert len(attempts.remembered) == MOST_ADDRESSES and attempts.may_try("a:1")


def _may_try_after(attempts: Attempts, now: list[float], seconds: int) -> bool:
    start, now[0] = now[0], now[0] + seconds
    may = attempts.may_try("a:1")
    now[0] = now[0] if may else start
    return may


def test_who_cannot_join_is_said_and_the_job_goes_on(folder: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused are an R-worker without room for a block, another secret, and something that is no R-worker."""
    with make_llm(folder, key_file=key) as llm:
        job = Job(llm.engine)
        pool = pool_address(llm.engine)
        other = Path(key).with_name("other")
        other.write_text("o" * 64)
        other.chmod(0o600)
        with (
            r_workers.joining(pool, "--key-file", key, "--kv-cache-memory", "1000"),
            r_workers.joining(pool, "--key-file", str(other)),
        ):
            job.step_until(lambda: {"asked", "key"} <= said(caplog), pause_seconds=0.1)
            job.finish()
        assert len(llm.engine.r_workers) == 1


def said(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return which of the refusals have been logged."""
    lines = {"asked": "asked to join and cannot: R-worker", "key": "a peer that does not hold this"}
    return {name for name, line in lines.items() if line in caplog.text}
