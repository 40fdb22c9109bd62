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
    "prefill_scratch": "prompts attend where the state is, on the R-worker",
}
"""Settings that ask for what hybrids do not have, and why."""


def check_hybrid(config: EngineConfig, layout: KVLayout, on_gpu: bool) -> None:
    """ConfigError for settings that do not go together with states, if ``layout`` has some."""
    if not layout.has_states:
        for name in ("mamba_ssm_cache_dtype", "state_on"):
            if getattr(config, name) != "auto":
                raise ConfigError(f"{name}: no layer of this model is recurrent, so it keeps no states; leave it out")
        return
    if config.state_on == "s":
        raise ConfigError(
            "state_on: states lie on R-workers, whose memory they take and whose memory's bandwidth each step needs "
            "for them, and where they are forked, moved, copied and lost with the blocks of their sequences. An "
            "S-worker keeps nothing of a sequence between steps, so 's' is not built: give r, auto or nothing"
        )
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
    if on_gpu:
        raise ConfigError("device: this model keeps a state per sequence, which goes with 'cpu' only so far")
