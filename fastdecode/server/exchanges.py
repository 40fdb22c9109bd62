"""The event loop's exchanges. Each follows one API request's prompts in the engine and keeps their newest outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import FastDecodeError
from fastdecode.server.prompt_reader import PromptTokens


class EngineDeadError(FastDecodeError):
    """Raised to readers after the engine has failed: no request can run any more."""


class ShutdownError(FastDecodeError):
    """Raised to readers if the server shuts down before the request has finished."""


class DisconnectedError(FastDecodeError):
    """Raised to a reading whose client has disconnected."""


class Exchange:
    """One API request and its answer: an engine request per prompt, with the same parameters.

    Only the event loop may use it, except for constant fields. An output has all that a request has produced, so only
    the newest is kept, and a slow client costs no memory. ``on_end``: called once, when all outputs came or the request
    failed.
    """

    def __init__(
        self,
        exchange_id: str,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        arrival_seconds: float | None = None,
    ) -> None:
        """``arrival_seconds``: when the request arrived, on ``time.perf_counter``; None means the present time."""
        self.exchange_id = exchange_id
        self.arrival_seconds = time.perf_counter() if arrival_seconds is None else arrival_seconds
        self.prompts = prompts
        self.params = params
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self.on_end: Callable[[Exchange], None] = lambda exchange: None
        self.error: Exception | None = None
        self._readings: list[Reading] = []

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the engine runs for this exchange: prompts times ``params.n``."""
        return len(self.prompts) * self.params.n

    @property
    def request_ids(self) -> list[str]:
        """The engine's request ids, one per prompt."""
        return [f"{self.exchange_id}-{index}" for index in range(len(self.prompts))]

    @property
    def finished(self) -> bool:
        """True if every prompt's last output has come."""
        return all(output is not None and output.finished for output in self.outputs)

    @property
    def num_readings(self) -> int:
        """The number of open readings, one per client that receives this answer."""
        return len(self._readings)

    def put(self, index: int, output: RequestOutput) -> None:
        """Store the newest output of prompt ``index``."""
        self.outputs[index] = output
        for reading in self._readings:
            reading.put(index, output)
        if self.error is None and self.finished:
            self.on_end(self)

    def fail(self, error: Exception) -> None:
        """Make readings raise ``error`` from now on. The exchange has failed, unless all outputs have come."""
        for reading in self._readings:
            reading.fail(error)
        if self.error is None and not self.finished:
            self.error = error
            self.on_end(self)

    def read(self) -> Reading:
        """Return a new reading that starts at the first output. The caller must ``close`` it."""
        self._readings.append(reading := Reading(self))
        return reading

    def close(self, reading: Reading) -> None:
        """End ``reading``, whose client is answered or gone. A second call has no effect."""
        self._readings = [each for each in self._readings if each is not reading]


class Reading:
    """One client's reading of the outputs of an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._news = {index: output for index, output in enumerate(exchange.outputs) if output is not None}
        self._error = exchange.error
        self._changed = asyncio.Event()
        if self._news or self._error:
            self._changed.set()

    def put(self, index: int, output: RequestOutput) -> None:
        """Store the newest output of prompt ``index``."""
        self._news[index] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Make ``news`` raise ``error`` from now on."""
        self._error = self._error or error
        self._changed.set()

    async def news(self) -> dict[int, RequestOutput]:
        """Wait for new outputs and return them by prompt index. Raise the error of a failed exchange."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, {}
        return news
