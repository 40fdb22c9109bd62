"""The interfaces between the floors: R-workers, prefill workers, drafters, their policies, and step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdecode.core.remote_prefill import PrefillOutcomes, PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport
from fastdecode.core.weighing import Queries, WeighedRow
from fastdecode.kinds.layout import KVLayout


class AttentionBackend(Protocol):
    """The R-workers of an engine: threads, processes, hosts, or a test double. It is called from one thread.

    Arrays have the model's dtype (float32, or uint16 bits of float16 and bfloat16) and are C-contiguous. Rows of a
    mini-batch are sorted by R-worker; of one R-worker, attending rows precede append-only rows.
    """

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """Allocate caches for ``layout`` and describe the workers. Raise CapacityError if memory is too small."""

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the controls and prepare the rows of every mini-batch. Raise BackendError if the plan is impossible."""

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Start one layer of one mini-batch and return at once; the buffers stay untouched until ``collect``.

        ``q``: [attending rows, num_heads, query_dim]; ``k``: [rows, num_kv_heads, key_head_dim];
        ``v``: [rows, num_kv_heads, stored_value_dim].
        """

    def ready(self, mini_batch: int) -> bool:
        """Return True if ``collect`` would return without waiting."""

    def collect(self, mini_batch: int) -> np.ndarray:
        """Wait for o, [attending rows, num_heads, value_head_dim]; valid until this mini-batch's next submit."""

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        """Once all layers of the open step are done, share the attention of ``rows`` among blocks: float32 [num_blocks]
        of each, the mean over heads and then layers, which with the share of sinks sum to 1.

        None for a row when an R-worker with a part of it is lost.
        """

    def end_step(self) -> StepReport:
        """Commit the lengths of all sequences in the plan, and report."""

    def abandon_step(self) -> None:
        """Drop the rows of the step: lengths and blocks are as after ``begin_step``'s controls.

        It has no effect if no step is open, so that it can follow any failure.
        """

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        """Return committed keys and values of a sequence on R-worker ``worker``, as bytes: uint8 [num_bytes].

        They are those of ``num_tokens`` tokens from ``start`` on; None means all. The order is by layer, then token:
        keys [num_kv_heads, key_head_dim], then values [num_kv_heads, stored_value_dim]. They are in the KV dtype,
        independent of block size and instruction set. Raise BackendError for an unknown worker or sequence, for missing
        tokens, or while a step is open.
        """

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        """Give R-worker ``worker`` a new sequence of ``num_tokens`` tokens, exported by any R-worker.

        With ``start`` > 0, a multiple of the block size, append them to a sequence of exactly ``start`` tokens.
        ``data``: uint8 [num_bytes]. Raise BackendError, changing nothing, for an unknown worker, an existing sequence,
        a wrong ``start``, too few free blocks, a wrong number of bytes, or while a step is open.
        """

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        """Return the R-workers that have joined, by index. Call it between steps; later plans include them.

        They take the ``vacant`` indices of lost R-workers in order, then new ones. This never waits. The result is
        empty if R-workers cannot join.
        """

    def dismiss(self, worker: int) -> None:
        """Disconnect R-worker ``worker``, with everything it holds, between steps.

        Plans still list it, without rows.
        """

    def close(self) -> None:
        """Free everything; may be called twice."""


class PrefillBackend(Protocol):
    """The prefill workers of an engine, by number.

    It is called from one thread. The loss of one does not stop the others.
    """

    def open(self, model: str, max_model_len: int, vocab_size: int, layout: KVLayout, kv_heads: Sequence[int]) -> int:
        """Open a session with each prefill worker; return how many there are.

        Raise BackendError if one refuses, or lacks the model that ``model`` identifies. ``layout``: the whole model's,
        with the R-workers' KV dtype and their arithmetic ("auto" if they differ). ``kv_heads``: by layer, how many KV
        heads each KV port of an R-worker takes.
        """

    def submit(self, prefill: RemotePrefill, r_workers: Sequence[RWorkerInfo]) -> None:
        """Hand out a prompt, after all its R-workers have reserved blocks. ``r_workers``: all R-workers by index."""

    def cancel(self, job_id: int) -> None:
        """Cancel a prompt; unknown ids are ignored."""

    def outcomes(self) -> PrefillOutcomes:
        """Return what has happened since the last call; never waits."""

    def invite(self, address: str) -> None:
        """Ask the worker that listens at ``address``, "host:port", to join, unless it has joined. Never waits."""

    def wait(self, timeout_seconds: float) -> None:
        """Wait until ``outcomes`` has something to return, at most ``timeout_seconds``."""

    @property
    def jobs(self) -> list[int]:
        """Ids of unfinished jobs."""

    def close(self) -> None:
        """Free all workers; may be called twice."""


class PrefillPolicy(Protocol):
    """Decides whether prefill workers compute a prompt, and which tokens each takes. It is pure."""

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """Set the time for the next decisions, the number of prompts that have not begun, and of decoding sequences."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """Return the parts, in order, of a prompt's ``num_tokens`` tokens after a cached prefix of ``context_len``.

        An empty result means that the S-worker computes them.
        """

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """Record that a prompt went to prefill workers as ``assign`` decided."""

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """Record that a prompt was ``computed``, was aborted, or failed; unknown ids are ignored."""

    def joined(self, worker: int) -> None:
        """Add prefill worker ``worker``."""

    def lost(self, worker: int) -> None:
        """Remove prefill worker ``worker``."""


class DraftPolicy(Protocol):
    """Decides how many draft tokens each sequence verifies in the next step. It is pure."""

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """Return the draft tokens of each decoding sequence: int64 [n], from 0 to ``most``, int64 [n].

        ``acceptance``: float64 [n], the probability that a draft token is accepted if its predecessors were.
        ``num_tokens``: rows of the step without drafts. ``kv_loads``: float64 [num_workers], attended KV tokens.
        """

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return the probability that a sequence's next draft token is accepted, float64 [n].

        ``tried``, ``kept``: float64 [n], decaying counts of its tested and accepted drafts.
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
        """Learn the duration of a decode step. ``num_tokens``: its rows, drafts included."""

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        """Learn the time of drafting ``num_passes`` tokens for each of ``num_sequences`` sequences."""


class DraftRequest(NamedTuple):
    """A decoding sequence that gets ``num_drafts`` draft tokens, at least one.

    R-worker ``worker`` holds its tail as sequence ``cache_id``: of its ``num_cached`` tokens (all but the last) those
    from ``base`` on. ``reads``: worker, range id and start of the closed ranges before it, in order. ``sampling``: the
    sampler's input for the next token (``SamplingRow``).
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
        """Return a step with the pending controls and no rows; the controls then count as sent."""

    def take_back(self, step: ScheduledStep) -> None:
        """Make the controls of ``step`` pending again, since the R-workers did not receive it."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences; called between steps."""

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        """Return draft tokens by sequence, at most as many as requested; none without a guess.

        A sequence is left out while more of its text must be computed first. A drafter that reads the sequences' own
        caches sends the ``pending`` controls first.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop all data of a sequence that has ended or lost its cache; unknown ones are ignored."""


class StepTime(Protocol):
    """The scheduler's only forecast of time."""

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step that computes ``tokens`` rows and attends over ``kv_tokens`` cached tokens."""
