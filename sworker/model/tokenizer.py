"""The model's tokenizer and generation defaults, read through transformers."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template

from fastdecode.api.config import EngineConfig
from fastdecode.api.conversations import check_nothing_is_left_out, with_known_roles, without_empty_fields
from fastdecode.api.text_limits import TextBound, check_can_fit, check_conversation_can_fit
from fastdecode.core.errors import ConfigError, ModelLoadError, RequestError
from fastdecode.sworker.model import gguf
from fastdecode.sworker.model.token_bytes import Spellings, text_bound


class HFTokenizer:
    """A transformers tokenizer backed by the tokenizers library."""

    def __init__(self, config: EngineConfig) -> None:
        name = config.tokenizer or config.model
        try:
            folder, named = gguf.source(name)
            self.hf = AutoTokenizer.from_pretrained(
                folder, revision=config.revision, trust_remote_code=config.trust_remote_code, **named
            )
            self.backend: BackendTokenizer = self.hf.backend_tokenizer
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelLoadError(
                f"cannot load a tokenizer from {name!r}: {reason[0]}; give --tokenizer, or --skip-tokenizer-init and "
                "token ids as prompts"
            ) from error
        self.eos_token_id: int | None = self.hf.eos_token_id

    @functools.cached_property
    def text_bound(self) -> TextBound | None:
        """The most text per token; None where there is no bound. Read from the vocabulary once."""
        return text_bound(self.backend)

    @functools.cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self.backend)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that a text without special tokens leaves out."""
        return self._spellings.special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; of some tokens they are a part of a character."""
        return self._spellings.of(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the special tokens the model expects."""
        return list(self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def encode_chat(
        self,
        messages: Any,
        max_model_len: int | None = None,
        /,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, [{"role": …, "content": …}], up to where the answer begins.

        ``chat_template`` takes the place of the model's; ``tools`` (JSON schemas of functions) and ``template_kwargs``
        go to it. Templates write special tokens themselves; ``add_special_tokens`` has the tokenizer add its own too.
        With ``continue_final_message`` the answer goes on where the last message ends.

        RequestError without a chat template, for messages that it does not take, and, before they are rendered or at
        least before they are tokenised, for those that cannot fit ``max_model_len`` tokens.
        """
        if not (chat_template or getattr(self.hf, "chat_template", None)):
            raise RequestError("messages: the model's tokenizer has no chat template; send a prompt")
        if tools is not None and not _all_mappings(tools):
            raise RequestError('tools must be a list of {"type": "function", "function": {…}}')
        prepared = with_known_roles(chat_messages(messages), str(chat_template or self.hf.chat_template))
        render = functools.partial(
            self.hf.apply_chat_template,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_kwargs,
        )
        if max_model_len is not None:
            check_conversation_can_fit(prepared, render, self.text_bound, max_model_len)
        try:
            text = render(prepared)
        except Exception as error:  # whatever the template raises
            raise RequestError(f"messages: the chat template does not take them: {error}") from None
        check_nothing_is_left_out(prepared, text, render)
        if max_model_len is not None:
            check_can_fit(text, self.text_bound, max_model_len)
        return self.encode(text, add_special_tokens)


def check_chat_template(template: str) -> None:
    """ConfigError, with the line, for what is no Jinja template; what it says of messages is not looked at."""
    from jinja2 import TemplateSyntaxError

    try:
        render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: line {error.lineno} is no Jinja template: {error.message}") from None
    except Exception:  # whatever it raises where this message does not suit it
        return


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates expect them, as vLLM does it; RequestError for what is no conversation.

    Content in parts becomes one text, its parts on lines of their own; none is "". Arguments of tool calls are read.
    """
    if not messages or not _all_mappings(messages) or not all(isinstance(each.get("role"), str) for each in messages):
        raise RequestError('messages must be a list of {"role": …, "content": …}')
    return [_prepared(without_empty_fields(message)) for message in messages]


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    message["content"] = _text_of(message.get("content"))
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        message["tool_calls"] = [_with_arguments_read(call) for call in (calls if isinstance(calls, list) else [calls])]
    return message


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"content of a message must be text or a list of parts, not {type(content).__name__}")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _said(part) for part in content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError('parts of a message must be {"type": "text", "text": …}: the model takes text only')
    return "\n".join(part["text"] for part in parts)


def _said(part: Any) -> Any:
    """A part of a message; a refusal that a client sends back is text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _with_arguments_read(call: Any) -> Any:
    """A tool call whose function's arguments are an object, which templates print, and not its JSON text."""
    try:
        arguments = call["function"].get("arguments")
        read = json.loads(arguments or "{}") if arguments is None or isinstance(arguments, str) else arguments
        return {**call, "function": {**call["function"], "arguments": read}}
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        raise RequestError('tool_calls must be a list of {"function": {"name": …, "arguments": JSON text}}') from None


def _all_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def generation_defaults(config: EngineConfig, hf_config: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the sampling defaults and the ids that end a text, from the model's generation_config.json.

    As in vLLM these are the defaults of a request that names no sampling parameters; its end-of-text ids always count.
    """
    loaded = _generation_config(config)
    asked = {} if config.generation_config == "vllm" else loaded
    asked = asked | config.override_generation_config
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = {name: asked[name] for name in names if asked.get(name) is not None}
    if "max_new_tokens" in asked:
        defaults["max_tokens"] = asked["max_new_tokens"]
    eos = loaded.get("eos_token_id", getattr(hf_config.get_text_config(), "eos_token_id", None))
    return defaults, [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _generation_config(config: EngineConfig) -> dict[str, Any]:
    """Return what the generation_config.json of the model, or of the folder that is given, says."""
    own = config.generation_config in ("auto", "vllm")
    folder = gguf.source(config.model)[0] if own else config.generation_config
    try:
        return dict(GenerationConfig.from_pretrained(folder, revision=config.revision if own else None).to_diff_dict())
    except OSError:
        if own:
            return {}
        raise ConfigError(f"generation_config: {folder!r} has no generation_config.json") from None
