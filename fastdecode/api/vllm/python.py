"""vLLM's methods, names and sampling fields that Python code for it uses, and that are not here."""

from __future__ import annotations

from fastdecode.api.vllm.engine import ADAPTERS, NO_SLEEP, TEXTS_ONLY
from fastdecode.api.vllm.foreign import refused, without_effect

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
    "get_metrics": "LLMEngine.on_step tells of every step, and `fastdecode serve` has /metrics",
    "init_weight_transfer_engine": "weights stay as they are while an engine runs",
    "release_kv_cache_memory": "close frees all of it",
    "reward": TEXTS_ONLY,
    "score": "LLMEngine.score tells a prompt's log-probabilities; models that score pairs are not run here",
    "set_tokenizer": "give tokenizer= when the model is loaded",
    "sleep": NO_SLEEP,
    "start_profile": _PROFILER,
    "stop_profile": _PROFILER,
    "update_weights": "weights stay as they are while an engine runs",
    "wait_for_completion": "generate and chat wait; LLMEngine.step runs a step",
    "wake_up": NO_SLEEP,
}
"""Methods of vLLM's ``LLM``."""

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
    "ModelRegistry": "models are those of transformers: register yours there",
    "PoolingOutput": TEXTS_ONLY,
    "PoolingParams": TEXTS_ONLY,
    "PoolingRequestOutput": TEXTS_ONLY,
    "RequestOutputKind": "each output has all so far",
    "ScoringOutput": TEXTS_ONLY,
    "ScoringRequestOutput": TEXTS_ONLY,
    "initialize_ray_cluster": "give r_workers='ray:N'",
}
"""What can be imported from vLLM, and not from here."""

SAMPLING_IGNORED = without_effect({
    "texts are not watermarked": "watermarking",
    "each output has all so far": "output_kind stream_interval flat_logprobs",
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
    ("prompt_logprob_token_ids prompt_logprob_start", "LLMEngine.score tells a prompt's log-probabilities"),
    ("repetition_detection", "give repetition_penalty, or stop"),
    ("routed_experts_prompt_start", "routed experts are not told", 0),
    ("skip_reading_prefix_cache", "give enable_prefix_caching=False to the engine"),
    ("thinking_token_budget", "thoughts have no budget of their own: give max_tokens"),
    ("trace_decode_token_ids", "outputs are sampled: LLMEngine.score tells log-probabilities of given tokens"),
    ("truncate_prompt_tokens", "give the token ids that are to stay", -1),
])  # fmt: skip

CALL_ARGUMENTS = refused([
    ("priority", "requests come first in, first out", 0),
    ("tokenization_kwargs", "give token ids"),
    ("mm_processor_kwargs", "only text is run"),
    ("reset_running_requests", "running requests keep their prefixes"),
    ("reset_connector", "there is no connector"),
])  # fmt: skip
"""Arguments of the methods of vLLM's ``LLM``."""
