"""The factory of drafters: n-grams, a draft model, or the model's own first layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.protocols import AttentionBackend, Drafter
from fastdecode.drafting.draft_model import DraftModelDrafter
from fastdecode.drafting.early_exit import EarlyExitDrafter
from fastdecode.drafting.ngram import NgramDrafter
from fastdecode.drafting.speculative_config import SpeculativeConfig
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.run.s_worker import Lead


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
    ``make_backend``: makes the R-worker of a draft model. ``lead``: with tensor parallelism, makes the other ranks
    compute early-exit passes too. Raise ConfigError, ModelLoadError, UnsupportedModelError or CapacityError for a model
    that cannot draft.
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
        int8_calibration_tokens=0,  # it only proposes tokens
    )
    try:
        draft = SModel(own)
    except FastDecodeError as error:
        raise type(error)(f"speculative_config: model {speculative.model!r}: {error}") from error
    if not draft.layout.rewinds(1):
        raise ConfigError(
            f"speculative_config: model {speculative.model!r} has recurrent layers, whose states cannot be "
            f"rewound after a rejected draft: choose a model without such layers"
        )
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config: draft model {speculative.model!r} has a vocabulary of {draft.vocab_size} tokens, "
            f"and the target model one of {model.vocab_size}; they must be the same"
        )
    if not model.shares_tokenizer(own):
        raise ConfigError(
            f"speculative_config: draft model {speculative.model!r} has another tokenizer than the target model"
        )
    return draft
