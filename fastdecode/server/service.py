"""The service behind all routes: accepts requests, runs them in the engine, and ends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text_limits import LONG_TEXT_BYTES
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.machine import return_free_memory
from fastdecode.server.answers import AnswerForm, is_refusal, new_id
from fastdecode.server.api_request import KINDS, ApiRequest, Asked, chat_meant, form_of
from fastdecode.server.archive import Archive
from fastdecode.server.engine_thread import EngineThread
from fastdecode.server.errors import ApiError
from fastdecode.server.exchanges import DisconnectedError, Exchange, Reading, ShutdownError
from fastdecode.server.keeper import Keeper
from fastdecode.server.kept_files import KeptRequest, outputs_of
from fastdecode.server.kept_records import request_store
from fastdecode.server.messages_answer import MessageForm
from fastdecode.server.prompt_reader import PromptTokens
from fastdecode.server.protocol import ChatRequest, CompletionRequest, prompts
from fastdecode.server.responses_answer import ResponseForm
from fastdecode.server.served_model import ServedModel
from fastdecode.server.server_settings import ServerSettings
from fastdecode.server.sources import source_form
from fastdecode.sworker.model.tokenizer import check_chat_template

if TYPE_CHECKING:
    from fastdecode.sworker.sampling.grammar import Grammars

logger = logging.getLogger(__name__)


class Service:
    """The served model and its engine, for the routes. Only the event loop may call it."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        engine_thread: EngineThread,
        tracer: Any = None,
    ) -> None:
        """Start the engine, and wait until it is loaded. ``tracer``: a ``RequestTracer``, or None."""
        self.settings = settings
        self.engine_thread = engine_thread
        self.observer = engine_thread.observer
        template = settings.read_chat_template()
        if template is not None:
            check_chat_template(template)
        engine = engine_thread.start()
        self.model = ServedModel(config, settings, engine.s_model, template)
        self.num_r_workers = len(engine.r_workers)
        self._most_sequences = config.max_num_seqs + settings.max_num_queued_reqs
        self._exchanges: dict[Exchange, Any] = {}
        self._tracer = tracer
        self._num_sequences = 0
        self._trim: asyncio.TimerHandle | None = None
        self._short_texts = ThreadPoolExecutor(1, "tokenizer")
        self._long_texts = ThreadPoolExecutor(1, "long-texts")
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._grammars = engine.s_model.grammars if self.model.tokenizer else None
        self.draining = False
        store = request_store(config, engine_thread, engine.journal)
        self.keeper = Keeper(store, settings, self.end) if store else None
        self.archive = Archive(self.keeper, self._remake)
        self.observer.metrics.num_api_requests = lambda: len(self._exchanges)
        if self.keeper:
            keeper = self.keeper
            self.observer.metrics.stored_responses = lambda: (keeper.num_stored, keeper.stored_bytes)

    @property
    def dead(self) -> bool:
        """True once the engine has failed or was stopped, so that no request can run."""
        return self.engine_thread.dead

    @property
    def num_requests(self) -> int:
        """The number of accepted API requests that have not ended, or whose clients still read."""
        return max(len(self._exchanges), self.keeper.num_read if self.keeper else 0)

    def check_open(self) -> None:
        """Raise ApiError 503 unless requests are accepted.

        The server refuses requests while the engine is dead, the server is ending, or the queue is full.
        """
        self.check_alive()
        if self._num_sequences >= self._most_sequences:
            raise ApiError(503, f"{self._num_sequences} sequences run or wait: the queue is full", "overloaded_error")

    async def accept(self, asked: Asked, num_bytes: int, headers: Mapping[str, str]) -> ApiRequest:
        """Check the request ``asked``, queue it for the engine, and return it. The caller must call ``leave`` for it.

        ``num_bytes``: size of its body. ``headers``: may name its trace and, if requests are kept, the request itself.
        If an equal request of that name is kept, return it instead. Raise ApiError, RequestError or ConfigError.
        """
        arrival_seconds = time.perf_counter()
        self.check_open()
        self.model.check_name(asked.model)
        name = self.archive.name_of(headers)
        if known := self.archive.known(name, asked):
            return known
        messages, chat = await self.archive.conversation(asked)
        is_long = num_bytes > LONG_TEXT_BYTES
        params, num_sequences = await self.off_loop(num_bytes, self._count, chat) if is_long else self._count(chat)
        self.check_open()
        self._num_sequences += num_sequences
        try:
            found = await self.off_loop(num_bytes, self.model.reader.read, chat)
            if chat is asked:  # the other APIs allow a token limit beyond the model's length
                self.model.reader.check_room(chat, found)
            await self._prepare(params)
        except BaseException:
            self._num_sequences -= num_sequences
            self.trim_when_idle()
            raise
        if known := self.archive.known(name, asked):  # the same request arrived twice, and the other was queued first
            self._num_sequences -= num_sequences
            return known
        exchange = Exchange(name or new_id(), found, params, arrival_seconds)
        request = ApiRequest(asked, exchange, self._form(asked, chat, exchange), messages)
        self._enter(request, self._tracer.context(headers) if self._tracer else None)
        if self.keeper:
            await self.keeper.write(request)
        self.engine_thread.submit(exchange)
        return request

    def restore(self) -> None:
        """Queue the unfinished requests that the previous server left in the store."""
        for kept in self.keeper.unfinished() if self.keeper else ():
            try:
                request = self._remake(kept)
            except (ApiError, RequestError, ConfigError, msgspec.ValidationError) as error:
                logger.warning("journal: request %s cannot be continued: %s", kept.answer_id, error)
                continue
            self._num_sequences += request.exchange.num_sequences
            self._enter(request, None)
            self.engine_thread.submit(request.exchange)
            if self.keeper:
                self.keeper.left(request)

    def leave(self, request: ApiRequest, reading: Reading) -> None:
        """End ``reading``, whose client is answered or gone. Unless requests are kept, abort what still runs."""
        request.exchange.close(reading)
        if self.keeper:
            self.keeper.left(request)
            return
        if not request.exchange.finished:
            request.exchange.fail(DisconnectedError("the client is gone"))
        self.end(request.exchange)

    def end(self, exchange: Exchange) -> None:
        """Abort what still runs of ``exchange``, and send its trace."""
        if exchange in self._exchanges:
            context = self._exchanges.pop(exchange)
            self._num_sequences -= exchange.num_sequences
            self.engine_thread.release(exchange)
            self.trim_when_idle()
            if self._tracer:
                self._tracer.ended(exchange, context)

    def trim_when_idle(self) -> None:
        """Return free memory to the operating system once no request has come for a while."""
        if self._trim:
            self._trim.cancel()
        # Seconds without requests after which free memory goes back to the system
        idle_seconds = 2.0
        self._trim = asyncio.get_running_loop().call_later(idle_seconds, self._trim_unless_busy)

    def check_alive(self) -> None:
        """Raise ApiError 503 if the engine is dead or the server is ending."""
        if self.dead:
            raise ApiError(503, "the engine has failed", "server_error")
        if self.draining:
            raise ApiError(503, "the server is shutting down", "server_error")

    def fail_all(self) -> None:
        """Fail every request with ShutdownError, since the server ends."""
        for exchange in list(self._exchanges):
            exchange.fail(ShutdownError("the server was shut down before the answer was complete"))

    def close(self) -> None:
        """Close the keeper, since the server ends: it starts no further writes."""
        if self.keeper:
            self.keeper.close()

    async def off_loop(self, num_bytes: int, function: Any, *args: Any) -> Any:
        """Call the slow ``function`` (a template or tokenizer) in another thread, and return its result.

        Requests with large bodies (``num_bytes``) share one thread, so that small ones need not wait for them.
        """
        lane = self._long_texts if num_bytes > LONG_TEXT_BYTES else self._short_texts
        return await asyncio.get_running_loop().run_in_executor(lane, function, *args)

    def read_vocabulary_soon(self) -> None:
        """Start to read the vocabulary for structured outputs, if the grammar library is installed.

        Reading stops all threads for a while, so it must come before the first request has a stream.
        """
        if self._grammars:
            self._compiling.submit(_read_vocabulary, self._grammars)

    def _trim_unless_busy(self) -> None:
        if not self._exchanges:
            self._long_texts.submit(return_free_memory)
            logger.info("idle: returning free memory to the system")

    def _count(self, request: CompletionRequest | ChatRequest) -> tuple[SamplingParams, int]:
        """Return the sampling parameters of ``request``, and how many sequences the engine runs for it."""
        params = self.model.readings.sampling_params(request, self.model.generation_defaults)
        return params, params.n * (1 if isinstance(request, ChatRequest) else len(prompts(request)))

    def _enter(self, request: ApiRequest, context: Any) -> None:
        self._exchanges[request.exchange] = context
        if self.keeper:
            self.keeper.hold(request)

    def _form(
        self, asked: Asked, chat: ChatRequest | CompletionRequest, exchange: Exchange, created: int | None = None
    ) -> AnswerForm | ResponseForm | MessageForm:
        echoes = (
            self.model.reader.texts(exchange.prompts) if isinstance(asked, CompletionRequest) and asked.echo else ()
        )
        name, tokenizer = self.model.names[0], self.model.tokenizer
        params, reading = exchange.params, self.model.readings.of(chat, exchange.prompts)
        sources = source_form(tokenizer, chat, exchange.prompts, params)
        return form_of(
            asked, chat, params, name, exchange.exchange_id, echoes, created, tokenizer, reading, sources
        )  # fmt: skip

    def _remake(self, kept: KeptRequest) -> ApiRequest:
        """Return the stored request ``kept`` as an ApiRequest, with outputs if it has ended. It is not queued yet."""
        asked: Asked = msgspec.convert(kept.body, KINDS[kept.route])
        chat = chat_meant(asked, kept.messages)
        found = [PromptTokens(*each) for each in kept.prompts]
        params = self.model.readings.sampling_params(chat, self.model.generation_defaults)
        exchange = Exchange(kept.answer_id, found, params)
        if kept.outputs is not None:
            exchange.outputs = list(outputs_of(kept))
        elif kept.failure:
            exchange.error = ApiError(kept.failure.status, kept.failure.message, kept.failure.kind)
        return ApiRequest(asked, exchange, self._form(asked, chat, exchange, kept.created), kept.messages)

    async def _prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of ``params`` in the grammar thread: all streams would wait if the engine compiled it."""
        if params.structured_outputs and self._grammars:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiling, self._grammars.prepare, params.structured_outputs)


def _read_vocabulary(grammars: Grammars) -> None:
    try:
        grammars.read_vocabulary()
    except (RequestError, ConfigError) as error:  # only requests that need the vocabulary report this
        logger.debug("no structured outputs: %s", error)


def check_finished(outputs: Sequence[RequestOutput | None]) -> list[RequestOutput]:
    """Return the outputs of a finished exchange after checking that none has failed.

    Raise ApiError 500 if the model failed, 400 if the request allowed no further token.
    """
    found = [output for output in outputs if output is not None]
    for each in (each for output in found for each in output.outputs if each.finish_reason == "error"):
        reason = str(each.stop_reason)
        raise ApiError(400, reason) if is_refusal(reason) else ApiError(500, reason, "server_error")
    return found
