"""Types shared by the S-worker and the R-workers: plans, descriptions of R-workers, and their reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from fastdecode.core.held import HeldSequence

X86_ISAS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx")
ARM_ISAS = ("neon", "neon_dot", "neon_bf16")
ISAS = ("scalar", *X86_ISAS, *ARM_ISAS)
"""Instruction sets that R-workers may use.
A machine with one of them also has the earlier ones of its architecture. Each rounds differently.
"""


def best_common_isa(isas: Collection[str]) -> str:
    """Return the best instruction set that all machines have. ``isas``: the best of each machine; not empty."""
    for family in (X86_ISAS, ARM_ISAS):
        if all(isa in family for isa in isas):
            return min(isas, key=family.index)
    return "scalar"


PREFILL_METHODS = ("kvr", "tsp")
"""The methods by which prefill workers share a prompt.
"kvr": a chain that passes keys and values on (KV-Runahead). "tsp": every worker gathers all keys and values at every
layer (tensor/sequence parallel), for comparison.
"""

READ_AHEAD = ("run", "run-l2", "pages")
"""The ways to prefetch cached tokens: one ascending run, the same only into the second-level cache, or eight pages."""


class Verb(IntEnum):
    """The kinds of controls, which R-workers carry out before a step's rows."""

    FORK = 0
    TRUNCATE = 1
    RELEASE = 2
    RESERVE = 3
    COMMIT = 4


CONTROL = np.dtype([("verb", "<i8"), ("sequence_id", "<i8"), ("source_id", "<i8"), ("num_tokens", "<i8")])
"""A control of sequence ``sequence_id``. FORK creates it from the first ``num_tokens`` of ``source_id``.
TRUNCATE keeps its first ``num_tokens``. RELEASE drops it. RESERVE reserves blocks for ``num_tokens``, whose keys and
values come from prefill workers under the job ``source_id``. COMMIT of the same job appends them to the sequence, and
is refused if some are missing.
"""

SPLIT_TOKENS = 512
"""Tokens per split. Attention gives a partial result per split, and these are merged in a fixed order."""


class SpanMode(IntEnum):
    """The ways in which an R-worker treats the rows of a span.
    APPEND: store their keys and values; their queries attend on the S-worker. ATTEND: store them, then attend to all
    tokens of the sequence. PARTIAL: like ATTEND, for the last of several segments; answer with partial results. READ:
    store nothing, and attend to an earlier segment; answer with partial results.
    """

    APPEND = 0
    ATTEND = 1
    PARTIAL = 2
    READ = 3


SPAN = np.dtype([("sequence_id", "<i8"), ("context_len", "<i8"), ("num_rows", "<i8"), ("mode", "<i8")])
"""``num_rows`` consecutive new tokens of one sequence that had ``context_len`` cached tokens before the step.
``mode``: a SpanMode. In PARTIAL and READ spans ``context_len`` counts from the first token of the segment. In a READ
span, ``context_len`` is at least the length of the segment, which the R-worker knows.
"""


@dataclass(frozen=True)
class WorkerPlan:
    """One R-worker's part of a step: controls in order, then the spans of each mini-batch.

    ``controls``: CONTROL [num_controls]. ``mini_batches``: SPAN [num_spans] for each, in this order: READ, ATTEND,
    PARTIAL, APPEND. The first three kinds have rows of q, the last three rows of k and v; ATTEND spans return rows of
    o, READ and PARTIAL spans partial results. The last APPEND spans may be those of second copies.
    """

    controls: np.ndarray
    mini_batches: tuple[np.ndarray, ...]


Rows = slice | np.ndarray
"""Row indices of an array: a slice if they are consecutive, else int64 [num_rows]."""


@dataclass(frozen=True, eq=False)
class Route:
    """The rows of a mini-batch that one R-worker gets, in the order of its spans.
    ``q_rows``: rows of q for its READ, ATTEND and PARTIAL spans. ``kv_rows``: rows of k and v for its ATTEND, PARTIAL
    and APPEND spans. ``o_rows``: rows of the output o that it fills, for its ATTEND spans. ``num_partials``: rows of
    partial results that it returns. Row numbers of q and o count attending rows only, those of k and v count all rows.
    """

    q_rows: Rows
    kv_rows: Rows
    o_rows: slice
    num_partials: int = 0


MERGED = np.dtype([("row", "<i8"), ("num_rows", "<i8"), ("first_part", "<i8"), ("num_parts", "<i8")])
"""``num_rows`` rows of a mini-batch's output o, from ``row`` on, merged from parts ``first_part`` on.
"""

PART = np.dtype([("worker", "<i8"), ("row", "<i8"), ("stride", "<i8"), ("split", "<i8"), ("num_splits", "<i8")])
"""A row's partial result of ``num_splits`` splits from ``split`` on, computed by R-worker ``worker``.
The next rows' results follow at ``row`` + ``stride``, ``row`` + 2 ``stride``, …
"""


@dataclass(frozen=True, eq=False)
class Merge:
    """How partial results are merged into rows of the output o.
    ``merged``: MERGED [num_merged]. ``parts``: PART [num_parts], sorted by MERGED record, then by token position.
    """

    merged: np.ndarray
    parts: np.ndarray

    def with_part_of(self, worker: int) -> np.ndarray:
        """Return which MERGED records have a part from R-worker ``worker``: bool [num_merged]."""
        owners = np.repeat(np.arange(len(self.merged)), self.merged["num_parts"])
        return np.isin(np.arange(len(self.merged)), owners[self.parts["worker"] == worker])

    def take(self, kept: np.ndarray) -> Merge:
        """Return a Merge with only the MERGED records that ``kept`` selects, bool [num_merged]."""
        merged = self.merged[kept]
        parts = self.parts[np.repeat(kept, self.merged["num_parts"])]
        merged["first_part"] = np.cumsum(merged["num_parts"]) - merged["num_parts"]
        return Merge(merged, parts)


NO_MERGE = Merge(np.zeros(0, MERGED), np.zeros(0, PART))


@dataclass(frozen=True, eq=False)
class MiniBatchRoutes:
    """The routes of one mini-batch: a Route per R-worker, and the merging of partial results.
    ``recurrent``: returns the routes in recurrent layers; None if they equal ``workers``. Recurrent layers have no rows
    for READ spans, and have rows of o, not partial results, for PARTIAL spans.
    """

    workers: tuple[Route, ...]
    merge: Merge = NO_MERGE
    recurrent: Callable[[], Sequence[Route]] | None = None


class Handover(NamedTuple):
    """A recurrent state to copy before a step: a new segment begins from the state at the end of the previous one.
    R-worker ``source`` holds the previous segment as ``source_id``, of ``source_tokens`` tokens. R-worker ``target``
    gets its state as the new sequence ``cache_id``, whose first token is token ``start`` of the whole sequence.
    """

    source: int
    source_id: int
    source_tokens: int
    target: int
    cache_id: int
    start: int


@dataclass(frozen=True)
class StepPlan:
    """One step of every R-worker, in order of index; all have the same number of mini-batches.
    ``routes``: per mini-batch. A plan that tests write by hand, without READ and PARTIAL spans, may have none: then
    rows are in the order of the R-workers' spans (``routes_of_spans``). ``handovers``: recurrent states to copy after
    the controls and before the rows.
    """

    workers: tuple[WorkerPlan, ...]
    routes: tuple[MiniBatchRoutes, ...] = ()
    handovers: tuple[Handover, ...] = ()


@dataclass(frozen=True)
class KvAddress:
    """A KV port, where prefill workers store keys and values.

    ``address``: "host:port". ``epoch``: the secret session number that every frame must carry.
    """

    address: str
    epoch: int = field(repr=False)


@dataclass(frozen=True)
class RWorkerInfo:
    """An R-worker's description of itself, sent when its cache is opened.
    ``read_gb_per_s``: read bandwidth of its threads in 1e9 bytes per second, measured at its start; 0 if not measured.
    ``kv_ports``: its KV port, if it has one; with several ranks, one per rank in order. ``host``: a unique name of its
    machine; "" if unknown. ``state_blocks``: blocks that a hybrid model's states take per sequence. ``park_after``:
    seconds without use after which prefixes go to its disk; None without a disk. ``held``: sequences that it kept from
    an earlier engine. ``kept_of``: the fingerprint of the S-worker that cached them. ``epoch``: the epoch of a named
    session's lease; 0 without one.
    """

    name: str
    num_blocks: int
    block_size: int
    num_threads: int
    isa: str
    own_cores: bool
    read_gb_per_s: float = 0.0
    kv_ports: tuple[KvAddress, ...] = ()
    host: str = ""
    state_blocks: int = 0
    park_after: float | None = None
    held: tuple[HeldSequence, ...] = ()
    kept_of: str = ""
    epoch: int = 0

    @property
    def room_tokens(self) -> int:
        """How many tokens another sequence could have in the R-worker's free blocks, beside its state."""
        blocks = {block for each in self.held for block in each.blocks}
        return (self.num_blocks - len(blocks) - self.state_blocks * (len(self.held) + 1)) * self.block_size


@dataclass(frozen=True)
class WorkerReport:
    """One R-worker's work in a step.
    ``busy_start``, ``busy_end``: float64 [num_mini_batches, num_layers], seconds on the S-worker's
    ``time.perf_counter``; both are 0 if the worker had no rows. ``transfer_seconds``: for all calls of the step, the
    time from submit to output, less busy time and time in queues. ``leaving``: the R-worker asks to leave.
    """

    busy_start: np.ndarray
    busy_end: np.ndarray
    transfer_seconds: float
    bytes_read: int
    blocks_free: int
    leaving: bool = False


@dataclass(frozen=True)
class StepReport:
    """The reports of all R-workers for one step, in order of index.

    ``lost``: R-workers lost during the step. ``leaving``: R-workers that ask to leave. ``faulty``: lost R-workers that
    an audit found at fault. ``is_doubtful``: any cached token may be wrong. ``num_audited``: rows that audits compared.
    """

    workers: tuple[WorkerReport, ...]
    lost: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    faulty: tuple[int, ...] = ()
    is_doubtful: bool = False
    num_audited: int = 0
