"""Prefill workers for tests: threads of this process behind real sockets, or processes as a user starts them."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill
from fastdecode.prefills.worker import PrefillWorker
from helpers.r_workers import FASTDECODE

NO_KEY = Security()


class _End(Exception):
    """Raised to end a worker's thread."""


@contextlib.contextmanager
def threads(folder: Path, count: int, security: Security = NO_KEY, **settings: Any) -> Iterator[str]:
    """Run ``count`` workers with their own models; yield their addresses in the form of ``--prefill-workers``."""
    defaults: dict[str, Any] = {"device": "cpu", "max_model_len": 512}
    config = EngineConfig(model=str(folder), **{**defaults, **settings})
    workers = [PrefillWorker(config, 1, (0,), security) for _ in range(count)]
    ended = threading.Event()

    def between_prompts(is_free: bool) -> None:
        if ended.is_set():
            raise _End

    def run(worker: PrefillWorker) -> None:
        with contextlib.suppress(_End):
            worker.run(between_prompts)

    addresses = [worker.listen("127.0.0.1", 0) for worker in workers]
    running = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in running:
        thread.start()
    try:
        yield ",".join(addresses)
    finally:
        ended.set()
        for thread in running:
            thread.join()


@contextlib.contextmanager
def process(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a prefill worker; yield its process and "host:port", and kill it at the end."""
    command = [FASTDECODE, "prefill-worker", "--listen", "tcp://127.0.0.1:0", "--model", str(folder), "--threads", "1"]
    command += ["--device", "cpu", "--max-model-len", "512", "--log-level", "info", *flags]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = started.stdout.readline() if started.stdout else ""
        if "tcp://" not in line:
            started.kill()
            raise RuntimeError(f"the prefill worker did not start: {line}{started.communicate()[1]}")
        yield started, line.split("tcp://")[1].split()[0]
    finally:
        started.kill()
        started.communicate()


class Watched:
    """An engine whose prompts prefill workers compute in random parts, with a record of those prompts.

    ``computed``: the jobs that they have computed, in order.
    """

    def __init__(self, llm: LLM, workers: Sequence[int] = (), seed: int = 0) -> None:
        """``workers``: the numbers of the prefill workers, if any."""
        self.llm, self.engine = llm, llm.engine
        self.handed: list[RemotePrefill] = []
        self.computed: list[int] = []
        if prefills := llm.engine.prefills:
            llm.engine.scheduler.remote_prompts.policy = AnyParts(list(workers), seed)
            submit = prefills.backend.submit
            prefills.backend.submit = lambda prefill, infos: (self.handed.append(prefill), submit(prefill, infos))
            prefills.on_prefilled = lambda prefilled: self.computed.append(prefilled.job_id)

    def run(
        self,
        texts: Sequence[list[int]],
        params_of: Callable[[int], SamplingParams],
        befalls: Mapping[int, Callable[[], object]] | None = None,
    ) -> list[list[list[int]]]:
        """Return the tokens of all completions of each text.
        ``befalls``: functions to call, by the step (from 1) before which they are called.
        """
        for number, text in enumerate(texts):
            self.engine.add_request(str(number), text, params_of(number))
        found: dict[int, list[list[int]]] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            steps += 1
            if befalls and steps in befalls:
                befalls[steps]()
            for output in self.engine.step():
                found[int(output.request_id)] = [list(each.token_ids) for each in output.outputs]
        return [found[number] for number in range(len(texts))]


@dataclass
class AnyParts:
    """A test policy that sends prompts of at least ``least`` tokens to random workers in random parts."""

    workers: list[int]
    seed: int = 0
    least: int = 1
    started_jobs: list[int] = field(default_factory=list)
    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``."""
        if num_tokens < self.least or not self.workers:
            return ()
        most = min(len(self.workers), num_tokens)
        size = min(most, self._random.choice(self.sizes)) if self.sizes else self._random.randint(1, most)
        cuts = sorted(self._random.sample(range(1, num_tokens), size - 1))
        bounds = [context_len + cut for cut in (0, *cuts, num_tokens)]
        chosen = self._random.sample(self.workers, size)
        return tuple(PrefillPart(chosen[i], bounds[i], bounds[i + 1]) for i in range(size))

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """See ``PrefillPolicy``."""
        self.started_jobs.append(job_id)

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """See ``PrefillPolicy``."""

    def joined(self, worker: int) -> None:
        """See ``PrefillPolicy``."""
        self.workers.append(worker)

    def lost(self, worker: int) -> None:
        """See ``PrefillPolicy``."""
        self.workers.remove(worker)


def texts_that_grow(lengths: Sequence[int]) -> list[list[list[int]]]:
    """Return texts of these lengths, and as many texts of which some continue the first ones."""
    rng = random.Random(0)
    first = [[rng.randrange(500) for _ in range(length)] for length in lengths]
    return [first, [[*text[: 32 * (len(text) // 50)], *range(100 + 10 * i)] for i, text in enumerate(first)]]
