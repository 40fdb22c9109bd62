"""A server under load: clients that leave, an R-worker that is killed, the end of the server and of its engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.examples import SEES_ALL
from helpers.processes import PATIENCE_SECONDS
from helpers.servers import RunningServer, Streamed, serving, stream, total, wait_until_idle

from fastdecode import LLM, SamplingParams

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 150 if SEES_ALL else 90}
PROMPTS = [f"def f{number}(self, x):\n    " for number in range(8)]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(max_model_len=256, kv_cache_memory="64MiB", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**LONG), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture
def two_r_workers(tmp_path: Path) -> Iterator[RunningServer]:
    flags = ("--r-workers", "spawn:2", "--wait-for-r-workers", "0", "--max-num-seqs", "64", "--shutdown-timeout", "60")
    with serving(tmp_path, *flags) as running:
        yield running


def r_workers(server: RunningServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


async def streams(server: RunningServer, count: int, leaving: dict[int, int]) -> list[Streamed]:
    asked = [{**LONG, "prompt": PROMPTS[number % len(PROMPTS)]} for number in range(count)]
    return await asyncio.gather(*(stream(server, body, leaving.get(i)) for i, body in enumerate(asked)))


@pytest.mark.thorough  # test_kubernetes_live.py kills R-workers under load, too.
def test_clients_that_leave_and_r_workers_that_die_disturb_no_other(
    two_r_workers: RunningServer, expected: list[str]
) -> None:
    """A third of the clients leaves within streams, and no file, task or block is kept.

    Then an R-worker is killed, and at last the other one, which ends the engine.
    """
    server = two_r_workers
    wait_until_idle(server)
    files, tasks = psutil.Process(server.process.pid).num_fds(), total(server, "fastdecode:server_tasks")
    chosen = random.Random(1)
    num_clients = 80 if SEES_ALL else 40
    leaving = {number: chosen.randint(1, 60) for number in chosen.sample(range(num_clients), num_clients // 3)}
    found = asyncio.run(streams(server, num_clients, leaving))
    for number, each in enumerate(found):
        text = expected[number % len(PROMPTS)]
        assert each.status == 200 and not each.error
        assert text.startswith(each.text) if number in leaving else (each.text, each.finish_reason) == (text, "length")
    wait_until_idle(server)
    deadline = time.monotonic() + PATIENCE_SECONDS  # Ended connections are closed a little later.
    while psutil.Process(server.process.pid).num_fds() > files + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert psutil.Process(server.process.pid).num_fds() <= files + 2
    assert 1 <= tasks <= 8 and total(server, "fastdecode:server_tasks") <= tasks + 1
    killed = asyncio.run(_kill_one_under_load(server))
    assert [(each.text, each.finish_reason) for each in killed] == [(text, "length") for text in expected]
    wait_until_idle(server)
    assert total(server, "fastdecode:r_workers_alive") == 1
    asyncio.run(_kill_the_last_under_load(server))
    assert server.process.wait(PATIENCE_SECONDS) == 1
    assert "the engine has failed" in (log := server.log.read_text()) and "Traceback" not in log


async def _begin(server: RunningServer, prompts: list[str]) -> list[asyncio.Task[Streamed]]:
    """Start streams, and return them once each has had its first event."""
    started = [asyncio.Event() for _ in prompts]
    bodies = [{**LONG, "prompt": prompt} for prompt in prompts]
    tasks = [
        asyncio.create_task(stream(server, body, started=event)) for body, event in zip(bodies, started, strict=True)
    ]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), PATIENCE_SECONDS)
    return tasks


async def _kill_one_under_load(server: RunningServer) -> list[Streamed]:
    tasks = await _begin(server, PROMPTS)
    os.kill(r_workers(server)[0].pid, signal.SIGKILL)
    return await asyncio.gather(*tasks)


async def _kill_the_last_under_load(server: RunningServer) -> None:
    """Check that streams end with an error, and the health check fails, before the process ends."""
    tasks = await _begin(server, PROMPTS[:2])
    for each in r_workers(server):
        each.kill()
    for each in await asyncio.gather(*tasks):
        assert "the engine has failed" in each.error
    assert server.request("/health")[0] == 503
    assert server.request("/v1/completions", {"prompt": "x"})[0] == 503


def test_a_server_that_is_told_to_end_drains(tmp_path: Path, expected: list[str]) -> None:
    """Accepted requests end, later ones get 503, and a full queue refuses requests."""
    flags = ["--max-num-seqs", "4", "--max-num-queued-reqs", "4", "--shutdown-timeout", "60"]
    with serving(tmp_path, *flags) as server:
        found = asyncio.run(_overload(server))
        accepted = [(number, each) for number, each in enumerate(found) if each.status == 200]
        assert 8 <= len(accepted) < 24
        for number, each in accepted:
            assert (each.text, each.finish_reason) == (expected[number % len(PROMPTS)], "length")
        assert all("queue is full" in each.error for each in found if each.status == 503)
        assert {each.status for each in found} == {200, 503}
        wait_until_idle(server)
        drained = asyncio.run(_terminate(server))
        assert [(each.text, each.finish_reason) for each in drained] == [(text, "length") for text in expected[:4]]
        assert server.process.wait(PATIENCE_SECONDS) == 0


async def _overload(server: RunningServer) -> list[Streamed]:
    return await streams(server, 24, {})


async def _terminate(server: RunningServer) -> list[Streamed]:
    tasks = await _begin(server, PROMPTS[:4])
    server.process.terminate()
    refused = await stream(server, {"prompt": "x"})
    while refused.status == 200:  # The signal arrives a little later.
        refused = await stream(server, {"prompt": "x"})
    assert refused.status == 503 and "shutting down" in refused.error
    return await asyncio.gather(*tasks)


def test_what_takes_too_long_is_broken_off(tmp_path: Path) -> None:
    """After --shutdown-timeout streams end with an error; an engine that cannot start gives one line."""
    with serving(tmp_path, "--shutdown-timeout", "0") as server:

        async def run() -> Streamed:
            (task,) = await _begin(server, PROMPTS[:1])
            server.process.send_signal(signal.SIGINT)
            return await task

        broken = asyncio.run(run())
        assert "shut down" in broken.error or broken.finish_reason == "length"
        assert server.process.wait(PATIENCE_SECONDS) == 130
