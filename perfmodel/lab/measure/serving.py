"""The client of ``bench serve``: sends requests to an OpenAI-compatible server at given times, and records the answers.

It imports neither engine nor torch. The server may be FastDecode's, vLLM's, or another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from fastdecode.core.errors import FastDecodeError
from fastdecode.perfmodel.lab.measure.dataset import WorkItem

UNFINISHED = "not finished"

LONGEST_ERROR = 300
"""Most characters of a server's error that are kept."""

_FAILURES = (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, asyncio.TimeoutError, OSError)
"""Exceptions that mean that the connection or the answer failed."""


class ServerError(FastDecodeError):
    """The server cannot be reached, or does not answer like an OpenAI-compatible server."""


@dataclass(frozen=True)
class Target:
    """The server that gets the requests, and what all requests share.

    ``chat``: a chat with one user message; otherwise a completion. ``body``: additional fields of every request.
    """

    url: str
    model: str
    chat: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ServedRequest:
    """The outcome of one request, with times in seconds of ``time.perf_counter``.

    ``token_seconds``: the arrival of each chunk with new text. ``error``: "" after a normal end. ``queue_seconds``: how
    long the client delayed the request for ``max_concurrency``. Token counts are the server's if it reports them, else
    the workload's prompt tokens and the number of chunks.
    """

    prompt_len: int
    output_len: int = 0
    start_seconds: float = 0.0
    queue_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)
    text: str = ""
    error: str = UNFINISHED

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_seconds[0] - self.start_seconds if self.token_seconds else 0.0

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.token_seconds[-1] - self.start_seconds if self.token_seconds else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [end - start for start, end in zip(self.token_seconds, self.token_seconds[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class _Delta(msgspec.Struct):
    content: str | None = None


class _StreamedChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamedChoice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


async def run_load(
    target: Target,
    items: Sequence[WorkItem],
    max_concurrency: int | None,
    served: list[ServedRequest],
    on_done: Callable[[], object] = lambda: None,
) -> None:
    """Send every item at its arrival time, at most ``max_concurrency`` at once, and wait until all have ended.

    ``served`` gets one entry per request when it is sent, in the order of ``items``.
    """
    room: Any = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    async with session(target) as client:
        start = time.perf_counter()

        async def send(item: WorkItem, request: ServedRequest, due_seconds: float) -> None:
            async with room:
                request.queue_seconds = time.perf_counter() - due_seconds
                await ask(client, target, item, request)
            on_done()

        tasks = []
        for item in items:
            due = start + item.arrival_seconds
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            served.append(ServedRequest(len(item.prompt_token_ids)))
            tasks.append(asyncio.create_task(send(item, served[-1], time.perf_counter())))
        await asyncio.gather(*tasks)


def session(target: Target) -> aiohttp.ClientSession:
    """Return a client session with unlimited connections, which later requests reuse for a few seconds."""
    # A request that takes longer counts as failed
    longest_seconds = 6 * 3600.0
    # An idle connection is reused for this long. Many servers close one after 5 s and lose a request sent just then
    keep_alive_seconds = 2.0
    # Bytes of the read buffer; a line of a stream may be twice as long
    line_bytes = 1 << 20
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_seconds),
        timeout=aiohttp.ClientTimeout(total=longest_seconds, sock_connect=60),
        headers=dict(target.headers),
        read_bufsize=line_bytes,
        trust_env=True,
    )


async def ask(client: aiohttp.ClientSession, target: Target, item: WorkItem, request: ServedRequest) -> None:
    """Send one request and read its stream to the end. A failure is stored in ``request.error``, and not raised."""
    request.start_seconds = time.perf_counter()
    try:
        async with client.post(target.url, json=request_body(target, item)) as response:
            if response.status != 200:
                text = " ".join((await response.text(errors="replace")).split())
                request.error = f"{response.status} {response.reason}: {text}"[:LONGEST_ERROR]
                return
            await _follow(response, request)
    except (*_FAILURES, ValueError, msgspec.MsgspecError) as error:
        request.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]


def request_body(target: Target, item: WorkItem) -> dict[str, Any]:
    """Return the JSON body of the request ``item``. A completion without text sends the prompt's token ids."""
    if target.chat:
        asked = {"messages": [{"role": "user", "content": item.prompt}], "max_completion_tokens": item.output_len}
    else:
        prompt = item.prompt_token_ids if item.prompt is None else item.prompt
        asked = {"prompt": prompt, "max_tokens": item.output_len}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, **asked, **streamed, **target.body}


async def _follow(response: aiohttp.ClientResponse, request: ServedRequest) -> None:
    """Read a stream of server-sent events. The stream ended normally if [DONE] followed a chunk of text."""
    chunks = 0
    async for line in response.content:
        if not line.startswith(b"data:"):  # an empty line between events, or a comment that keeps the connection open
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            request.output_len = request.output_len or chunks
            request.error = "" if request.token_seconds else "the stream ended without a token"
            return
        chunk = _CHUNK.decode(data)
        if chunk.error is not None:
            request.error = f"the stream ended with an error: {chunk.error}"[:LONGEST_ERROR]
            return
        chunks += _take(chunk, request)
    request.error = "the stream ended before its [DONE]"


def _take(chunk: _Chunk, request: ServedRequest) -> bool:
    """Record the stream's ``chunk`` in ``request``; return True if the chunk brought a token.

    The first chunk of a chat only names the role. A token may bring the text "", if its character is not yet complete.
    """
    if chunk.usage is not None:
        request.output_len = chunk.usage.completion_tokens or request.output_len
        request.prompt_len = chunk.usage.prompt_tokens or request.prompt_len
    if not chunk.choices:
        return False
    choice = chunk.choices[0]
    text = choice.delta.content if choice.text is None else choice.text
    if choice.text is None and not text:
        return False
    request.token_seconds.append(time.perf_counter())
    request.text += text or ""
    return True


async def served_model(base_url: str, headers: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the server's description of its first model: ``id``, and if given ``root`` and ``max_model_len``.

    Raise ServerError if the server does not answer.
    """
    url = f"{base_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(headers=dict(headers), trust_env=True) as client,
            client.get(url, timeout=aiohttp.ClientTimeout(total=60)) as response,
        ):
            if response.status != 200:
                raise ServerError(f"{url} answers {response.status} {response.reason}")
            models = (await response.json(content_type=None))["data"]
            return {"id": str(models[0]["id"]), **models[0]}
    except _FAILURES as error:
        raise ServerError(f"cannot reach {url}: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url} does not answer as an OpenAI-compatible server does") from error
