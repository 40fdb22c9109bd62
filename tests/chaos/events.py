"""Triggers events at the boundaries of scheduler and backend calls."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from helpers.processes import alive

from chaos.configuration import BETWEEN, WHERE, Event
from chaos.processes import Processes
from fastdecode.engine.engine import LLMEngine

PATIENCE_STEPS = 8
"""Steps that an event waits for its boundary; after that it occurs between two steps."""


class Events:
    """Triggers ``events`` in ``engine``, and checks each R-worker's count of free blocks at each boundary.
    An event without a possible target waits. Events that never found one are in ``left``. ``num_steps``: steps of the
    reference.
    """

    def __init__(self, engine: LLMEngine, events: Sequence[Event], num_steps: int, processes: Processes) -> None:
        self.engine, self._processes = engine, processes
        self.left = list(events)
        self._due = {event: 1 + int(event.share * num_steps) for event in events}
        self._seen: dict[Event, int] = {}
        self.step = 0
        self.log: list[str] = []
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self._ending: set[str] = set()
        self._reported = self._recorded = 0
        self._watch()

    def _watch(self) -> None:
        """Wrap the calls at whose boundaries events may occur; also watch losses and step records."""
        for where in dict.fromkeys(name.split()[1] for name in WHERE):
            *part, name = where.split(".")
            for owner in (self.engine.scheduler, self.engine.backend):
                owner = getattr(owner, part[0], None) if part else owner
                if hasattr(owner, name):
                    setattr(owner, name, self._wrapped(where, getattr(owner, name)))
        self.engine.on_step = self._record

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            result = call(*args, **kwargs)
            if name == "end_step":
                self._reported += len(result.lost)
            if name == "admit":
                self.counts["joins"] += len(result)
            if name != "transfers.begin_next" or result is not None:
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
        """Advance to the next step; call this before each step of the engine."""
        self.step += 1
        self.reach(BETWEEN)

    def reach(self, boundary: str) -> None:
        """Trigger the events that are due at ``boundary``."""
        for worker in self.engine.scheduler.snapshot().r_workers:
            if worker.free < 0:
                self._fault(f"negative-free: R-worker {worker.index} has {worker.free} free blocks, {boundary}")
        for event in [each for each in self.left if self._due[each] <= self.step]:
            late = boundary == BETWEEN and self.step > self._due[event] + PATIENCE_STEPS
            if event.boundary == boundary:
                self._seen[event] = self._seen.get(event, -1) + 1
            if late or (event.boundary == boundary and self._seen[event] >= event.occurrence):
                self._happen(event, boundary)

    def _happen(self, event: Event, boundary: str) -> None:
        done = {
            "kill": lambda: self._kill(event.target),
            "kill two": lambda: self._kill_two(event.target),
            "kill rank": lambda: self._kill_rank(event.target),
            "kill prefill": lambda: self._kill_prefill(event.target),
            "drain": lambda: self._drain(event.target, by_signal=False),
            "terminate": lambda: self._drain(event.target, by_signal=True),
            "join": self._join,
            "reset": self._reset,
        }[event.action]()
        if done:
            self.left.remove(event)
            self.log.append(f"step {self.step}, {boundary}: {event.action} {done}")

    def _standing(self) -> list[int]:
        """Return the R-workers that were not killed and are not draining."""
        workers = self.engine.scheduler.store.workers
        staying = [index for index in workers.present if index not in workers.draining]
        return [index for index in staying if self._key(index) not in self._ending and not self._is_dead(index)]

    def _key(self, index: int) -> str:
        return str(self.engine.r_workers[index].name)

    def _pids(self, index: int) -> list[int]:
        """Return the process ids, one per rank, of the engine's R-worker ``index``."""
        return self._processes.pids(self._key(index))

    def _is_dead(self, index: int) -> bool:
        return not all(map(alive, self._pids(index)))

    def _killable(self) -> list[int]:
        present = self.engine.scheduler.snapshot().present
        return [each for each in present if self._pids(each) and not self._is_dead(each)]

    def _kill(self, target: int) -> str:
        victims = [index for index in self._killable() if any(other != index for other in self._standing())]
        if not victims:
            return ""
        index = victims[target % len(victims)]
        pids = self._pids(index)
        rank = target // len(victims) % len(pids)
        self._end(pids[rank])
        self.counts["kills"] += 1
        return f"R-worker {index}" + f" of rank {rank}" * (len(pids) > 1)

    def _kill_two(self, target: int) -> str:
        """Kill two R-workers at the same time, or none if fewer than two are left."""
        if len(self._standing()) < 3:
            return ""
        return f"{self._kill(target)} and {self._kill(target + 1)}"

    def _end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _kill_rank(self, target: int) -> str:
        """Kill a rank of the MPI job, which ends the job."""
        ranks = self._processes.mpi_ranks()
        self._processes.told_to_end.write_text(f"step {self.step}")
        self.counts["kills"] += 1
        os.kill(ranks[target % len(ranks)], signal.SIGKILL)
        return "a rank"

    def _drain(self, target: int, by_signal: bool) -> str:
        standing = self._standing()
        if len(standing) < 2:
            return ""
        index = standing[target % len(standing)]
        if by_signal:
            os.kill(self._pids(index)[0], signal.SIGTERM)
            self._ending.add(self._key(index))
        else:
            self.engine.drain_r_worker(index)
        self.counts["drains"] += 1
        return f"R-worker {index}"

    def _join(self) -> str:
        self._processes.join(self.engine)
        return "another R-worker"

    def _reset(self) -> str:
        self.engine.reset_prefix_cache()
        return "the prefix cache"

    def _kill_prefill(self, target: int) -> str:
        found = self._processes.prefill_workers()
        if not found:
            return ""
        self._end(found[target % len(found)])
        self.counts["kills"] += 1
        return "a prefill worker"
