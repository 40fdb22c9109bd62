"""A world of naive R-workers for the product's own cycle; the test decides on losses, drains and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode.core.metrics import Pool, StepRecord
from fastdecode.core.step import Chunk, ScheduledStep
from fastdecode.core.types import StepReport
from fastdecode.cycle import JoinedWorker
from fastdecode.scheduler import Scheduler, Transfer
from helpers.naive_workers import NaiveWorkers


class StepFailedError(Exception):
    """Raised in a step that a test lets fail."""


def chunks_of(step: ScheduledStep) -> list[Chunk]:
    return [chunk for mini_batch in step.mini_batches for chunk in mini_batch]


class NaiveWorld:
    """Steps take no time and a copy takes 1 s. ``fails``: the next step fails.
    ``loses``: R-workers that are lost at the step's end, or when they are sent something. ``recount`` is called with
    each step that was sent but not yet written.
    """

    def __init__(
        self, scheduler: Scheduler, recounts: bool, recount: Callable[[ScheduledStep, list[Chunk]], None]
    ) -> None:
        self.naive = NaiveWorkers(scheduler.limits.block_size, scheduler.limits.state_blocks)
        self.clock = 0.0
        self.num_transfers = 0
        self.fails = False
        self.loses: tuple[int, ...] = ()
        self.slowness: tuple[float, ...] = ()
        self.step: ScheduledStep | None = None
        self.recounts = recounts
        self._scheduler, self._recount = scheduler, recount
        self._open: list[Chunk] = []

    def now(self) -> float:
        return self.clock

    def tell(self, step: ScheduledStep) -> None:
        self._open = chunks_of(step)
        has_rows = bool(self._open or step.arrived or step.prefills)
        if has_rows:
            self.step = step
        if self.recounts:
            self.naive.apply(step)
        if has_rows:
            self._recount(step, self._open)

    def compute(self, step: ScheduledStep) -> list[Chunk]:
        waits = step.arrived or len(self._scheduler.remote_prompts)
        assert self._open or waits, "nothing runs although a sequence waits"
        if self.fails:
            raise StepFailedError
        return self._open

    def end_step(self) -> StepReport:
        """Spoil rows in which lost R-workers had a part; see ``World.end_step``."""
        chunks, lost, self._open, self.loses = self._open, self.loses, [], ()
        for worker in lost:
            wrong = [c for c in chunks if worker in (c.worker, *(read[0] for read in c.reads)) and c.attends]
            if self.recounts:
                self.naive.spoil(wrong)
            self.naive.lose(worker)
        return StepReport((), lost)

    def abandon_step(self) -> None:
        self.naive.unwrite(self._open)
        self._open = []

    def wait(self) -> None:
        assert len(self._scheduler.remote_prompts), "nothing runs although a sequence waits"

    def transfer(self, move: Transfer) -> float:
        workers, held = self._scheduler.store.workers, self.naive.held[move.source, move.cache_id]
        assert ((move.target, move.cache_id) in self.naive.held) == (move.num_copied > 0)
        assert move.target in workers.accepting and len(held.tokens) >= move.num_copied + move.num_tokens
        assert not move.is_move or len(held.tokens) == move.num_tokens
        self.naive.copy(move.cache_id, move.source, move.target, move.num_copied, move.num_tokens)
        assert self.naive.blocks_used(len(workers))[move.target] <= workers[move.target].num_blocks
        self.clock += 1.0
        self.num_transfers += 1
        return 0.1 * move.num_tokens * (not move.is_move)

    def admit(self, vacant: Sequence[int]) -> dict[int, JoinedWorker]:
        return {}

    def dismiss(self, worker: int) -> None:
        assert self.naive.on(worker) == set(self._scheduler.store.workers[worker].prefixes)
        self.naive.lose(worker)

    def forget(self, sequence_id: int) -> None:
        pass

    def record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int, pool: Pool) -> StepRecord:
        """Give R-workers that have joined the speed of the first one; see ``World.record``."""
        loads = step.kv_loads
        slowness = [*self.slowness, *[self.slowness[0] if self.slowness else 0.0] * len(loads)]
        busy = tuple(slow * load for slow, load in zip(slowness, loads, strict=False))
        wall = max(busy)
        return StepRecord(
            is_decode=step.is_decode,
            overlapped=True,
            num_tokens=step.num_tokens,
            num_output_tokens=num_output_tokens,
            kv_loads=tuple(loads),
            wall_seconds=wall,
            s_seconds=0.0,
            wait_seconds=wall,
            host_seconds=0.0,
            r_seconds=busy,
            transfer_seconds=(0.0,) * len(loads),
            kv_bytes_read=0,
            lost_workers=len(report.lost),
            pool=pool,
        )
