"""Events at the boundaries between two decisions: the calls of the scheduler and of the R-workers' backend."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import psutil
from helpers.processes import alive

from chaos.configuration import BETWEEN, WHERE, Event
from fastdecode.engine import LLMEngine

PATIENCE_STEPS = 8
"""Steps that an event waits for its boundary; then it comes between two steps."""


class Events:
    """Lets ``events`` befall ``engine``, and looks at each boundary whether every R-worker's free blocks are counted.

    ``pids``: of R-workers by name; ``join``: starts another one.
    """

    def __init__(
        self, engine: LLMEngine, events: Sequence[Event], pids: dict[str, int], join: Callable[[], None] | None
    ) -> None:
        self.engine, self._pids, self._join = engine, pids, join
        self._left = list(events)
        self._seen: dict[Event, int] = {}
        self.step = 0
        self.log: list[str] = []
        self.faults: list[str] = []
        self._dead: set[int] = set()
        self._ending: set[int] = set()
        self._reported = self._recorded = 0
        self._watch()

    def _watch(self) -> None:
        """Wrap the calls at whose borders something may happen; look at every loss and record."""
        for where in dict.fromkeys(name.split()[1] for name in WHERE):
            for owner in (self.engine.scheduler, self.engine.backend):
                if hasattr(owner, where):
                    setattr(owner, where, self._wrapped(where, getattr(owner, where)))
        self.engine.on_step = self._record

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = call(*args, **kwargs)
            if name == "end_step":
                self._reported += len(result.lost)
            if name != "next_transfer" or result is not None:
                self.reach(f"after {name}")
            return result

        return called

    def _record(self, record: Any) -> None:
        self._recorded += record.lost_workers
        if self._recorded != self._reported:
            self._fault(f"lost-count: {self._reported} R-workers were reported lost, {self._recorded} are counted")
            self._recorded = self._reported

    def _fault(self, fault: str) -> None:
        if fault.split(":")[0] not in {each.split(":")[0] for each in self.faults}:
            self.faults.append(f"{fault} (step {self.step})")

    def next_step(self) -> None:
        """To be called before every step of the engine."""
        self.step += 1
        self.reach(BETWEEN)

    def reach(self, boundary: str) -> None:
        """Let what is due here happen."""
        for worker in self.engine.scheduler.workers:
            if worker.free < 0:
                self._fault(f"negative-free: R-worker {worker.index} has {worker.free} free blocks, {boundary}")
        for event in [each for each in self._left if each.step <= self.step]:
            late = boundary == BETWEEN and self.step > event.step + PATIENCE_STEPS
            if event.boundary == boundary:
                self._seen[event] = self._seen.get(event, -1) + 1
            if late or (event.boundary == boundary and self._seen[event] >= event.occurrence):
                self._left.remove(event)
                self._happen(event, boundary)

    def _happen(self, event: Event, boundary: str) -> None:
        done = {
            "kill": lambda: self._kill(event.target),
            "kill two": lambda: self._kill(event.target) + self._kill(event.target + 1),
            "kill prefill": lambda: self._kill_prefill(event.target),
            "drain": lambda: self._drain(event.target, by_signal=False),
            "terminate": lambda: self._drain(event.target, by_signal=True),
            "join": self._begin_join,
            "reset": self._reset,
        }[event.action]()
        self.log.append(f"step {self.step}, {boundary}: {event.action} {done or '(nothing left to befall)'}")

    def _standing(self) -> list[int]:
        """R-workers that neither were killed nor are to go."""
        workers = self.engine.scheduler.workers
        gone = self._dead | self._ending | set(workers.draining)
        return [index for index in workers.present if self._key(index) not in gone and index not in workers.draining]

    def _key(self, index: int) -> int:
        """Tells R-workers apart that had the same index one after the other."""
        return self._pids.get(self.engine.r_workers[index].name, -1 - index)

    def _killable(self) -> list[int]:
        present = self.engine.scheduler.workers.present
        return [each for each in present if self._key(each) > 0 and self._key(each) not in self._dead]

    def _kill(self, target: int) -> str:
        victims = self._killable()
        if not victims:
            return ""
        index = victims[target % len(victims)]
        if not [each for each in self._standing() if each != index]:
            return ""
        self._end(self._key(index))
        self._dead.add(self._key(index))
        return f"R-worker {index} "

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _drain(self, target: int, by_signal: bool) -> str:
        standing = self._standing()
        if len(standing) < 2:
            return ""
        index = standing[target % len(standing)]
        if by_signal:
            os.kill(self._key(index), signal.SIGTERM)
            self._ending.add(self._key(index))
        else:
            self.engine.drain_r_worker(index)
        return f"R-worker {index}"

    def _begin_join(self) -> str:
        if self._join is None:
            return ""
        self._join()
        return "another R-worker"

    def _reset(self) -> str:
        self.engine.reset_prefix_cache()
        return "the prefix cache"

    def _kill_prefill(self, target: int) -> str:
        found = [each for each in psutil.Process().children() if alive(each.pid) and "prefill-worker" in each.cmdline()]
        if not found:
            return ""
        self._end(sorted(each.pid for each in found)[target % len(found)])
        return "a prefill worker"
