"""What hybrids, models whose recurrent layers keep a state per sequence, do not go together with yet."""

from __future__ import annotations

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.layout import KVLayout

ASKED = {
    "kv_shard_tokens": "a state is that of all tokens of a sequence, so no range of them has one",
    "prefill_parallel": "prefill workers hand it on from part to part, as kvr does",
    "tensor_parallel_size": "transformers' plans cut no recurrent layer, so each rank would have whole states",
    "park_dir": "a prefix is of use only with its state, which is not written to disks",
    "prefill_scratch": "its prompts attend where keys and values are, on R-workers",
}
"""Settings that ask for what hybrids do not have, and why."""


def check_hybrid(config: EngineConfig, layout: KVLayout, on_gpu: bool) -> None:
    """ConfigError for settings that do not go together with states, if ``layout`` has some."""
    if not layout.has_states:
        for name in ("mamba_ssm_cache_dtype", "state_on", "state_memory"):
            if getattr(config, name) not in ("auto", None):
                raise ConfigError(f"{name}: no layer of this model is recurrent, so it keeps no states; leave it out")
        return
    defaults = EngineConfig(model=config.model, device=config.device)
    for name, reason in ASKED.items():
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(f"{name}: this model keeps a state per sequence beside its cache: {reason}; leave it out")
    if config.speculative and config.speculative.method == "early_exit":
        raise ConfigError(
            "speculative_config: this model keeps a state per sequence beside its cache: early_exit would advance "
            "those of its first layers while it drafts; use ngram or draft_model"
        )
    if config.prefill_workers and all(layer.state for layer in layout.layers):
        raise ConfigError(
            "prefill_workers: no layer of this model attends, and it is by attention that long prompts are dealt to "
            "prefill workers; leave it out"
        )
    if config.prefill_workers and len({-(-layer.value_head_dim // 16) for layer in layout.layers if layer.state}) > 1:
        raise ConfigError(
            "prefill_workers: this model's recurrent layers have heads of several widths, so that a layer's state lies "
            "otherwise where it is alone; leave it out"
        )
    if config.state_on == "s":
        _check_states_here(config, layout)
    elif config.state_memory is not None:
        raise ConfigError("state_memory: it is for states that lie with the S-worker (state_on s); leave it out")
    if on_gpu:
        raise ConfigError("device: this model keeps a state per sequence, which goes with 'cpu' only so far")


def _check_states_here(config: EngineConfig, layout: KVLayout) -> None:
    """ConfigError for what does not go together with states that lie with the S-worker."""
    if all(layer.state for layer in layout.layers):
        raise ConfigError(
            "state_on: no layer of this model attends, so with its states at the S-worker R-workers would have "
            "nothing to keep and nothing to do: give r, auto or nothing"
        )
    if config.keep_session:
        raise ConfigError(
            "keep_session: states that lie with the S-worker (state_on s) end with it, and keys and values are of no "
            "use to the next one without them; give state_on r, or leave it out"
        )
    if config.prefill_workers:
        raise ConfigError(
            "prefill_workers: they hand states on to R-workers, and with state_on s these lie with the S-worker, which "
            "has no port for them; give state_on r, or leave it out"
        )
