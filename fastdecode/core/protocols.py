"""The contracts at which the floors meet: R-workers, prefill workers, drafters, their policies, and step times."""

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
    """The R-workers of an engine: threads of this process, processes, hosts, or a stand-in. Called from one thread.

    Arrays cross in the model's dtype (float32, or uint16 bits of float16 and bfloat16), C-contiguous. Rows of a
    mini-batch are sorted by R-worker and, within one, attending rows come before append-only rows.
    """

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """Allocate caches for ``layout`` and describe the workers; CapacityError when memory is too small."""

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the controls and prepare the rows of every mini-batch; BackendError if the plan is impossible."""

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Start one layer of one mini-batch and return at once; the buffers stay untouched until ``collect``.

        ``q``: [attending rows, num_heads, query_dim]; ``k``: [rows, num_kv_heads, key_head_dim];
        ``v``: [rows, num_kv_heads, stored_value_dim].
        """

    def ready(self, mini_batch: int) -> bool:
        """True when ``collect`` would return without waiting."""

    def collect(self, mini_batch: int) -> np.ndarray:
        """Wait for o, [attending rows, num_heads, value_head_dim]; valid until this mini-batch's next submit."""

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        """Once all layers of the open step are done, share the attention of ``rows`` among blocks: float32 [num_blocks]
        of each, the mean over heads and then layers, which with the share of sinks sum to 1.

        None of a row of which an R-worker that has a part is lost.
        """

    def end_step(self) -> StepReport:
        """Commit the lengths of all sequences in the plan and report."""

    def abandon_step(self) -> None:
        """Forget the rows of the step: lengths and blocks are as ``begin_step``'s controls left them.

        No effect where no step is open, so that it can follow any failure.
        """

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        """The committed keys and values of a sequence that R-worker ``worker`` holds, as bytes: uint8 [num_bytes]; of
        ``num_tokens`` tokens from token ``start`` on, None: of all that follow.

        For each layer, for each token, keys [num_kv_heads, key_head_dim] and then values [num_kv_heads,
        stored_value_dim], as the KV dtype stores them, whatever the block size and the instruction set. BackendError
        for an unknown worker or sequence, for tokens that it has not, or while a step is open.
        """

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        """Give R-worker ``worker`` a new sequence of ``num_tokens`` tokens, from what ``export`` returned anywhere.
        From ``start`` > 0 on, a multiple of the block size: as many more of one that has exactly those before.

        ``data``: uint8 [num_bytes]. BackendError, with nothing changed, for an unknown worker, a sequence that exists,
        a ``start`` that is not its length or within a block, too few free blocks, bytes that are not those of
        ``num_tokens``, or while a step is open.
        """

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        """Between steps: R-workers that have joined since, by index; from the next step on every plan lists them too.

        They take the places ``vacant`` of R-workers that are gone, in order, and then new ones at the end. Never
        waits. Empty where R-workers cannot join.
        """

    def dismiss(self, worker: int) -> None:
        """Between steps: let R-worker ``worker`` go, with everything it holds; plans list it still, with no rows."""

    def close(self) -> None:
        """Free everything; may be called twice."""


class PrefillBackend(Protocol):
    """The prefill workers of an engine, by number; called from one thread. One that is lost leaves the others going."""

    def open(self, model: str, max_model_len: int, vocab_size: int, layout: KVLayout, kv_heads: Sequence[int]) -> int:
        """Open a session with each and return how many there are.

        BackendError where one refuses, or does not have the model that ``model`` identifies. ``layout``: the whole
        model's, with the dtype of the R-workers' caches, and the arithmetic in which they attend ("auto" where they
        differ). ``kv_heads``: of each layer, how many KV heads each of an R-worker's KV ports takes.
        """

    def submit(self, prefill: RemotePrefill, r_workers: Sequence[RWorkerInfo]) -> None:
        """Hand a prompt out, once all that store it have reserved its blocks; ``r_workers``: all, by index."""

    def cancel(self, job_id: int) -> None:
        """A prompt is not wanted any more; unknown ids are ignored."""

    def outcomes(self) -> PrefillOutcomes:
        """What has become known since the last call; never waits."""

    def invite(self, address: str) -> None:
        """Have the worker that listens at ``address``, "host:port", join, unless it is here; never waits."""

    def wait(self, timeout_seconds: float) -> None:
        """Return once ``outcomes`` has something, or the time is over."""

    @property
    def jobs(self) -> list[int]:
        """Ids of the jobs under way."""

    def close(self) -> None:
        """Free all workers; may be called twice."""


class PrefillPolicy(Protocol):
    """Decides for each prompt whether prefill workers compute it, and which tokens each takes. Pure."""

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """The time of the decisions that follow, prompts that have not begun, and sequences that decode."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """Parts of the ``num_tokens`` tokens that a prompt has after a cached prefix of ``context_len``, in order.

        None: the S-worker is to compute them.
        """

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """A prompt went to prefill workers as ``assign`` said."""

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """It is ``computed``, or was aborted, or failed; unknown ids are ignored."""

    def joined(self, worker: int) -> None:
        """Prefill worker ``worker`` is there."""

    def lost(self, worker: int) -> None:
        """Prefill worker ``worker`` is gone."""


class DraftPolicy(Protocol):
    """Decides how many draft tokens each sequence verifies in the next step. Pure."""

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        """Draft tokens of each decoding sequence: int64 [n], from 0 to ``most``, int64 [n].

        ``acceptance``: float64 [n], the probability that a draft token is accepted where those before it were.
        ``num_tokens``: rows of the step without drafts; ``kv_loads``: float64 [num_workers], KV tokens attended.
        """

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """The probability that a draft token is accepted, float64 [n], of sequences of whose drafts ``tried`` were
        tested and ``kept`` accepted, the last ones counting most; both float64 [n]."""

    def observe(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_loads: Sequence[int],
        s_seconds: float,
        wait_seconds: float,
        r_seconds: Sequence[float],
    ) -> None:
        """How long a decode step of ``num_tokens`` rows, drafts included, of ``num_sequences`` sequences took."""

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        """How long ``num_passes`` draft tokens of each of ``num_sequences`` sequences took."""


class DraftRequest(NamedTuple):
    """A sequence that decodes, for which ``num_drafts`` tokens are to be drafted, at least one.

    R-worker ``worker`` has its tail, as sequence ``cache_id``: of its ``num_cached`` tokens, all but the last, those
    from ``base`` on. ``reads``: worker, range id and start of the closed ranges before it, in order. ``sampling``: what
    the sampler needs for the next token (``SamplingRow``).
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
    """What R-workers have yet to hear from a scheduler: forks and releases."""

    def controls_alone(self) -> ScheduledStep:
        """A step with the pending controls and no rows; they count as told."""

    def take_back(self, step: ScheduledStep) -> None:
        """The R-workers did not hear ``step``: its controls are pending again."""


class Drafter(Protocol):
    """Guesses next tokens; called between steps."""

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        """Draft tokens by sequence, at most as many as each asks for; none where there is no guess.

        Sequences are left out while more of their text has to be computed first. A drafter that reads the sequences'
        own caches tells R-workers of ``pending`` first.
        """

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended, or lost its cache; unknown ones are ignored."""


class StepTime(Protocol):
    """The scheduler's only view of the future."""

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """Seconds a step takes that computes ``tokens`` rows and attends over ``kv_tokens`` cached tokens."""
