"""The live page shows what the cluster does now. Without an open page it costs no time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import Event
from fastdecode.server.engine_state import RWorkerState, TimedStep
from fastdecode.server.errors import ApiError
from fastdecode.server.observer import EngineWatch
from fastdecode.server.service import Service
from fastdecode.server.streams import SSE_HEADERS

PAGE, STREAM = "/", "/live"

PERIOD_SECONDS = 0.5
"""Seconds between two updates of the page."""

WINDOW_SECONDS = 2.0
"""Seconds over which rates are averaged."""

SHOWN_LAYERS = 8
"""Most layers in the timeline of a step; more would be too narrow to see."""

SHOWN_TOKENS, SHOWN_BLOCKS = 24, 64
"""Most tokens, and most blocks, that the picture of a request's attention sources shows."""


def add_live(app: FastAPI, service: Service) -> None:
    """Add the page and its stream to ``app``.

    The page holds no data, so it needs no API key. The stream that fills it needs the key.
    """
    live = Live(service)

    @app.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        content_policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        html = Path(__file__).with_name("live.html")
        return HTMLResponse(html.read_bytes(), headers={"content-security-policy": content_policy})

    @app.get(STREAM, include_in_schema=False)
    async def stream() -> Response:
        service.check_alive()
        most_viewers = 64
        if live.num_viewers >= most_viewers:
            raise ApiError(503, f"{live.num_viewers} live pages are open: close some", "overloaded_error")
        return LiveResponse(live)


class Live:
    """Reads the engine's state twice a second for all open pages together. Only the event loop may call it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._observer: EngineWatch = service.observer
        self.num_viewers = 0
        self._event = b""
        self._made_seconds = 0.0

    @property
    def ended(self) -> bool:
        """True once the engine is dead or the server is ending."""
        return self._service.dead or self._service.draining

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one open page within the context. While any is open, steps record the timeline."""
        self.num_viewers += 1
        self._observer.watched = True
        try:
            yield
        finally:
            self.num_viewers -= 1
            self._observer.watched = self.num_viewers > 0

    def event(self) -> bytes:
        """Return the engine's state as a server-sent event. All calls within one period return the same event."""
        now = time.perf_counter()
        if now - self._made_seconds > PERIOD_SECONDS / 2:
            found = {"model": self._service.model.names[0], **look(self._observer, now)}
            self._event, self._made_seconds = b"data: " + msgspec.json.encode(found) + b"\n\n", now
        return self._event


class LiveResponse(Response):
    """Sends the engine's state to one page, twice a second, until the page is closed or the server ends."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = asyncio.Event()
        watch = asyncio.create_task(_wait_for_disconnect(receive, closed.set))
        try:
            with self._live.viewer():
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                while not closed.is_set() and not self._live.ended:
                    await send({"type": "http.response.body", "body": self._live.event(), "more_body": True})
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(closed.wait(), PERIOD_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()


async def _wait_for_disconnect(receive: Receive, then: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


def look(observer: EngineWatch, now: float) -> dict[str, Any]:
    """Return the engine's state at ``now`` (``time.perf_counter``) as plain data.

    Utilizations are the busy fraction (0 to 1) of the last WINDOW_SECONDS.
    """
    state, steps = observer.state, _recent(list(observer.steps), now, observer.state.num_running > 0)
    span = _span(steps, now)
    return {
        "running": state.num_running,
        "waiting": state.num_waiting,
        "kv_cache_usage": state.kv_cache_usage,
        "preemptions": state.num_preemptions,
        "output_tokens_per_second": sum(step.record.num_output_tokens for step in steps) / span,
        "steps_per_second": len(steps) / span,
        "s_utilisation": sum(step.record.s_seconds for step in steps) / span,
        "r_workers": [_worker(each, index, steps, span) for index, each in enumerate(state.r_workers)],
        "timeline": timeline(observer.timeline),
        "session": asdict(state.session) if state.session else None,
        "sources": sources(observer.looking),
    }


def _recent(steps: Sequence[TimedStep], now: float, running: bool) -> list[TimedStep]:
    """Return the steps of the WINDOW_SECONDS before ``now``; if there are none, the last step while sequences run."""
    recent = [step for step in steps if step.end_seconds > now - WINDOW_SECONDS]
    return recent or list(steps[-1:] if running else ())


def _span(steps: Sequence[TimedStep], now: float) -> float:
    """Return the seconds to average rates over: from the start of ``steps[0]`` to ``now``, at least WINDOW_SECONDS."""
    began = (step.end_seconds - step.record.wall_seconds for step in steps[:1])
    return max([WINDOW_SECONDS, *(now - each for each in began)])


def _worker(worker: RWorkerState, index: int, steps: Sequence[TimedStep], span: float) -> dict[str, Any]:
    busy = sum(step.record.r_seconds[index] for step in steps if index < len(step.record.r_seconds))
    idle = not steps  # the last step's load is not the present load
    return {
        "name": worker.name,
        "present": worker.present,
        "draining": worker.draining,
        "faulty": worker.faulty,
        "sequences": worker.num_sequences,
        "kv_load": 0 if idle else worker.kv_load,
        "kv_load_limit": worker.kv_load_limit,
        "blocks_used": worker.blocks_used,
        "num_blocks": worker.num_blocks,
        "utilisation": busy / span,
    }


def sources(output: RequestOutput | None) -> dict[str, Any] | None:
    """Return, for a request's last tokens, the blocks they attended to and the weights; None if not recorded.

    The data has token positions and no text, since operators must not read users' texts.
    """
    if output is None or not output.outputs[0].all_sources:
        return None
    found = output.outputs[0].all_sources
    rows = [[] if row is None else row[:SHOWN_BLOCKS] for row in found[max(0, len(found) - SHOWN_TOKENS) :]]
    return {
        "request": output.request_id,
        "num_prompt": len(output.prompt_token_ids),
        "num_tokens": len(found),
        "rows": [[(each.first, each.last, round(each.weight, 4)) for each in row] for row in rows],
    }


def timeline(events: Sequence[Event]) -> dict[str, Any]:
    """Return the events of a step's first layers: lane, state, mini-batch, layer, start and end in milliseconds.

    Lane 0 is the S-worker, lane 1 + i is R-worker i; -1 means no mini-batch or layer.
    """
    num_layers = _num_layers(events)
    shown = [event for event in events if event.interval.layer < SHOWN_LAYERS]
    computed = [event.interval for event in shown if event.interval.layer >= 0]
    if not computed:
        return {"num_layers": 0, "shown_layers": 0, "milliseconds": 0.0, "events": []}
    start, end = min(each.start_seconds for each in computed), max(each.end_seconds for each in computed)
    first = min(event.interval.start_seconds for event in events)
    return {
        "num_layers": num_layers,
        "shown_layers": min(SHOWN_LAYERS, num_layers),
        "milliseconds": (max(event.interval.end_seconds for event in events) - first) * 1e3,
        "events": [
            (
                event.lane, event.interval.state, event.interval.mini_batch, event.interval.layer,
                round((max(event.interval.start_seconds, start) - start) * 1e3, 3),
                round((min(event.interval.end_seconds, end) - start) * 1e3, 3),
            )
            for event in shown
            if event.interval.start_seconds < end and event.interval.end_seconds > start
        ],
    }  # fmt: skip


def _num_layers(events: Sequence[Event]) -> int:
    """Return the number of layers in ``events`` that R-workers attended. The S-worker's events have one more layer."""
    attended = [event.interval.layer for event in events if event.lane > 0]
    return 1 + max(attended) if attended else max((event.interval.layer for event in events), default=0)
