"""The model's tokenizer and generation defaults, read through transformers."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, GenerationConfig

from fastdecode.config import EngineConfig
from fastdecode.errors import ModelLoadError, RequestError


class HFTokenizer:
    """A transformers tokenizer backed by the tokenizers library."""

    def __init__(self, config: EngineConfig) -> None:
        name = config.tokenizer or config.model
        try:
            self.hf = AutoTokenizer.from_pretrained(
                name, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
            self.backend: BackendTokenizer = self.hf.backend_tokenizer
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelLoadError(
                f"cannot load a tokenizer from {name!r}: {reason[0]}; give --tokenizer, or --skip-tokenizer-init and "
                "token ids as prompts"
            ) from error
        self.eos_token_id: int | None = self.hf.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens the model expects."""
        return list(self.hf(text, verbose=False)["input_ids"])

    def encode_chat(self, messages: Any, **template_arguments: Any) -> list[int]:
        """Token ids of a conversation, [{"role": …, "content": …}], up to where the answer begins.

        ``template_arguments``: what else transformers' ``apply_chat_template`` takes, such as ``tools`` and another
        ``chat_template``. RequestError without a chat template, or for messages that it does not take.
        """
        if not template_arguments.get("chat_template") and not getattr(self.hf, "chat_template", None):
            raise RequestError("messages: the model's tokenizer has no chat template; send a prompt")
        each_has_a_role = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
        if not messages or not each_has_a_role:
            raise RequestError('messages must be a list of {"role": …, "content": …}')
        messages = [_as_text(each) for each in messages]
        try:
            told = {"add_generation_prompt": True, **template_arguments, "tokenize": False}
            text = self.hf.apply_chat_template(messages, **told)
        except Exception as error:  # whatever the model's own template raises
            raise RequestError(f"messages: the model's chat template does not take them: {error}") from None
        return list(self.hf(text, add_special_tokens=False, verbose=False)["input_ids"])


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Content may come in parts, of which all must be text; most templates take only whole text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise RequestError('messages: content must be text, or a list of {"type": "text", "text": …}')
    return {**message, "content": "\n".join(part["text"] for part in content)}


def generation_defaults(config: EngineConfig, hf_config: Any) -> tuple[dict[str, Any], list[int]]:
    """What generation_config.json says beside the model: sampling defaults, and the ids that end a text.

    As in vLLM these are the defaults of a request that names no sampling parameters; its end-of-text ids always count.
    """
    try:
        loaded = GenerationConfig.from_pretrained(config.model, revision=config.revision).to_diff_dict()
    except OSError:
        loaded = {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = {name: loaded[name] for name in names if loaded.get(name) is not None}
    if "max_new_tokens" in loaded:
        defaults["max_tokens"] = loaded["max_new_tokens"]
    eos = loaded.get("eos_token_id", getattr(hf_config.get_text_config(), "eos_token_id", None))
    return defaults, [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
