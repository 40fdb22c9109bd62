"""Tables of vLLM's Python names and fields that FastDecode lacks; makes ``SamplingParams`` accept vLLM's fields."""

from __future__ import annotations

import functools
import logging
from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

from fastdecode.api.vllm.engine import ADAPTERS, NO_SLEEP, TEXTS_ONLY
from fastdecode.api.vllm.foreign import refused, without_effect
from fastdecode.core.errors import ConfigError

logger = logging.getLogger(__name__)

BEAMS = "there is no beam search; n samples at a temperature are nearest"
_PROFILER = "give trace=FILE, which writes Chrome trace events"

MEMBERS = {
    "apply_model": "llm.engine.s_model.model is the model",
    "beam_search": BEAMS,
    "classify": TEXTS_ONLY,
    "collective_rpc": "R-workers run no Python of their users",
    "embed": TEXTS_ONLY,
    "encode": TEXTS_ONLY,
    "enqueue": "generate takes all prompts at once; LLMEngine.add_request takes them one by one",
    "enqueue_chat": "chat takes all conversations at once; LLMEngine.add_request takes prompts one by one",
    "get_metrics": "LLMEngine.on_step gets every step, and `fastdecode serve` has /metrics",
    "get_world_size": "llm.engine.config.tensor_parallel_size is it",
    "init_weight_transfer_engine": "weights stay as they are while an engine runs",
    "release_kv_cache_memory": "close frees all of it",
    "reset_mm_cache": "only text is run",
    "reward": TEXTS_ONLY,
    "score": "LLMEngine.score returns a prompt's log-probabilities; models that score pairs are not run here",
    "set_tokenizer": "give tokenizer= when the model is loaded",
    "sleep": NO_SLEEP,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "update_weights": "weights stay as they are while an engine runs",
    "wait_for_completion": "generate and chat wait; LLMEngine.step runs a step",
    "wake_up": NO_SLEEP,
}
"""Methods and attributes of vLLM's ``LLM`` that FastDecode lacks, with what to use instead."""

NAMES = {
    "AsyncEngineArgs": "EngineArgs are the settings of LLM",
    "AsyncLLMEngine": "LLMEngine.step in a thread of yours, or `fastdecode serve`",
    "BeamSearchParams": BEAMS,
    "ClassificationOutput": TEXTS_ONLY,
    "ClassificationRequestOutput": TEXTS_ONLY,
    "EmbeddingOutput": TEXTS_ONLY,
    "EmbeddingRequestOutput": TEXTS_ONLY,
    "GuidedDecodingParams": "StructuredOutputsParams, as SamplingParams(structured_outputs=…)",
    "LoRARequest": ADAPTERS,
    "ModelRegistry": "models come from transformers: register yours there",
    "PoolingOutput": TEXTS_ONLY,
    "PoolingParams": TEXTS_ONLY,
    "PoolingRequestOutput": TEXTS_ONLY,
    "RequestOutputKind": "each output has all text until then",
    "ScoringOutput": TEXTS_ONLY,
    "ScoringRequestOutput": TEXTS_ONLY,
    "initialize_ray_cluster": "give r_workers='ray:N'",
}
"""Names that can be imported from vLLM but not from FastDecode, with what to use instead."""

SAMPLING_IGNORED = without_effect({
    "texts are not watermarked": "watermarking",
    "each output has all text until then": "output_kind stream_interval flat_logprobs",
    "parameters do not change, and need no copy": "skip_clone",
    "no token is left out between special ones": "spaces_between_special_tokens",
    "there is no beam search": "length_penalty early_stopping",
})  # fmt: skip

SAMPLING_REFUSED = refused([
    ("best_of", "give n, and choose among the outputs", 1),
    ("use_beam_search", BEAMS),
    ("extra_args", "nothing here takes any"),
    ("guided_decoding", "give structured_outputs=StructuredOutputsParams(…)"),
    ("logits_processors", "no code comes with requests; logit_bias, allowed_token_ids and bad_words do much of it"),
    ("logprob_token_ids", "give logprobs=-1, and choose among them"),
    ("prompt_logprob_token_ids prompt_logprob_start", "LLMEngine.score returns a prompt's log-probabilities"),
    ("repetition_detection", "give repetition_penalty, or stop"),
    ("routed_experts_prompt_start", "outputs do not name routed experts", 0),
    ("skip_reading_prefix_cache", "give enable_prefix_caching=False to the engine"),
    ("thinking_token_budget", "thoughts have no budget of their own: give max_tokens"),
    ("trace_decode_token_ids", "outputs are sampled: LLMEngine.score returns log-probabilities of given tokens"),
    ("truncate_prompt_tokens", "give the token ids that are to stay", -1),
])  # fmt: skip

CALL_ARGUMENTS = refused([
    ("priority", "requests come first in, first out", 0),
    ("tokenization_kwargs", "give token ids"),
    ("mm_processor_kwargs", "only text is run"),
    ("reset_running_requests", "running requests keep their prefixes"),
    ("reset_connector", "there is no connector"),
])  # fmt: skip
"""Arguments of methods of vLLM's ``LLM`` that FastDecode ignores or refuses."""

Params = TypeVar("Params", bound=type)


def takes_vllms_fields(kind: Params) -> Params:
    """Class decorator: make the frozen dataclass ``kind`` accept vLLM's additional fields of ``SamplingParams``.

    Assigning a field later raises an error that says what to do instead: vLLM's parameters are mutable, ours are not.
    """
    made: Any = kind
    init, known = made.__init__, made.__dataclass_fields__

    @functools.wraps(init)
    def __init__(self: Any, **fields: Any) -> None:
        init(self, **_ours(fields, known))

    def __setattr__(self: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(
            f"sampling parameters cannot change: make others with dataclasses.replace(params, {name}={value!r:.40})"
        )

    made.__init__, made.__setattr__ = __init__, __setattr__
    return kind


def _ours(fields: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without those that only vLLM has. ``known``: names of our fields.

    Raise ConfigError for an unknown field, or one that would change the text.
    """
    if fields.keys() <= known.keys():
        return fields
    found = {name: value for name, value in fields.items() if name in known}
    ignored = []
    for name in sorted(fields.keys() - known.keys()):
        each = SAMPLING_IGNORED.get(name) or SAMPLING_REFUSED.get(name)
        if each is None:
            raise ConfigError(f"SamplingParams: unknown field {name!r}; known are {', '.join(known)}")
        if each.refused and not each.asks_for_nothing(fields[name]) and not _says_n(name, fields):
            raise ConfigError(f"{name}: {each.text}")
        ignored += [name] if not each.refused and not each.asks_for_nothing(fields[name]) else []
    if ignored:
        logger.warning("fields of vLLM's SamplingParams that mean nothing here are ignored: %s", ", ".join(ignored))
    return found


def _says_n(name: str, fields: dict[str, Any]) -> bool:
    """Return whether ``name`` is "best_of" and ``fields`` give it a value of at most n, which has no effect."""
    return name == "best_of" and fields[name] == fields.get("n", 1)
