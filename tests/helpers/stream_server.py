"""A small OpenAI-compatible server over real HTTP, whose streams are known in advance."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from helpers.processes import PATIENCE_SECONDS

Chunk = dict[str, Any] | bytes | float
"""A JSON event, raw bytes, or seconds to wait."""


class StreamServer:
    """Answers every request with the chunks of ``script(body)``; an int is an HTTP status instead.

    ``asked``: request bodies in order. ``most_at_once``: most concurrent requests.
    """

    def __init__(self, script: Callable[[dict[str, Any]], list[Chunk] | int], model: dict[str, Any]) -> None:
        self.script, self.model = script, model
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._at_once = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.model]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append({"path": request.path, **body})
        self.headers.append(dict(request.headers))
        script = self.script(body)
        if isinstance(script, int):
            return web.json_response({"error": {"message": "the queue is full"}}, status=script)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for chunk in script:
                await self._send(response, chunk)
            return response
        finally:
            self._at_once -= 1

    async def _send(self, response: web.StreamResponse, chunk: Chunk) -> None:
        if isinstance(chunk, float):
            await asyncio.sleep(chunk)
        else:
            await response.write(
                chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk).encode() + b"\n\n"
            )


DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> Chunk:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def completion(*texts: str, gap: float = 0.0) -> list[Chunk]:
    """Return one event per text, with ``gap`` seconds before each."""
    return [part for text in texts for part in (gap, {"choices": [{"index": 0, "text": text}], "usage": None})]


@contextmanager
def running(
    script: Callable[[dict[str, Any]], list[Chunk] | int], model: dict[str, Any] | None = None
) -> Iterator[StreamServer]:
    """Run the server on a free port in its own thread within the context."""
    server = StreamServer(script, model or {"id": "tiny"})
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/v1/models", server.models), web.post("/v1/{kind:.*}", server.generate)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = "http://{}:{}".format(*runner.addresses[0][:2])
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        if not ready.wait(PATIENCE_SECONDS):
            raise TimeoutError("the test's server did not start")
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
