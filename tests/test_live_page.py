"""The live page: its data, that it costs nothing while closed, and its look in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers.browser import CHROMIUM, Tab, browser
from helpers.servers import RunningServer, serving
from starlette.types import Message

from fastdecode.core.metrics import HOST, MODEL, R_BUSY, WAIT, Event, Interval, StepRecord
from fastdecode.server.engine_state import EngineState, RWorkerState, TimedStep
from fastdecode.server.live import SHOWN_LAYERS, Live, LiveResponse, look, timeline
from fastdecode.server.observer import EngineWatch

pytestmark = pytest.mark.slow

STEP = StepRecord(
    is_decode=True, overlapped=True, num_tokens=30, num_output_tokens=30, kv_loads=(200, 100), wall_seconds=0.5,
    s_seconds=0.3, wait_seconds=0.15, host_seconds=0.05, r_seconds=(0.2, 0.1), transfer_seconds=(0.01, 0.01),
    kv_bytes_read=1,
)  # fmt: skip


def observer(*end_seconds: float, running: int = 7) -> EngineWatch:
    """Return a watch of steps that ended at these times, on two R-workers and one that has just joined."""
    found = EngineWatch("m")
    found.steps.extend(TimedStep(end, STEP) for end in end_seconds)
    workers = (RWorkerState("a", kv_load=200, kv_load_limit=400), RWorkerState("b", kv_load=100), RWorkerState("new"))
    found.state = EngineState(99.0, num_running=running, num_waiting=2, r_workers=workers)
    return found


def test_rates_are_means_over_the_last_seconds() -> None:
    seen = look(observer(90.0, 98.5, 99.0, 99.5), now=100.0)
    assert (seen["running"], seen["waiting"]) == (7, 2)
    assert seen["output_tokens_per_second"] == pytest.approx(45.0)  # Three steps of 30 tokens ended in two seconds.
    assert seen["s_utilisation"] == pytest.approx(0.45)
    assert [each["utilisation"] for each in seen["r_workers"]] == pytest.approx([0.3, 0.15, 0.0])
    assert [each["kv_load"] for each in seen["r_workers"]] == [200, 100, 0]
    json.dumps(seen, allow_nan=False)


def test_a_step_that_began_before_counts_from_its_beginning() -> None:
    """Utilisation therefore never exceeds 1, and a long step is not taken for idleness."""
    slow = observer()
    slow.steps.append(TimedStep(99.0, replace(STEP, wall_seconds=4.0, s_seconds=4.0)))
    assert look(slow, now=99.0)["s_utilisation"] == pytest.approx(1.0)
    assert look(slow, now=99.0)["output_tokens_per_second"] == pytest.approx(7.5)
    assert look(slow, now=103.0)["s_utilisation"] == pytest.approx(0.5)  # The step runs, and nothing newer has ended.


def test_an_idle_engine_attends_nothing() -> None:
    seen = look(observer(90.0, running=0), now=100.0)
    assert seen["output_tokens_per_second"] == seen["s_utilisation"] == 0
    assert [each["kv_load"] for each in seen["r_workers"]] == [0, 0, 0]
    assert look(EngineWatch("m"), now=100.0)["r_workers"] == []


def test_the_timeline_is_of_the_first_layers() -> None:
    """The timeline covers the first layers, in milliseconds from the first layer's start."""
    events = [Event(0, Interval(HOST, -1, -1, 9.0, 10.0)), Event(0, Interval(MODEL, 0, -1, 10.0, 10.5))]
    for layer in range(SHOWN_LAYERS + 3):
        start = 10.5 + layer
        events += [
            Event(0, Interval(MODEL, 1, layer, start, start + 0.25)),
            Event(2, Interval(R_BUSY, 1, layer, start + 0.25, start + 1.0)),
            Event(0, Interval(WAIT, -1, -1, start + 0.25, start + 1.0)),
        ]
    seen = timeline(events)
    assert (seen["num_layers"], seen["shown_layers"]) == (SHOWN_LAYERS + 3, SHOWN_LAYERS)
    assert seen["milliseconds"] == pytest.approx((11.5 + SHOWN_LAYERS + 2 - 9.0) * 1e3)
    assert seen["events"][0] == (0, MODEL, 1, 0, 0.0, 250.0)
    assert seen["events"][1] == (2, R_BUSY, 1, 0, 250.0, 1000.0)
    assert {event[3] for event in seen["events"]} == {-1, *range(SHOWN_LAYERS)}
    assert max(event[5] for event in seen["events"]) == pytest.approx(SHOWN_LAYERS * 1e3)
    # The S-worker's last interval comes after the last layer.
    after = Interval(MODEL, 1, SHOWN_LAYERS + 3, 100.0, 100.5)
    assert timeline([*events, Event(0, after)])["num_layers"] == SHOWN_LAYERS + 3
    assert timeline([])["events"] == timeline(events[:2])["events"] == []


def test_the_engine_records_only_while_a_page_is_open() -> None:
    """Two pages are open; one is closed by its client, the other ends with the server."""
    found = observer()
    model = SimpleNamespace(names=("m",))
    service: Any = SimpleNamespace(observer=found, model=model, dead=False, draining=False)
    live = Live(service)

    async def open_and_close() -> None:
        sent: list[list[Message]] = [[], []]
        closed = asyncio.Event()

        async def receive(number: int) -> Message:
            await (closed.wait() if number else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        async def page(number: int) -> None:
            async def send(message: Message) -> None:
                sent[number].append(message)

            await LiveResponse(live)({}, lambda: receive(number), send)

        assert not found.watched
        pages = [asyncio.create_task(page(number)) for number in (0, 1)]
        await asyncio.sleep(0.05)
        assert found.watched and live.num_viewers == 2
        assert sent[0][1]["body"] == sent[1][1]["body"]  # Both pages get the same look at the engine.
        assert json.loads(sent[0][1]["body"].removeprefix(b"data: "))["running"] == 7
        closed.set()
        await pages[1]
        assert found.watched and live.num_viewers == 1
        service.draining = True
        await asyncio.wait_for(pages[0], 5)
        assert not sent[0][-1]["more_body"]

    asyncio.run(open_and_close())
    assert not found.watched and live.num_viewers == 0


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian's package chromium)")
def test_the_page_in_a_browser_while_an_r_worker_dies(tmp_path: Path) -> None:
    """The page asks for the key, fits a phone, draws a step, and names the R-worker that is lost."""
    flags = ["--r-workers", "spawn:3", "--num-mini-batches", "2", "--s-threads", "1", "--r-threads", "1"]
    with serving(tmp_path, *flags, FASTDECODE_API_KEY="secret") as server:
        assert server.request("/live")[0] == 401
        stop = threading.Event()
        clients = [threading.Thread(target=keep_busy, args=(server, stop)) for _ in range(6)]
        for client in clients:
            client.start()
        try:
            asyncio.run(watch_in_browser(server, tmp_path / "phone.png"))
        finally:
            stop.set()
            for client in clients:
                client.join()


def keep_busy(server: RunningServer, stop: threading.Event) -> None:
    """Send one request after another until told to stop."""
    asked = {"model": "", "prompt": "def f(x):", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    asked["attention_sources"] = 64
    asked["model"] = server.request("/v1/models", headers={"authorization": "Bearer secret"})[1]["data"][0]["id"]
    while not stop.is_set():
        status, answer = server.request("/v1/completions", asked, {"authorization": "Bearer secret"})
        assert status == 200, answer


async def watch_in_browser(server: RunningServer, picture: Path) -> None:
    async with browser() as tab:
        await tab.open(server.url + "/", 390, 844)
        await tab.wait_for("$('status').textContent === 'API key wanted' && !$('ask').hidden")
        empty = (
            "[...document.querySelectorAll('.bar i, #timeline')].every(each => !each.offsetWidth || !each.offsetHeight)"
        )
        assert await tab.ask(empty) and await tab.ask("$('step').textContent") == "none yet"
        await type_key(tab, "wrong")
        await tab.wait_for("!$('refused').hidden")
        await type_key(tab, "secret")
        await tab.wait_for("$('status').textContent === 'live' && $('ask').hidden")
        await tab.wait_for("Number($('rate').textContent) > 0 && last.timeline.events.length > 0")
        await tab.wait_for("[1, 2, 3].every(lane => last.timeline.events.some(event => event[0] === lane))")
        assert await tab.ask("document.documentElement.scrollWidth") == 390
        lost = next(child for child in psutil.Process(server.process.pid).children() if "r-worker" in child.cmdline())
        os.kill(lost.pid, signal.SIGKILL)
        await tab.wait_for("$('log').textContent.includes('lost spawn-')")
        await tab.wait_for("!$('gone').hidden && $('gone').textContent.includes('spawn-')")
        assert await tab.ask("document.querySelectorAll('.worker').length") == 2
        await tab.wait_for("last.output_tokens_per_second > 0")
        await tab.wait_for("!$('looks').hidden && last.sources.rows.length > 5 && $('strip').offsetHeight > 60")
        await tab.picture(picture)
        assert picture.stat().st_size > 20_000
        await tab.open(f"{server.url}/?key=secret", 1280, 800, dark=True)
        await tab.wait_for("typeof last === 'object' && last !== null && $('status').textContent === 'live'")
        assert await tab.ask("location.search") == ""
        assert await tab.ask("$('gone').textContent.includes('spawn-') && $('log').textContent.includes('nothing')")
        server.process.terminate()
        await tab.wait_for("$('status').textContent === 'no connection'")
        states = "[...document.querySelectorAll('.worker .pill, #rate')].map(each => each.textContent).join()"
        assert await tab.ask(states) == "–,unknown,unknown"
        assert await tab.ask("[...document.querySelectorAll('.bar i')].every(each => !each.offsetWidth)")


async def type_key(tab: Tab, key: str) -> None:
    await tab.ask(f"$('key').value = '{key}'; $('ask').querySelector('form').requestSubmit()")
