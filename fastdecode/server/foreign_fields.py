"""Fields of OpenAI's and vLLM's requests that are not supported: refused if they would change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdecode.api.from_vllm import asks_for_nothing
from fastdecode.core.errors import RequestError

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "prediction", "verbosity", "length_penalty", "spaces_between_special_tokens",
    "guided_decoding_backend", "cache_control", "context_management", "betas", "mm_processor_kwargs",
})  # fmt: skip
"""Fields that are ignored: they do not affect the text, or only together with refused fields."""

REFUSED = {
    "audio": "there are only texts",
    "best_of": "give n, and choose among the answers",
    "cache_salt": "all requests share one prefix cache; --no-enable-prefix-caching keeps none",
    "chat_template": "clients cannot bring their own; give --chat-template to the server",
    "documents": "give them to the template as chat_template_kwargs",
    "echo": "only /v1/completions has it",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "guided_whitespace_pattern": "give structured_outputs with disable_any_whitespace",
    "kv_transfer_params": "keys and values stay on the R-workers of this server",
    "logits_processors": "no code comes with requests; logit_bias, allowed_token_ids and bad_words do much of it",
    "modalities": "there are only texts",
    "priority": "requests come first in, first out",
    "prompt_embeds": "give text or token ids",
    "prompt_logprobs": "give echo and logprobs to /v1/completions",
    "return_tokens_as_token_ids": "give return_token_ids, and token ids come beside the text",
    "structural_tag": "give structured_outputs with a grammar",
    "suffix": "texts are continued only at their end",
    "truncate_prompt_tokens": "send the token ids to keep: /tokenize returns them, and prompts may be token ids",
    "use_beam_search": "there is no beam search; n samples at a temperature are nearest",
    "vllm_xargs": "nothing here takes any",
    "web_search_options": "there is no search",
}
"""Unsupported fields that would change the answer, each with the advice that its refusal gives."""


def check_fields(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise RequestError for a field that is not ``known`` and would change the answer, unless its value is neutral."""
    mean_nothing: Mapping[str, tuple[Any, ...]] = {
        "best_of": (1,), "function_call": ("none", "auto"), "modalities": (["text"],), "priority": (0,)
    }  # fmt: skip
    for name in sorted(REFUSED.keys() & body.keys() - set(known)):
        value = body[name]
        if not asks_for_nothing(value, mean_nothing.get(name, ())) and not (
            name == "best_of" and value == body.get("n")
        ):
            raise RequestError(f"{name} is not supported: {REFUSED[name]}")
