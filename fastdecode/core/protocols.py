"""The interfaces between the packages: R-workers, prefill workers, drafters, their policies, and step times."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdecode.core.parked import Parks
from fastdecode.core.remote_prefill import PrefillOutcomes, PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport
from fastdecode.core.weighing import Queries, WeighedRow
from fastdecode.kinds.layout import KVLayout


class AttentionBackend(Protocol):
    """The R-workers of an engine: threads, processes, hosts, or a test double. Only one thread may call it.

    Arrays have the model's dtype (float32, or uint16 bits of float16 and bfloat16) and are C-contiguous. Rows of a
    mini-batch are sorted by R-worker. Within an R-worker, attending rows precede rows that only append to the cache.
    """

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """Allocate caches for ``layout``, and return a description of each R-worker.
        Raise CapacityError if memory is too small.
        """

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the controls of ``plan``, and prepare for its rows.
        Raise BackendError if an R-worker refuses the plan.
        """

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Start one layer of a mini-batch and return at once; the arrays must stay unchanged until ``collect``.
        ``q``: [attending rows, num_heads, query_dim]; ``k``: [rows, num_kv_heads, key_head_dim]; ``v``: [rows,
        num_kv_heads, stored_value_dim].
        """

    def ready(self, mini_batch: int) -> bool:
        """Return True if ``collect`` would return without waiting."""

    def collect(self, mini_batch: int) -> np.ndarray:
        """Wait for the attention output, [attending rows, num_heads, value_head_dim]; return it.
        It stays valid until the next ``submit``.
        """

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        """Return how each row's attention is divided among the blocks of its context: float32 [num_blocks] per row.
        All layers of the open step must be done. A block's share is a mean over heads, then over layers. The shares of
        all blocks and of the attention sinks add up to 1. A row's result is None if an R-worker with part of its
        context is lost.
        """

    def end_step(self) -> StepReport:
        """Commit the rows of the step, so that they count as cached; return the R-workers' reports."""

    def abandon_step(self) -> None:
        """Drop the rows of the open step; the controls of ``begin_step`` stay applied.
        Do nothing if no step is open, so that this call can follow any failure.
        """

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        """Return committed keys and values of a sequence on R-worker ``worker``, as bytes: uint8 [num_bytes].
        They belong to ``num_tokens`` tokens from ``start`` on; None means all. The order is by layer, then token: keys
        [num_kv_heads, key_head_dim], then values [num_kv_heads, stored_value_dim]. Elements have the KV dtype. The
        bytes do not depend on block size and instruction set. Raise BackendError for an unknown worker or sequence, for
        missing tokens, or while a step is open.
        """

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        """Give R-worker ``worker`` a new sequence of ``num_tokens`` tokens, from ``data`` that an R-worker exported.

        With ``start`` > 0, a multiple of the block size, append them to a sequence of exactly ``start`` tokens.
        ``data``: uint8 [num_bytes]. Raise BackendError, changing nothing, for an unknown worker, an existing sequence,
        a wrong ``start``, too few free blocks, a wrong number of bytes, or while a step is open.
        """

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        """Return the R-workers that have joined since the last call, by index. Call this between steps.
        Later plans include them. They take the ``vacant`` indices of lost R-workers in order, then new ones. This never
        waits. R-workers that are threads or fixed addresses never join.
        """

    def dismiss(self, worker: int) -> None:
        """Disconnect R-worker ``worker`` between steps; its cached tokens are lost.
        Later plans still have an entry for it, without rows.
        """

    def close(self) -> None:
        """Free the R-workers; may be called twice."""


class RanksBackend(AttentionBackend, Protocol):
    """The R-workers of all tensor-parallel ranks as one backend, through which rank 0 also leads the other ranks."""

    @property
    def pool(self) -> AttentionBackend:
        """This rank's own R-workers."""

    def parks(self, own: Parks) -> Parks:
        """Return access to the disks of all ranks' R-workers; ``own``: access to the disks of this rank's R-workers."""

    def begin_prompts(self, num_tokens: int) -> None:
        """Let the other ranks prepare to attend prompts of up to ``num_tokens`` tokens. Steps may follow."""

    def lead(self, step: ScheduledStep, overlap: bool, by: str = "model") -> AbstractContextManager[None]:
        """Return a context in which all ranks compute the layers of ``step``.
        ``by``: "model", or "first layers" if a drafter computes only these.
        """

    def forget(self, sequence_id: int) -> None:
        """Free the keys and values that all ranks keep for the aborted prompt of sequence ``sequence_id``."""


class PrefillBackend(Protocol):
    """The prefill workers of an engine, by number.
    Only one thread may call it. The loss of one worker does not stop the others.
    """

    def open(self, model: str, max_model_len: int, vocab_size: int, layout: KVLayout, kv_heads: Sequence[int]) -> int:
        """Open a session with each prefill worker; return how many there are.
        Raise BackendError if one refuses, or lacks the model that ``model`` identifies. ``layout``: the whole model's
        layout, with the R-workers' KV dtype and instruction set ("auto" if they differ). ``kv_heads``: for each KV port
        of an R-worker, how many KV heads of a layer it takes.
        """

    def submit(self, prefill: RemotePrefill, r_workers: Sequence[RWorkerInfo]) -> None:
        """Send a prompt to prefill workers. All R-workers in it must have reserved blocks already.
        ``r_workers``: all R-workers by index.
        """

    def cancel(self, job_id: int) -> None:
        """Cancel the prompt ``job_id``; unknown ids are ignored."""

    def outcomes(self) -> PrefillOutcomes:
        """Return what has happened since the last call: prompts computed or failed, prefill workers lost or joined.
        This never waits.
        """

    def invite(self, address: str) -> None:
        """Ask the prefill worker that listens at ``address``, "host:port", to join, unless it has joined.
        Never wait.
        """

    def wait(self, timeout_seconds: float) -> None:
        """Wait until ``outcomes`` has something to return, at most ``timeout_seconds``."""

    @property
    def jobs(self) -> list[int]:
        """Ids of prompts that prefill workers are computing."""

    def close(self) -> None:
        """Free all workers; may be called twice."""


class PrefillPolicy(Protocol):
    """Decides whether prefill workers compute a prompt, and which tokens each computes. Its methods only calculate."""

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """Set the time for the next decisions, the number of waiting prompts, and the number of decoding sequences."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """Return which prefill worker computes which of ``num_tokens`` prompt tokens after ``context_len`` cached ones.
        The parts are in order. If there are none, the S-worker computes the tokens.
        """

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """Record that the prompt ``job_id`` was sent to prefill workers in ``parts``, which ``assign`` returned."""

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """Record that prefill workers no longer compute prompt ``job_id``: it is ``computed``, was aborted, or failed.
        Unknown ids are ignored.
        """

    def joined(self, worker: int) -> None:
        """Use prefill worker ``worker`` from now on."""

    def lost(self, worker: int) -> None:
        """Stop using prefill worker ``worker``, which is lost."""


class DraftPolicy(Protocol):
    """Decides how many draft tokens each sequence verifies in the next step. Its methods only calculate."""

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """Return how many draft tokens each decoding sequence gets: int64 [n], at most ``most``, int64 [n].
        ``acceptance``: float64 [n], the probability that a draft token is accepted if all before it were.
        ``num_tokens``: rows of the step without drafts. ``kv_loads``: float64 [num_workers], attended KV tokens.
        """

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return the probability that the next draft token of each sequence is accepted, float64 [n].
        ``tried``, ``kept``: float64 [n], decaying counts of a sequence's verified and accepted drafts.
        """

    def observe(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_loads: Sequence[int],
        s_seconds: float,
        wait_seconds: float,
        r_seconds: Sequence[float],
    ) -> None:
        """Learn from a decode step's duration. ``num_tokens``: rows of the step, drafts included."""

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        """Learn from the seconds in which ``num_passes`` tokens each were drafted for ``num_sequences`` sequences."""


class DraftRequest(NamedTuple):
    """A decoding sequence that gets ``num_drafts`` draft tokens, at least one.

    ``num_cached``: its cached tokens, all but the last one. ``worker``: the R-worker that holds those from position
    ``base`` on, as ``cache_id``. ``reads``: for each earlier segment, in order, its R-worker, range id and start.
    ``sampling``: the sampler's input for the next token (``SamplingRow``).
    """

    sequence_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    num_drafts: int
    worker: int
    num_cached: int
    sampling: Any
    cache_id: int
    base: int = 0
    reads: tuple[tuple[int, int, int], ...] = ()


class PendingControls(Protocol):
    """A scheduler's pending controls for R-workers: forks and releases."""

    def controls_alone(self) -> ScheduledStep:
        """Return a step with the pending controls and without rows; the caller must send it."""

    def take_back(self, step: ScheduledStep) -> None:
        """Keep the controls of ``step`` for a later step, since the R-workers did not receive them."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences; called between steps."""

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        """Return draft tokens by sequence id, at most as many as requested; none for sequences without a guess.
        Sequences whose tokens the drafter has not computed yet are left out. A drafter that reads the sequences' own
        caches sends the ``pending`` controls first.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop all data of a sequence that has ended or lost its cache; unknown ids are ignored."""


class StepTime(Protocol):
    """Forecasts how long a step takes."""

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step that computes ``tokens`` rows and attends over ``kv_tokens`` cached tokens."""
