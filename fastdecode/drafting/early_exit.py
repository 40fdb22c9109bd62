"""The common base of drafters that run forward passes, and the early-exit drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastdecode.core.errors import interrupts_deferred
from fastdecode.core.protocols import DraftRequest, PendingControls
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep, deal
from fastdecode.scheduler.sequence import text_tokens
from fastdecode.sworker import SWorker
from fastdecode.sworker.sampling import SampledToken, SamplingRow


@dataclass(eq=False)
class Draft:
    """The tokens drafted for ``request``.
    A draft token is drawn with the random number that the model will use for the same position. So draft and model
    mostly agree if their probabilities are close. Grammars are not applied here; tokens that they forbid are cut off
    later.
    """

    request: DraftRequest
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        row: SamplingRow = self.request.sampling
        params = row.params if row.params.logprobs is None else replace(row.params, logprobs=None)
        self._row = row if row.grammar is None and params is row.params else replace(row, params=params, grammar=None)

    @property
    def wants_more(self) -> bool:
        """True until the draft has the requested number of tokens, or an end token."""
        return not self.ended and len(self.token_ids) < self.request.num_drafts

    @property
    def num_tokens(self) -> int:
        """The number of prompt and output tokens of the sequence, without drafts."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    def tokens(self, start: int, count: int) -> list[int]:
        """Return ``count`` tokens of prompt and output from position ``start``, without drafts."""
        return text_tokens(self.request.prompt_token_ids, self.request.output_token_ids, start, count)

    @property
    def sampling_row(self) -> SamplingRow:
        """The sampler's input for the next draft token."""
        return self._row.after(self.token_ids)

    def take(self, sampled: SampledToken) -> None:
        """Append ``sampled`` to the draft, or end the draft if sampling failed."""
        if sampled.failed:
            self.ended = True
            return
        self.token_ids.append(sampled.token_id)
        self.ended = sampled.token_id in self._row.stop_token_ids


def draw(s_worker: SWorker, step: ScheduledStep, drafts: Sequence[Draft]) -> None:
    """Run the forward pass of ``step``, which R-workers have begun; append a sampled token to each of ``drafts``."""
    sampled = s_worker.run(step, {each.sequence_id: [each.sampling_row] for each in drafts})
    for each in drafts:
        each.take(sampled[each.sequence_id][0])


class EarlyExitDrafter:
    """Drafts with the model's own first layers, norm and head.
    A pass is a step of these layers only, over the keys and values that the model has cached. The step is abandoned
    afterwards, so that no draft stays in the cache. Therefore each pass computes the last output token and all earlier
    drafts again.
    """

    def __init__(self, s_worker: SWorker, num_mini_batches: int) -> None:
        """``s_worker``: runs the model's first layers over the model's R-workers."""
        self.s_worker = s_worker
        self._num_mini_batches = num_mini_batches

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        """See ``Drafter``. If an R-worker is lost during drafting, the next step's report names it."""
        by_load = sorted(requests, key=lambda each: (each.worker, -each.num_cached))
        drafts = [Draft(each) for each in by_load]
        while growing := [each for each in drafts if each.wants_more]:
            step = self._begin(growing, pending)
            try:
                draw(self.s_worker, step, growing)
            finally:
                self.s_worker.backend.abandon_step()
        return {each.sequence_id: each.token_ids for each in drafts}

    def forget(self, sequence_id: int) -> None:
        """Do nothing, since this drafter stores nothing about sequences."""

    def _begin(self, drafts: Sequence[Draft], pending: PendingControls) -> ScheduledStep:
        """Send the ``pending`` controls, and begin a step with each sequence's last output token and its drafts."""
        decodes = MiniBatch.of(map(_chunk, drafts))
        with interrupts_deferred():
            told = pending.controls_alone()
            step = replace(told, mini_batches=deal(decodes, (), self._num_mini_batches))
            try:
                self.s_worker.backend.begin_step(step.to_step_plan())
            except BaseException:
                pending.take_back(told)
                raise
        return step


def _chunk(draft: Draft) -> Chunk:
    """Return the chunk of the sequence's last output token followed by its drafts."""
    request = draft.request
    tokens = [request.output_token_ids[-1], *draft.token_ids]
    return Chunk(
        request.sequence_id,
        request.worker,
        request.num_cached,
        tokens,
        base=request.base,
        cache_id=request.cache_id,
        reads=request.reads,
    )
