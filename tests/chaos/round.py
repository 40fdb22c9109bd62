"""One round: an engine, the events, and all conditions that must still hold."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.drafting import AlwaysMost
from helpers.engine_checks import assert_nothing_held
from helpers.ports import free_port
from helpers.prefill_workers import AnyParts

from chaos.configuration import SPARSE, Ask, Configuration, accepted_settings
from chaos.events import Events
from chaos.parking import leave_prefixes, place_disks
from chaos.processes import Leftovers, Processes
from chaos.reference import Answer, Answers, Reference, engine_config, params_of, prompt_of, take
from fastdecode import RequestOutput, SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.engine.engine import LLMEngine

MOST_STEPS = 4000
AMPLE_TOKENS = 40_000
RAY_SECONDS = 60.0
LOOK_STEPS = 8
"""Steps between two checks of the processes' shared memory."""

LEAST_AUDITED = 4
"""A round that expects more audited rows per layer than this, at one row per step, must have audited some."""


@dataclass
class Result:
    """The result of a round: ``faults``, each a line "kind: text", and ``counts`` of what happened."""

    faults: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    settings: str = ""

    def fault(self, what: str) -> None:
        self.faults.append(what)

    def compare(self, number: int, wanted: list[Any], found: list[Any]) -> None:
        """Record a fault if the completions of request ``number`` differ from ``wanted``."""
        self.counts["sequences"] += len(wanted)
        self.counts["tokens"] += sum(map(len, wanted))
        found = found or [wanted[0][:0]] * len(wanted)
        first = [_first_difference(a, b) for a, b in zip(wanted, found, strict=True)]
        if any(place is not None for place in first):
            different = [len(a) - place for a, place in zip(wanted, first, strict=True) if place is not None]
            self.counts["different"] += sum(different)
            self.fault(f"tokens: request {number} differs from token {first} on of {[len(each) for each in wanted]}")

    def check_audit(self, num_rows: int, faulty: object, undecided: float, fraction: float) -> None:
        """Record the audit of a round with sound R-workers: ``num_rows`` were compared, and nobody may be ``faulty``.
        ``undecided``: audits that named nobody. ``fraction``: the fraction of rows to audit.
        """
        self.counts["audited rounds"], self.counts["audited"] = 1, num_rows
        if faulty or undecided:
            self.fault(f"audit: a false alarm: {faulty} named, {undecided} undecided")
        if not num_rows and fraction * self.counts["steps"] > LEAST_AUDITED:
            self.fault(f"audit: no row of {self.counts['steps']} steps was audited")


def _first_difference(wanted: Any, found: Any) -> int | None:
    if wanted == found:
        return None
    pairs = enumerate(zip(wanted, found, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(wanted), len(found)))


class Round:
    """Runs ``drawn`` over an engine in this process; models are kept in ``folder``."""

    def __init__(self, drawn: Configuration, folder: Path, leftovers: Leftovers) -> None:
        self.drawn, self._folder, self._leftovers = drawn, folder, leftovers
        self._cleanup = contextlib.ExitStack()
        self._processes = Processes(self._cleanup, folder / "told-to-end.txt")
        self._hopeless: dict[int, bool] = {}
        self.result = Result()

    def run(self, wanted: Reference) -> Result:
        """Run the round. A missing answer of ``wanted`` and any exception are faults."""
        try:
            with self._cleanup:
                engine = self._begin(wanted)
                try:
                    self._befall(engine, wanted)
                finally:
                    self._leftovers.look()
                    engine.close()
        except Exception:
            self.result.fault(f"exception: {traceback.format_exc()}")
        return self.result

    def _begin(self, wanted: Reference) -> LLMEngine:
        """Start the round's engine with as many of its settings as are accepted together."""
        drawn = self.drawn
        settings = self._accepted()
        settings |= drawn_audit(drawn)
        disks = place_disks(settings, self._folder, self._cleanup)
        memory = cache_bytes(drawn, wanted, "kv_shard_tokens" in settings)
        flags = ("--kv-cache-memory", str(memory))
        if drawn.pool == "tcp":
            settings |= {"r_workers": self._processes.listen(drawn.num_workers, *flags, place=disks)}
            settings = {name: value for name, value in settings.items() if name not in ("park_dir", "park_after")}
        elif drawn.pool == "mpi":
            settings |= {"r_workers": "mpi"}
        else:
            settings |= {"r_workers": f"{drawn.pool}:{drawn.num_workers}", "kv_cache_memory": memory, "r_threads": 1}
        if drawn.pool in ("spawn", "tcp"):
            settings |= {"pool_listen": f"127.0.0.1:{free_port(settings.get('tensor_parallel_size', 1))}"}
        config = engine_config(drawn, self._folder, **settings)
        self.result.settings = str(settings)
        if disks:
            leave_prefixes(lambda: LLMEngine(config), self._add_all)
        engine = LLMEngine(config)
        self._processes.find(engine, *flags)
        scheduler = engine.scheduler
        if engine.prefills:
            workers = range(engine.config.prefill_worker_spec.count)
            scheduler.remote_prompts.policy = AnyParts(list(workers), drawn.seed)
        if engine.speculation and drawn.forces_drafts:
            scheduler.drafts.policy = AlwaysMost()
        self._watch_hopeless(engine)
        return engine

    def _add_all(self, engine: LLMEngine) -> None:
        """Give ``engine`` all requests of the round at once."""
        for number, ask in enumerate(self.drawn.asks):
            with contextlib.suppress(RequestError):  # too long for each of these R-workers
                engine.add_request(str(number), prompt_of(ask), params_of(ask))

    def _accepted(self) -> dict[str, Any]:
        """Return the round's settings, except settings that are refused together."""
        pool = "mpi" if self.drawn.pool == "mpi" else f"spawn:{self.drawn.num_workers}"
        return accepted_settings(
            self.drawn,
            lambda settings: engine_config(self.drawn, self._folder, **settings, r_workers=pool),
            self.result.log.append,
        )

    def _watch_hopeless(self, engine: LLMEngine) -> None:
        """Record, for each sequence that a loss affects, whether the remaining R-workers have no room for it."""
        lost, config = engine.scheduler.members.lost, engine.config

        def watched(worker: int) -> Any:
            found = lost(worker)
            blocks = [each.num_blocks for each in engine.scheduler.snapshot().r_workers if not each.is_gone]
            for sequence in found:
                longest = len(sequence.prompt_token_ids) + sequence.max_tokens
                fits = max(blocks) * config.block_size >= longest
                if config.kv_shard_tokens:
                    fixed = engine.scheduler.limits.state_blocks
                    fits |= config.placing.fits_pool(longest, blocks, config.block_size, fixed=fixed)
                self._hopeless[sequence.sequence_id] = not fits
            return found

        engine.scheduler.members.lost = watched  # type: ignore[method-assign]

    def _befall(self, engine: LLMEngine, reference: Reference) -> None:
        events = Events(engine, self.drawn.events, reference.num_steps, self._processes)
        try:
            for number in range(2 if self.drawn.pool == "ray" else 1):
                if number:
                    self._wait_for_ray(engine, events)
                wanted, found = dict(reference.answers), Answers()
                for outputs in self._steps(engine, events, wanted):
                    take(outputs, found)
                    self.result.faults += [fault for output in outputs for fault in source_faults(output)]
                self._compare(wanted, found)
            engine.look_around()
            engine.look_around()
            try:
                assert_nothing_held(engine)
            except AssertionError as error:
                self.result.fault(f"blocks: {error or traceback.format_exc(limit=1)}")
        finally:
            self.result.faults += events.faults
            self.result.log += events.log + [f"nothing to befall: {each}" for each in events.left]
            self.result.counts += events.counts
            self.result.counts["steps"] = events.step
            changes = engine.membership.changes
            if engine.config.audit:
                self.result.check_audit(changes.audited, changes.faulty, changes.undecided, engine.config.audit)
            self.result.counts["events"] = len(events.log)
            self.result.counts["missed"] = len(events.left)
            self.result.counts["preemptions"] = engine.scheduler.statistics.preemptions
            self.result.counts["woken"] = engine.scheduler.store.parked.counts.num_woken
            self.result.counts["not woken"] = engine.scheduler.store.parked.counts.num_failed

    def _wait_for_ray(self, engine: LLMEngine, events: Events) -> None:
        """Wait until Ray has replaced the killed actors; then run the round once more."""
        deadline = time.monotonic() + RAY_SECONDS
        while events.counts["joins"] < events.counts["kills"]:
            if time.monotonic() > deadline:
                self.result.fault(f"lost-count: Ray has replaced {events.counts['joins']} of the killed actors")
                return
            engine.look_around()
            time.sleep(0.02)

    def _steps(self, engine: LLMEngine, events: Events, wanted: Answers) -> Iterator[Any]:
        """Yield the outputs of each step; drop aborted and refused requests from ``wanted``."""
        waiting = sorted(enumerate(self.drawn.asks), key=lambda each: each[1].step)
        begin = events.step
        while waiting or engine.has_unfinished_requests():
            events.next_step()
            while waiting and waiting[0][1].step < events.step - begin:
                number, ask = waiting.pop(0)
                self._add(engine, number, ask, wanted)
            for number, ask in enumerate(self.drawn.asks):
                if ask.abort == events.step - begin:
                    engine.abort_request(str(number))
                    wanted.pop(number, None)
            yield engine.step()
            if events.step % LOOK_STEPS == 1:
                self._leftovers.look()
            if events.step > MOST_STEPS:
                self.result.fault(f"hang: not done after {MOST_STEPS} steps")
                return

    def _add(self, engine: LLMEngine, number: int, ask: Ask, wanted: Answers) -> None:
        """Add a request. It may be refused only if it fits no remaining R-worker."""
        try:
            engine.add_request(str(number), prompt_of(ask), asking(engine, number, params_of(ask)))
        except RequestError as error:
            wanted.pop(number, None)
            self.result.log.append(f"request {number} refused: {error}")

    def _compare(self, wanted: Answers, found: Answers) -> None:
        for number, answers in wanted.items():
            had_failed, failed = (_has_error(each) for each in (answers, found.get(number, ())))
            if failed:
                if not (had_failed or any(self._hopeless.values())):  # had_failed: in the reference
                    self.result.fault(f"tokens: request {number} was given up, and there is room for it")
                continue
            tokens = [each.tokens for each in found.get(number, ())]
            self.result.compare(number, self._expected(number, answers, tokens), tokens)
        if any(not is_right for is_right in self._hopeless.values()):
            self.result.fault("tokens: a sequence was given up that fits on a remaining R-worker")

    def _expected(self, number: int, answers: list[Answer], found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the tokens to expect of request ``number``. After a tie, these are the tokens ``found``."""
        expected = [each.tokens for each in answers]
        for index, (answer, tokens) in enumerate(zip(answers, found, strict=False)):
            place = answer.tie_of(tokens)
            if place is not None:
                self.result.log.append(f"request {number} chose the other of two equal tokens at place {place}")
                self.result.counts["ties"] += 1
                expected[index] = tokens
        return expected


def _has_error(answers: Sequence[Answer]) -> bool:
    return any(each.finish_reason == "error" for each in answers)


def drawn_audit(drawn: Configuration) -> dict[str, Any]:
    """Return the audit settings: half the rounds audit a share of their rows, if the model has rows to audit."""
    rng = random.Random(f"audit {drawn.seed}")
    has_rows = drawn.architecture not in SPARSE and drawn.settings.get("latent_absorption") != "r"
    return {"audit": rng.choice([0.02, 0.3, 1.0])} if has_rows and rng.random() < 0.5 else {}


def asking(engine: LLMEngine, number: int, params: SamplingParams) -> SamplingParams:
    """Return ``params``; one request in three also asks for attention sources, which must not change its tokens."""
    wanted = replace(params, attention_sources=4)
    try:
        engine.world.sources.check(wanted)
    except RequestError:
        return params
    return params if number % 3 else wanted


def source_faults(output: RequestOutput) -> list[str]:
    """Return the faults in the last token's attention sources. Sources may be missing only after a loss."""
    faults = []
    for completion in output.outputs:
        told = completion.all_sources
        if told is not None and len(told) != len(completion.tokens):
            faults.append(f"sources: {len(told)} of {len(completion.tokens)} tokens, request {output.request_id}")
        last = told[-1] if told else None
        length = len(output.prompt_token_ids) + len(completion.tokens) - 1
        shares = [each.weight for each in last or ()]
        if sum(shares) > 1.0001 or any(not 0 <= each.first <= each.last < length for each in last or ()):
            faults.append(f"sources: {last} of {length} tokens, request {output.request_id}")
    return faults


def cache_bytes(drawn: Configuration, wanted: Reference, has_ranges: bool) -> int:
    """Return the cache bytes of each R-worker. Without ranges, one holds at least a longest sequence."""
    num_tokens = drawn.memory_tokens or AMPLE_TOKENS
    if not has_ranges:
        num_tokens = max(num_tokens, drawn.settings["max_model_len"] + 64)
    return -(-num_tokens // drawn.settings["block_size"]) * wanted.block_bytes + wanted.weight_bytes
