"""The cycle's companion that drafts between two steps, and the factory of drafters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.api.request import InFlight
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.metrics import MODEL, WAIT, StateClock
from fastdecode.core.protocols import AttentionBackend, Drafter, DraftRequest
from fastdecode.cycle import Companion, Cycle
from fastdecode.drafting.draft_model import DraftModelDrafter
from fastdecode.drafting.early_exit import EarlyExitDrafter
from fastdecode.drafting.ngram import NgramDrafter
from fastdecode.drafting.speculative_config import SpeculativeConfig
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.run.s_worker import Lead
from fastdecode.sworker.sampling import SampledToken


class Speculation(Companion):
    """Drafts tokens for the next step of an engine.

    A draft is accepted if the sampler draws the same token from the model's logits. So tokens, seeds and
    log-probabilities equal those of decoding without drafts. For a drafter that names one token this is rejection
    sampling (Leviathan et al., 2023; Chen et al., 2023). Token d is accepted with the model's probability p(d);
    otherwise another x is drawn with p(x) / (1 - p(d)).

    ``s_seconds``, ``wait_seconds``: seconds of model code, and of waiting for R-workers, for the last drafts.
    """

    def __init__(self, drafter: Drafter, in_flight: InFlight, clock: StateClock) -> None:
        self.drafter = drafter
        self.s_seconds = self.wait_seconds = 0.0
        self._clock = clock
        self._in_flight = in_flight

    def prepare(self, cycle: Cycle) -> None:
        """Draft for the sequences to which the scheduler grants draft tokens."""
        self.s_seconds = self.wait_seconds = 0.0
        scheduler = cycle.scheduler
        wanted = scheduler.drafts.grant()
        if not wanted:
            return
        start, before = cycle.world.now(), self._clock.snapshot()
        proposed = self.drafter.propose([self._request(*each) for each in wanted.items()], scheduler)
        drafts = {each: self._in_flight.completion(each).fitting(tokens) for each, tokens in proposed.items() if tokens}
        scheduler.drafts.propose(drafts)
        after = self._clock.snapshot()
        self.s_seconds, self.wait_seconds = (after[state] - before[state] for state in (MODEL, WAIT))
        policy = scheduler.drafts.policy
        if policy and len(proposed) == len(wanted):  # only if no time of these passes went to computing prompts
            policy.observe_drafting(len(wanted), max(wanted.values()), cycle.world.now() - start)

    def forget(self, sequence_id: int) -> None:
        self.drafter.forget(sequence_id)

    def _request(self, sequence_id: int, num_drafts: int) -> DraftRequest:
        completion = self._in_flight.completion(sequence_id)
        sequence = completion.sequence
        tail = sequence.tail
        return DraftRequest(
            sequence_id,
            sequence.prompt_token_ids,
            sequence.output_token_ids,
            num_drafts,
            sequence.worker,
            sequence.num_cached,
            self._in_flight.sampling_rows(sequence_id)[0],
            tail.cache_id,
            tail.start,
            tuple((each.home, each.cache_id, each.start) for each in sequence.closed),
        )


def num_accepted(sampled: list[SampledToken], draft_token_ids: list[int]) -> int:
    """Return how many of ``draft_token_ids`` are accepted: those before the first that differs from ``sampled``.
    ``sampled``: one token more than drafts, each sampled as if the earlier drafts were right.
    """
    for count, (token, draft) in enumerate(zip(sampled, draft_token_ids, strict=False)):
        if token.token_id != draft:
            return count
    return len(draft_token_ids)


def make_drafter(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    model: SModel,
    s_worker: SWorker,
    num_mini_batches: int,
    make_backend: Callable[[KVLayout], AttentionBackend],
    cleanup: ExitStack,
    lead: Lead | None = None,
) -> Drafter:
    """Return the drafter for ``speculative``; ``cleanup`` closes it.
    ``make_backend``: makes the R-worker of a draft model. ``lead``: lets other ranks compute the first layers too.
    Raise ConfigError, ModelLoadError, UnsupportedModelError or CapacityError for a model that cannot draft.
    """
    if speculative.method == "ngram":
        return NgramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    if speculative.method == "early_exit":
        first = model.first_layers(speculative.num_layers)
        return EarlyExitDrafter(s_worker.beside(first, model.layout, s_worker.backend, lead), num_mini_batches)
    draft = load_draft_model(config, speculative, model)
    backend = make_backend(draft.layout)
    cleanup.callback(backend.close)
    (info,) = backend.open(replace(draft.layout, isa=config.uniform_arithmetic))
    own = s_worker.beside(draft.code, draft.layout, backend)
    return DraftModelDrafter(own, info.num_blocks, info.block_size, config.max_num_batched_tokens)


def load_draft_model(config: EngineConfig, speculative: SpeculativeConfig, model: SModel) -> SModel:
    """Return the draft model for ``model``, with that model's dtype and length limit.
    Raise a FastDecodeError that says why the draft model cannot be used.
    """
    own = replace(
        config,
        model=speculative.model,
        tokenizer=None,
        revision=None,
        skip_tokenizer_init=True,
        hf_overrides={},
        dtype=model.layout.model_dtype,
        max_model_len=model.max_model_len,
        lora_modules=[],
        speculative_config={},
        latent_absorption="s",
    )
    try:
        draft = SModel(own)
    except FastDecodeError as error:
        raise type(error)(f"speculative_config: model {speculative.model!r}: {error}") from error
    if not draft.layout.rewinds(1):
        raise ConfigError(
            f"speculative_config: model {speculative.model!r} keeps a state per sequence, which cannot go back to the "
            f"token before a draft that is refused"
        )
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config: model {speculative.model!r} has a vocabulary of {draft.vocab_size} tokens, and the "
            f"model it is to draft for one of {model.vocab_size}; they must be the same"
        )
    if not model.shares_tokenizer(own):
        raise ConfigError(
            f"speculative_config: model {speculative.model!r} has another tokenizer than the model it is to draft for"
        )
    return draft
