"""Names that code written for vLLM has and that are not taken here: what each hears, and what may be ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError

logger = logging.getLogger(__name__)

RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}
"""Settings that have another name here."""

IGNORED = frozenset({
    "allowed_local_media_path", "allowed_media_domains", "async_scheduling", "attention_backend", "compilation_config",
    "cpu_offload_gb", "disable_cascade_attn", "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats",
    "distributed_executor_backend", "enable_chunked_prefill", "enable_expert_parallel", "enable_lora",
    "guided_decoding_backend", "limit_mm_per_prompt", "long_prefill_token_threshold", "max_cpu_loras", "max_logprobs",
    "max_lora_rank", "max_loras", "max_num_partial_prefills", "max_parallel_loading_workers", "max_seq_len_to_capture",
    "mm_processor_kwargs", "multi_step_stream_outputs", "num_lookahead_slots", "num_scheduler_steps", "preemption_mode",
    "ray_workers_use_nsight", "scheduler_delay_factor", "structured_outputs_config", "swap_space",
    "use_v2_block_manager",
})  # fmt: skip
"""Settings of how vLLM works inside, or of media: no text changes without them."""

_ADAPTERS = 'one adapter is merged into the weights of an engine: give lora_modules=["NAME=FOLDER"] when it is made'
_TEXTS_ONLY = "models that embed, classify or score are not run here"
_BEAMS = "there is no beam search; n samples at a temperature are nearest"
_NO_SLEEP = "the model stays loaded: close, and load it again"
_PROFILER = "give trace=FILE, which writes Chrome trace events"

REFUSED = {
    "additional_config": "nothing here takes any",
    "calculate_kv_scales": "kv_cache_dtype int8 and int4 have scales of their own",
    "code_revision": "give revision",
    "config_format": "configurations are those of transformers",
    "convert": _TEXTS_ONLY,
    "data_parallel_size": "start one engine each, or one with more R-workers",
    "disable_sliding_window": "give hf_overrides",
    "download_dir": "set the environment variable HF_HUB_CACHE",
    "enable_prompt_embeds": "give text or token ids",
    "enable_return_routed_experts": "routed experts are not told",
    "enable_sleep_mode": _NO_SLEEP,
    "generation_config": "the model's is read; give sampling_params",
    "gpu_memory_utilization": "KV caches are not on the GPU here: --kv-cache-memory sizes them on each R-worker, and "
    "--prefill-scratch what prompts in progress take on the S-worker",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_transfer_config": "give prefill_workers",
    "logits_processors": "no code comes with requests; logit_bias, allowed_token_ids and bad_words do much of it",
    "model_impl": "models are those of transformers",
    "num_gpu_blocks_override": "give kv_cache_memory",
    "override_generation_config": "give sampling_params",
    "pipeline_parallel_size": "the layers run on one S-worker, or on ranks of tensor_parallel_size",
    "pooler_config": _TEXTS_ONLY,
    "rope_scaling": "give hf_overrides",
    "rope_theta": "give hf_overrides",
    "runner": _TEXTS_ONLY,
    "scheduling_policy": "requests come first in, first out",
    "task": _TEXTS_ONLY,
    "tokenizer_mode": "tokenizers are those of the tokenizers library",
    "tokenizer_revision": "a tokenizer has the model's revision: give another as a folder",
    "worker_cls": "workers are this program's own",
}
"""Settings without which the engine would do something else than was asked, each with what to do instead."""

_MEAN_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1, "1"),
    "generation_config": ("auto",),
    "model_impl": ("auto", "transformers"),
    "pipeline_parallel_size": (1, "1"),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
}

_FOUND_IN_CHECKPOINTS = ("awq", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4")
"""Values of vLLM's ``quantization`` that say what the checkpoint says, too: it is unpacked as it is loaded."""

MEMBERS = {
    "apply_model": "llm.engine.s_model.model is the model",
    "beam_search": _BEAMS,
    "classify": _TEXTS_ONLY,
    "collective_rpc": "R-workers run no Python of their users",
    "embed": _TEXTS_ONLY,
    "encode": _TEXTS_ONLY,
    "get_metrics": "LLMEngine.on_step tells of every step, and `fastdecode serve` has /metrics",
    "reward": _TEXTS_ONLY,
    "score": "LLMEngine.score tells a prompt's log-probabilities; models that score pairs are not run here",
    "set_tokenizer": "give tokenizer= when the model is loaded",
    "sleep": _NO_SLEEP,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "wake_up": _NO_SLEEP,
}
"""Methods of vLLM's ``LLM``."""

NAMES = {
    "AsyncEngineArgs": "EngineArgs are the settings of LLM",
    "AsyncLLMEngine": "LLMEngine.step in a thread of yours, or `fastdecode serve`",
    "BeamSearchParams": _BEAMS,
    "ClassificationOutput": _TEXTS_ONLY,
    "ClassificationRequestOutput": _TEXTS_ONLY,
    "EmbeddingOutput": _TEXTS_ONLY,
    "EmbeddingRequestOutput": _TEXTS_ONLY,
    "GuidedDecodingParams": "StructuredOutputsParams, as SamplingParams(structured_outputs=…)",
    "LoRARequest": _ADAPTERS,
    "ModelRegistry": "models are those of transformers: register yours there",
    "PoolingOutput": _TEXTS_ONLY,
    "PoolingParams": _TEXTS_ONLY,
    "PoolingRequestOutput": _TEXTS_ONLY,
    "RequestOutputKind": "each output has all so far",
    "ScoringOutput": _TEXTS_ONLY,
    "ScoringRequestOutput": _TEXTS_ONLY,
    "initialize_ray_cluster": "give r_workers='ray:N'",
}
"""What can be imported from vLLM, and not from here."""


def asks_for_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Whether a field with this value says the same as one that is left out."""
    return value is None or value is False or value in ("", [], {}) or value in neutral


def EngineArgs(**settings: Any) -> EngineConfig:
    """The settings of ``LLM`` as ``LLMEngine`` takes them, under vLLM's name; ConfigError for one that cannot be."""
    found, known = without_vllms(settings), EngineConfig.__dataclass_fields__
    unknown = sorted(found.keys() - known.keys())
    if unknown:
        raise ConfigError(f"LLM: unknown setting {unknown[0]!r}; known are {', '.join(known)}")
    return EngineConfig(**found)


def without_vllms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` under the names that they have here, without those that are vLLM's alone.

    ConfigError, with what to use here, for one without which the engine would do something else than was asked. What is
    ignored is logged on one line.
    """
    ignored = sorted(name for name in IGNORED & settings.keys() if not asks_for_nothing(settings[name]))
    if ignored:
        logger.warning("settings of vLLM that mean nothing here are ignored: %s", ", ".join(ignored))
    for name in sorted(REFUSED.keys() & settings.keys()):
        if not asks_for_nothing(settings[name], _MEAN_NOTHING.get(name, ())):
            raise ConfigError(f"{name}: {REFUSED[name]}")
    kept = settings.keys() - IGNORED - REFUSED.keys()
    if settings.get("quantization") in _FOUND_IN_CHECKPOINTS:
        kept -= {"quantization"}
    return {RENAMED.get(name, name): value for name, value in settings.items() if name in kept}


def check_lora(request: Any) -> None:
    """ConfigError where an adapter is asked for."""
    if request is not None:
        raise ConfigError(f"lora_request: {_ADAPTERS}")
