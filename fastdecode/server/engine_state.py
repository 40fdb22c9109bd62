"""States of the engine for the server: plain data, made after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fastdecode.core.metrics import ONE_WORKER, Pool, PoolChanges, StepRecord
from fastdecode.scheduler import DraftCounts


@dataclass(frozen=True)
class RWorkerState:
    """The state of one R-worker, present or lost.

    ``kv_load``: KV tokens attended in the last step, and its limit (None: no limit). ``busy_seconds``,
    ``transfer_seconds``: time in the last step. ``parked_bytes``: parked sessions on its disk; None without a disk.
    ``faulty``: the engine dropped it, since an audit found it at fault.
    """

    name: str
    present: bool = True
    draining: bool = False
    num_sequences: int = 0
    kv_load: int = 0
    kv_load_limit: int | None = None
    blocks_used: int = 0
    num_blocks: int = 0
    parked_bytes: int | None = None
    busy_seconds: float = 0.0
    transfer_seconds: float = 0.0
    faulty: bool = False


@dataclass(frozen=True)
class EngineState:
    """The engine after a step. ``seconds``: when the step ended, on the clock ``time.perf_counter``.

    ``num_running`` and ``num_waiting`` count sequences, not API requests.
    """

    seconds: float
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0
    r_workers: tuple[RWorkerState, ...] = ()
    drafts: DraftCounts = field(default_factory=DraftCounts)
    pool: Pool = ONE_WORKER
    changes: PoolChanges = field(default_factory=PoolChanges)
    trouble: str = ""
    woken_tokens: int = 0
    failed_wakes: int = 0
    session: SessionState | None = None


@dataclass(frozen=True)
class SessionState:
    """The session of an engine with a journal.

    ``name``: "" if unnamed. ``epoch``: how many engines have owned the session. ``journal_seconds``: time that
    steps have waited for the journal.
    """

    name: str
    epoch: int
    journal_bytes: int
    journal_seconds: float


class TimedStep(NamedTuple):
    """A step's record, and when the step ended, in seconds of ``time.perf_counter``."""

    end_seconds: float
    record: StepRecord
