"""Rounds over ``fastdecode serve``: clients read streams, some disconnect, and R-workers come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from helpers import r_workers
from helpers.ports import free_port
from helpers.processes import alive
from helpers.servers import RunningServer, read_stream, serving, total, wait_until_idle

from chaos.configuration import Ask, Configuration, Event
from chaos.processes import Leftovers
from chaos.reference import Reference, model_folder
from chaos.round import Result, cache_bytes, drawn_audit

STEP_SECONDS = 0.02
"""Seconds after the server's start at which a request of step 1 arrives."""

PATIENCE_SECONDS = 60.0
NAMES = ("dtype", "kv_cache_dtype", "block_size", "max_model_len", "num_mini_batches", "max_num_seqs", "schedule")
NAMES += ("max_num_batched_tokens", "kv_replicas", "prefill_scratch", "quantization", "int8_calibration_tokens")


@dataclass
class Stream:
    """The outcome of a streamed completion: status, text of each choice, and finish reason."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    error: str = ""
    has_left: bool = False


class ServedRound:
    """Runs ``drawn`` over a server of its own, whose log is in ``folder``."""

    def __init__(self, drawn: Configuration, folder: Path, leftovers: Leftovers) -> None:
        self.drawn, self._folder, self._leftovers = drawn, folder, leftovers
        self._cleanup = contextlib.ExitStack()
        self._workers: list[int] = []
        self._progress = 0
        self.result = Result()

    def run(self, wanted: Reference) -> Result:
        """Run the round. A missing answer of ``wanted`` and any exception are faults."""
        try:
            with self._cleanup:
                self._server = self._cleanup.enter_context(self._serve(wanted))
                self._find_workers()
                found = asyncio.run(self._befall(wanted))
                self._compare(wanted, found)
                self._leftovers.look()
                self._end()
        except Exception:
            self.result.fault(f"exception: {traceback.format_exc()}")
        return self.result

    def _serve(self, wanted: Reference) -> contextlib.AbstractContextManager[RunningServer]:
        drawn = self.drawn
        memory = ("--kv-cache-memory", str(cache_bytes(drawn, wanted, has_ranges=False)))
        flags = list(memory)
        for name in NAMES:
            if name in drawn.settings:
                flags += ["--" + name.replace("_", "-"), str(drawn.settings[name])]
        flags += ["--enable-prefix-caching"] * drawn.settings["enable_prefix_caching"]
        if "speculative_config" in drawn.settings:
            drafts = dict(drawn.settings["speculative_config"])
            if "model" in drafts:
                drafts["model"] = model_folder(drafts["model"], drawn, self._folder)
            flags += ["--speculative-config", json.dumps(drafts)]
        self._audit = drawn_audit(drawn).get("audit", 0.0)
        flags += ["--audit", str(self._audit)]
        self._joins = (f"127.0.0.1:{free_port()}", memory)
        flags += ["--pool-listen", self._joins[0], "--shutdown-timeout", "60"]
        self.result.settings = f"{drawn.pool}:{drawn.num_workers} {' '.join(flags)}"
        if drawn.pool == "spawn":
            flags += ["--r-workers", f"spawn:{drawn.num_workers}", "--r-threads", "1"]
            return serving(self._folder, *flags, is_bare=True)
        addresses = []
        for _ in range(drawn.num_workers):
            process, address = self._cleanup.enter_context(r_workers.listening(*memory))
            self._workers.append(process.pid)
            addresses.append(address)
        return serving(self._folder, *flags[2:], "--r-workers", ",".join(addresses), is_bare=True)

    def _find_workers(self) -> None:
        """Find the processes of R-workers that the server has started."""
        for each in psutil.Process(self._server.process.pid).children():
            if "--control-fd" in each.cmdline():
                self._workers.append(each.pid)

    async def _befall(self, wanted: Reference) -> list[Stream]:
        """Run clients and events concurrently."""
        staying = [number for number, ask in enumerate(self.drawn.asks) if ask.abort is None]
        characters = sum(len(each.text) for number in staying for each in wanted.answers[number])
        clients = [asyncio.create_task(self._ask(ask)) for ask in self.drawn.asks]
        streams = asyncio.gather(*clients)
        events = list(self.drawn.events)
        while events and not streams.done():
            if self._progress >= events[0].share * characters and await asyncio.to_thread(self._happen, events[0]):
                events.pop(0)
            await asyncio.sleep(0.005)
        self.result.counts["missed"] = len(events)
        return await asyncio.wait_for(streams, PATIENCE_SECONDS * 2)

    async def _ask(self, ask: Ask) -> Stream:
        await asyncio.sleep(ask.step * STEP_SECONDS)
        body = {"prompt": ask.prompt, "stream": True} | ask.params
        body.pop("detokenize", None)
        found = Stream()
        found.has_left = await read_stream(self._server, body, found, partial(self._take, found), ask.abort)
        return found

    def _take(self, found: Stream, event: dict[str, Any]) -> None:
        found.error = event.get("error", {}).get("message", "")
        for choice in event.get("choices", ()):
            index = choice["index"]
            found.texts[index] = found.texts.get(index, "") + choice["text"]
            found.reasons[index] = choice["finish_reason"]
            self._progress += len(choice["text"])

    def _happen(self, event: Event) -> str:
        """Trigger ``event`` in a thread beside the clients; return "" if it has no target now."""
        actions: dict[str, Callable[[], str]] = {
            "kill": lambda: self._signal(event.target, signal.SIGKILL),
            "kill two": lambda: self._signal(event.target, signal.SIGKILL, 2),
            "terminate": lambda: self._signal(event.target, signal.SIGTERM),
            "join": self._join,
        }
        done = actions[event.action]()
        if done:
            self.result.log.append(f"at {self._progress} characters: {event.action} {done}")
            self.result.counts["events"] += 1
            self._leftovers.look()
        return done

    def _signal(self, target: int, number: signal.Signals, count: int = 1) -> str:
        """Send a signal to R-workers once all present ones have joined, if at least one remains."""
        standing = self._standing()
        if len(standing) <= count or total(self._server, "fastdecode:r_workers_alive") < len(standing):
            return ""
        for _ in range(count):
            pid = standing.pop(target % len(standing))
            os.kill(pid, number)
            self.result.counts["kills" if number == signal.SIGKILL else "drains"] += 1
            if number == signal.SIGTERM:
                self._workers.remove(pid)
        return f"{count} of {len(standing) + count} R-workers"

    def _standing(self) -> list[int]:
        return [pid for pid in self._workers if alive(pid)]

    def _join(self) -> str:
        pool, memory = self._joins
        process, _ = self._cleanup.enter_context(r_workers.joining(pool, *memory))
        self._workers.append(process.pid)
        self.result.counts["joins"] += 1
        return "another R-worker"

    def _compare(self, wanted: Reference, found: list[Stream]) -> None:
        for number, (ask, each) in enumerate(zip(self.drawn.asks, found, strict=True)):
            answers = wanted.answers[number]
            if each.status == 400 and "KV blocks" in each.error:
                self.result.log.append(f"request {number} refused: {each.error}")
            elif each.status != 200 or each.error:
                self.result.fault(f"tokens: request {number}: status {each.status}, {each.error or 'no error'}")
            elif each.has_left:
                if not all(answers[index].text.startswith(text) for index, text in each.texts.items()):
                    self.result.fault(f"tokens: request {number} differs before its client left after {ask.abort}")
            else:
                texts = [each.texts.get(index, "") for index in range(len(answers))]
                self.result.compare(number, [answer.text for answer in answers], texts)
                reasons = [each.reasons.get(index) for index in range(len(answers))]
                if reasons != [answer.finish_reason for answer in answers]:
                    self.result.fault(f"tokens: request {number} ends for {reasons}")

    def _end(self) -> None:
        """Check that nothing is held and all R-workers are counted, and that the server ends on SIGTERM."""
        try:
            wait_until_idle(self._server)
        except AssertionError as error:
            self.result.fault(f"blocks: an idle server holds {error}")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (counted := total(self._server, "fastdecode:r_workers_alive")) != len(self._standing()):
            if time.monotonic() > deadline:
                self.result.fault(f"lost-count: {counted} R-workers are counted, {len(self._standing())} stand")
                break
            time.sleep(0.05)
        self.result.counts["preemptions"] = int(total(self._server, "fastdecode:num_preemptions_total"))
        self.result.counts["steps"] = int(total(self._server, "fastdecode:steps_total"))
        if self._audit:
            named = ("audited_rows_total", "r_workers_faulty_total", "audits_undecided_total")
            counted = (int(total(self._server, f"fastdecode:{name}")) for name in named)
            self.result.check_audit(*counted, self._audit)
        self._server.process.send_signal(signal.SIGTERM)
        if status := self._server.process.wait(PATIENCE_SECONDS):
            self.result.fault(f"exception: the server ended with {status}:\n{self._server.log.read_text()[-3000:]}")
