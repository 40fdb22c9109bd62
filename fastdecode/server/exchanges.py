"""What the event loop has under way: an API request's prompts in the engine, and their newest outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import FastDecodeError
from fastdecode.server.prompt_reader import PromptTokens


class EngineDeadError(FastDecodeError):
    """The engine has failed, and no request can run any more."""


class ShutdownError(FastDecodeError):
    """The server ends before the request did."""


class DisconnectedError(FastDecodeError):
    """The client is gone; nothing reads the answer."""


class Exchange:
    """One API request and its answer: an engine request per prompt, all with the same parameters.

    Belongs to the event loop, but for what never changes. Outputs hold all that a request has produced, so only the
    newest of each is kept: a client that reads slowly costs no memory.
    """

    def __init__(
        self,
        exchange_id: str,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        arrival_seconds: float | None = None,
    ) -> None:
        """``arrival_seconds`` of ``time.perf_counter`` (now)."""
        self.exchange_id = exchange_id
        self.arrival_seconds = time.perf_counter() if arrival_seconds is None else arrival_seconds
        self.prompts = prompts
        self.params = params
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._news: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for it."""
        return len(self.prompts) * self.params.n

    @property
    def request_ids(self) -> list[str]:
        """The engine's, one per prompt."""
        return [f"{self.exchange_id}-{index}" for index in range(len(self.prompts))]

    @property
    def finished(self) -> bool:
        """True when every prompt's last output has come."""
        return all(output is not None and output.finished for output in self.outputs)

    @property
    def error(self) -> Exception | None:
        """What it failed with."""
        return self._error

    def put(self, index: int, output: RequestOutput) -> None:
        """The newest output of prompt ``index``."""
        self.outputs[index] = self._news[index] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """``news`` raises ``error`` from now on."""
        self._error = self._error or error
        self._changed.set()

    async def news(self) -> dict[int, RequestOutput]:
        """Wait for outputs that were not handed out yet, by prompt; raises what the exchange failed with."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, {}
        return news
