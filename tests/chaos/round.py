"""One round: what befalls an engine, and everything that must hold of it nevertheless."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from helpers import model_zoo, r_workers
from helpers.drafting import AlwaysMost
from helpers.engine_checks import assert_nothing_held
from helpers.prefill_workers import AnyParts
from helpers.processes import alive, segments_of

from chaos.configuration import DEMO, Ask, Configuration
from chaos.events import Events
from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.cluster.r_worker.host import block_bytes
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.engine import LLMEngine
from fastdecode.scheduler.policy.range_sizes import fits_pool

MOST_STEPS = 4000
LONG_POSITIONS = 4096
ALONE = ("dtype", "kv_cache_dtype", "block_size", "max_model_len")
"""Settings that the reference has as well."""

OPTIONAL = ("kv_shard_tokens", "kv_replicas", "speculative_config", "prefill_workers")
"""Left out, one after the other, where they are refused together."""

AMPLE_TOKENS = 40_000
END_SECONDS = 15.0

Tokens = dict[int, list[tuple[int, ...]]]


@dataclass
class Result:
    """``faults``: one line each, "kind: what"; none is a clean round."""

    faults: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_events: int = 0
    settings: str = ""


class Round:
    """Runs ``configuration``; models are kept in ``folder``."""

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        self.configuration, self._folder = configuration, folder
        self._cleanup = contextlib.ExitStack()
        self._pids: dict[str, int] = {}
        self._hopeless: dict[int, bool] = {}
        self.result = Result()

    def run(self) -> Result:
        """The reference first, then the round itself; whatever is raised is a fault."""
        before = {each.pid for each in psutil.Process().children(recursive=True)}
        segments: set[Path] = set()
        try:
            with self._cleanup:
                wanted = self._reference()
                engine = self._begin()
                try:
                    self._befall(engine, wanted, segments)
                finally:
                    engine.close()
        except Exception:
            self._fault(f"exception: {traceback.format_exc()}")
        self._look_for_leftovers(before, segments)
        return self.result

    def _fault(self, fault: str) -> None:
        self.result.faults.append(fault)

    def _model(self, name: str) -> str:
        if name == DEMO:
            return str(EngineConfig().model)
        is_long = self.configuration.settings["max_model_len"] > model_zoo.POSITIONS
        folder = self._folder / (f"{name}-long" if is_long else name)
        if not folder.exists():
            changes = {"max_position_embeddings": LONG_POSITIONS} if is_long else {}
            model_zoo.build_model(name, **changes).save_pretrained(folder)
        return str(folder)

    def _config(self, **settings: Any) -> EngineConfig:
        name = self.configuration.architecture
        common: dict[str, Any] = {"model": self._model(name), "device": "cpu", "s_threads": 1}
        common |= {"r_threads": None if self.configuration.pool == "tcp" and "pool_listen" in settings else 1}
        common |= {"skip_tokenizer_init": name != DEMO}
        drafts = settings.get("speculative_config", {})
        if "model" in drafts:
            settings["speculative_config"] = drafts | {"model": self._model(name)}
        return EngineConfig(**common | settings)

    def _reference(self) -> Tokens:
        """By one R-worker that nothing befalls."""
        settings = {name: self.configuration.settings[name] for name in ALONE}
        config = self._config(**settings, r_workers="inproc:1", kv_cache_memory="256MiB", schedule="stall-free")
        engine = LLMEngine(config)
        try:
            layout = engine.s_model.layout
            self._block_bytes = block_bytes(layout, config.block_size)
            wanted: Tokens = {}
            for number, ask in enumerate(self.configuration.asks):
                engine.add_request(str(number), _prompt(ask), _params(ask))
            while engine.has_unfinished_requests():
                _take(engine.step(), wanted)
            return wanted
        finally:
            engine.close()

    def _begin(self) -> LLMEngine:
        """The engine of the round, with as many of its settings as are taken together."""
        accepted = self._accepted()
        settings = accepted | self._begin_r_workers("kv_shard_tokens" in accepted)
        engine = LLMEngine(self._config(**settings))
        self.result.settings = str(settings)
        for index, pid in enumerate(self._spawned()):
            self._pids[engine.r_workers[index].name] = pid
        scheduler = engine.scheduler
        if engine.prefills:
            workers = range(engine.config.prefill_worker_spec.count)
            scheduler.remote_prompts.policy = AnyParts(list(workers), self.configuration.seed)
        if engine.speculation and self.configuration.forces_drafts:
            scheduler.drafts.policy = AlwaysMost()
        self._watch_hopeless(engine)
        return engine

    def _accepted(self) -> dict[str, Any]:
        """The settings of the round without those that are refused together with others."""
        settings = dict(self.configuration.settings)
        names = [name for name in OPTIONAL if settings.get(name, 1) != 1]
        random.Random(self.configuration.seed).shuffle(names)
        while True:
            try:
                self._config(**settings, r_workers=f"spawn:{self.configuration.num_workers}")
                return settings
            except ConfigError as error:
                if not names:
                    raise
                self.result.log.append(f"without {names[0]}: {error}")
                settings.pop(names.pop(0))
                if "prefill_workers" not in settings:
                    settings.pop("prefill_threads", None)

    def _begin_r_workers(self, has_ranges: bool) -> dict[str, Any]:
        """Settings of the pool, whose processes are started where the engine does not."""
        drawn = self.configuration
        num_tokens = drawn.memory_tokens or AMPLE_TOKENS
        if not has_ranges:  # then each holds a longest sequence
            num_tokens = max(num_tokens, drawn.settings["max_model_len"] + 64)
        num_blocks = -(-num_tokens // drawn.settings["block_size"])
        memory = num_blocks * self._block_bytes
        if drawn.pool != "tcp":
            return {"r_workers": f"{drawn.pool}:{drawn.num_workers}", "kv_cache_memory": memory}
        self._flags = ("--kv-cache-memory", str(memory))
        addresses = []
        for _ in range(drawn.num_workers):
            process, address = self._cleanup.enter_context(r_workers.listening(*self._flags))
            self._pids[address] = process.pid
            addresses.append(address)
        return {"r_workers": ",".join(addresses), "pool_listen": "127.0.0.1:0"}

    def _joiner(self, engine: LLMEngine) -> Callable[[], None] | None:
        if self.configuration.pool != "tcp":
            return None

        def join() -> None:
            pool = engine.backend.join_listener.address  # type: ignore[attr-defined]
            process, address = self._cleanup.enter_context(r_workers.joining(pool, *self._flags))
            self._pids[address] = process.pid

        return join

    def _spawned(self) -> list[int]:
        """R-workers that this process's engine started, in order; another rank's go with them."""
        if self.configuration.pool != "spawn":
            return []
        return sorted(each.pid for each in psutil.Process().children() if "r-worker" in each.cmdline())

    def _watch_hopeless(self, engine: LLMEngine) -> None:
        """Note of each sequence that is given up whether it really fits on no R-worker that is left."""
        lost, config = engine.scheduler.lost, engine.config

        def watched(worker: int) -> Any:
            found = lost(worker)
            blocks = [each.num_blocks for each in engine.scheduler.workers if not each.is_gone]
            for sequence in found:
                longest = len(sequence.prompt_token_ids) + sequence.max_tokens
                fits = max(blocks) * config.block_size >= longest
                if config.kv_shard_tokens and config.may_shard:
                    fits |= fits_pool(longest, config.kv_shard_tokens, blocks, config.block_size)
                self._hopeless[sequence.sequence_id] = not fits
            return found

        engine.scheduler.lost = watched  # type: ignore[method-assign]

    def _befall(self, engine: LLMEngine, wanted: Tokens, segments: set[Path]) -> None:
        events = Events(engine, self.configuration.events, self._pids, self._joiner(engine))
        found: Tokens = {}
        waiting = sorted(enumerate(self.configuration.asks), key=lambda each: each[1].step)
        reasons: dict[int, set[str]] = {}
        try:
            while waiting or engine.has_unfinished_requests():
                events.next_step()
                while waiting and waiting[0][1].step < events.step:
                    number, ask = waiting.pop(0)
                    self._add(engine, number, ask, wanted)
                for number, ask in enumerate(self.configuration.asks):
                    if ask.abort == events.step:
                        engine.abort_request(str(number))
                        wanted.pop(number, None)
                outputs = engine.step()
                _take(outputs, found)
                for output in outputs:
                    reasons[int(output.request_id)] = {each.finish_reason for each in output.outputs}
                if events.step == 10:
                    segments |= _segments()
                if events.step > MOST_STEPS:
                    self._fault(f"hang: not done after {MOST_STEPS} steps")
                    break
            self._compare(wanted, found, reasons)
            engine.look_around()
            engine.look_around()
            try:
                assert_nothing_held(engine)
            except AssertionError as error:
                self._fault(f"blocks: {error or traceback.format_exc(limit=1)}")
        finally:
            self.result.faults += events.faults
            self.result.log += events.log
            self.result.num_steps, self.result.num_events = events.step, len(events.log)

    def _add(self, engine: LLMEngine, number: int, ask: Ask, wanted: Tokens) -> None:
        """Refused where it fits on none of the R-workers that are left, as the error says."""
        try:
            engine.add_request(str(number), _prompt(ask), _params(ask))
        except RequestError as error:
            wanted.pop(number, None)
            self.result.log.append(f"request {number} refused: {error}")

    def _compare(self, wanted: Tokens, found: Tokens, reasons: dict[int, set[str]]) -> None:
        for number, tokens in wanted.items():
            if "error" in reasons.get(number, set()):
                if not any(self._hopeless.values()):
                    self._fault(f"tokens: request {number} was given up, and there is room for it")
            elif found.get(number) != tokens:
                got = found.get(number, [()] * len(tokens))
                first = [_first_difference(a, b) for a, b in zip(tokens, got, strict=True)]
                self._fault(f"tokens: request {number} differs from token {first} on of {[len(t) for t in tokens]}")
        if any(not is_right for is_right in self._hopeless.values()):
            self._fault("tokens: a sequence was given up that fits on an R-worker that is left")

    def _look_for_leftovers(self, before: set[int], segments: set[Path]) -> None:
        deadline = time.monotonic() + END_SECONDS

        def left() -> list[psutil.Process]:
            children = psutil.Process().children(recursive=True)
            return [each for each in children if each.pid not in before and alive(each.pid)]

        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._fault(f"left: process {process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
        self.result.faults += [f"left: shared memory {path}" for path in segments if path.exists()]


def _segments() -> set[Path]:
    """Files of shared memory of this process and those that it started and that have not been killed meanwhile."""
    found = segments_of([psutil.Process().pid])
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            found |= segments_of([child.pid])
    return found


def _first_difference(wanted: tuple[int, ...], found: tuple[int, ...]) -> int | None:
    if wanted == found:
        return None
    pairs = enumerate(zip(wanted, found, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(wanted), len(found)))


def _prompt(ask: Ask) -> Any:
    return ask.prompt if isinstance(ask.prompt, str) else {"prompt_token_ids": ask.prompt}


def _params(ask: Ask) -> SamplingParams:
    form = ask.params.get("structured_outputs")
    more = {"structured_outputs": StructuredOutputsParams(**form)} if form else {}
    return SamplingParams(**ask.params | more)


def _take(outputs: Any, found: Tokens) -> None:
    for output in outputs:
        found[int(output.request_id)] = [tuple(each.token_ids) for each in output.outputs]
