"""A prefill worker: the S-worker's model, and connections for prompts, keys and values.

Only this file and the engine import both the S-worker's and the R-workers' code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastdecode.api.config import EngineConfig
from fastdecode.cluster.prefill.jobs import JobCancelledError, PromptJob
from fastdecode.cluster.prefill.server import PrefillModel, PrefillServer
from fastdecode.cluster.r_worker.host import attends_in, make_layer_cache
from fastdecode.cluster.wire.handshake import Security
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker import SModel, set_threads
from fastdecode.sworker.part.attention import PartAttention, StoredAttention, TorchAttention
from fastdecode.sworker.part.prefill_part import compute_part
from fastdecode.sworker.part.states import PartStates

TICK_SECONDS = 0.2
"""Seconds to wait for a prompt before checking for signals and a closed S-worker connection."""

logger = logging.getLogger(__name__)


class PrefillWorker:
    """Computes parts of prompts from S-workers with one model, one part after another."""

    def __init__(self, config: EngineConfig, num_threads: int, cores: tuple[int, ...], security: Security) -> None:
        """Load the model in ``config``. The process must already be bound to ``cores``."""
        set_threads(num_threads)
        self._s_model = SModel(replace(config, skip_tokenizer_init=True))
        self._num_threads, self._cores = num_threads, cores
        self._means: tuple[PartAttention, PartStates] | None = None
        self._attends_as: tuple[KVLayout, bool] | None = None
        model = self._s_model
        self._server = PrefillServer(
            PrefillModel(
                name=model.identity,
                layout=model.layout,
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                num_threads=num_threads,
                cores=cores,
                device=model.device_name,
            ),
            security,
        )

    def listen(self, host: str, port: int) -> str:
        """Accept S-workers; return the address on which this process listens, "host:port". Raise OSError on failure."""
        return self._server.listen(host, port)

    def run(self, between_prompts: Callable[[bool], None] = lambda is_free: None) -> None:
        """Compute prompts until an exception ends the loop.

        ``between_prompts`` is called after each prompt, or every TICK_SECONDS without one; True means no S-worker is
        connected.
        """
        try:
            while True:
                job = self._server.next_job(TICK_SECONDS)
                if job is not None:
                    self._compute(job)
                between_prompts(self._server.is_free)
        finally:
            self._server.close()
            self._close()

    def _compute(self, job: PromptJob) -> None:
        start, prompt = time.perf_counter(), job.prompt
        try:
            attention, states = self._means_for(job)
            logits = compute_part(
                self._s_model.code,
                attention,
                job.token_ids.tolist(),
                prompt.start,
                prompt.is_last,
                job.exchange,
                lambda layer, rows: job.advance(layer, partial(states.advance, layer, rows, start=prompt.start)),
            )
            self._server.finish(job, time.perf_counter() - start, logits)
        except JobCancelledError:
            return
        except (RuntimeError, MemoryError, ConnectionError) as error:  # torch raises RuntimeError when memory runs out
            logger.warning("job %d failed: %s", prompt.job_id, error)
            self._server.fail(job, str(error).splitlines()[0] if str(error) else type(error).__name__)

    def _means_for(self, job: PromptJob) -> tuple[PartAttention, PartStates]:
        """Return objects that compute attention and recurrent states for ``job``; reuse the last ones if they fit.

        Torch computes attention on a GPU and for "tsp", whose rows are computed against later tokens too, then masked.
        """
        wanted = job.layout, self._s_model.on_gpu or job.prompt.method == "tsp"
        if self._means is None or self._attends_as != wanted:
            self._close()
            self._means, self._attends_as = self._make_means(*wanted), wanted
        return self._means

    def _close(self) -> None:
        for each in self._means or ():
            each.close()

    def _make_means(self, layout: KVLayout, by_torch: bool) -> tuple[PartAttention, PartStates]:
        if not by_torch and not attends_in(layout.isa):
            logger.warning(
                "R-workers compute attention with %s instructions, which this processor lacks: tokens may differ",
                layout.isa,
            )
        longest, threads, cores = self._s_model.max_model_len, self._num_threads, self._cores
        make_cache = partial(make_layer_cache, num_tokens=longest, num_threads=threads, cores=cores)
        attention = (TorchAttention if by_torch else StoredAttention)(layout, make_cache)
        return attention, PartStates(layout, make_cache)
