"""The model's tokenizer, with transformers' interface to it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from fastdecode.api.config import EngineConfig
from fastdecode.api.conversations import (
    check_nothing_is_left_out,
    with_known_roles,
    with_known_thoughts,
    without_empty_fields,
)
from fastdecode.api.text_limits import TextBound, check_can_fit, check_conversation_can_fit
from fastdecode.core.errors import ConfigError, ModelLoadError, RequestError
from fastdecode.core.optional import optional
from fastdecode.sworker.files.content_format import Format, formats_of, in_format, in_formats
from fastdecode.sworker.files.weight_files import weights_place
from fastdecode.sworker.model.token_bytes import Spellings, text_bound


class HFTokenizer:
    """A transformers tokenizer backed by the tokenizers library."""

    _formats: Mapping[str, dict[str, Format]] = {}  # by chat template; replaced by a new mapping, never modified

    def __init__(self, config: EngineConfig) -> None:
        name = config.tokenizer or config.model
        try:
            folder, named = weights_place(name)
            file = Path(name) if named else None
            told = optional("GGUF tokenizer").arguments(file) if file else {}
            self.hf = AutoTokenizer.from_pretrained(
                folder, revision=config.revision, trust_remote_code=config.trust_remote_code, **named, **told
            )
            if file:
                optional("GGUF tokenizer").complete(self.hf, file)
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
        """The most text that one token can stand for; None if there is no limit."""
        return text_bound(self.backend)

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The id of each special token, keyed by the token's text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The model's template for parsing answers, if it has one (transformers 5.19 and later)."""
        return getattr(self.hf, "response_template", None)

    def chat_template_text(self, chat_template: str | None = None) -> str:
        """Return the text of ``chat_template``, or of all the model's own templates; "" if there is none."""
        own = getattr(self.hf, "chat_template", None)
        found = "\n".join(own.values()) if isinstance(own, dict) else own
        return chat_template or found or ""

    def answer_header(self, chat_template: str | None = None) -> str:
        """Return the text that the chat template puts before an answer; "" if it cannot be determined."""
        said = [{"role": "user", "content": "hi"}]
        render = functools.partial(self.hf.apply_chat_template, said, chat_template=chat_template, tokenize=False)
        try:
            before, after = render(add_generation_prompt=False), render(add_generation_prompt=True)
        except Exception:  # a template may raise anything, and there may be none
            return ""
        return str(after[len(before) :]) if after.startswith(before) else ""

    @functools.cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self.backend)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which ``skip_special_tokens`` leaves out of the text."""
        return self._spellings.special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. They may be only a part of a character."""
        return self._spellings.of(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the model expects."""
        return list(self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def encode_chat(
        self,
        messages: Any,
        max_model_len: int | None = None,
        /,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, [{"role": …, "content": …}], up to where the answer begins.

        ``chat_template`` replaces the model's. ``tools`` (JSON schemas of functions) and ``template_kwargs`` are passed
        to the template. Templates write special tokens themselves; ``add_special_tokens`` lets the tokenizer add its
        own too. ``content_format``: see ``content_formats``. With ``continue_final_message`` the answer continues the
        last message.

        Raise RequestError if there is no chat template, if it rejects the messages, or if they cannot fit
        ``max_model_len`` tokens. The length is checked before rendering if possible, and always before tokenizing.
        """
        if not (chat_template or getattr(self.hf, "chat_template", None)):
            raise RequestError("messages: the model's tokenizer has no chat template; send a prompt")
        if tools is not None and not _all_mappings(tools):
            raise RequestError('tools must be a list of {"type": "function", "function": {…}}')
        formats = self.content_formats(content_format, chat_template, tools)
        written = str(chat_template or self.hf.chat_template)
        prepared = with_known_thoughts(with_known_roles(chat_messages(messages), written), written)
        parts = [_parts_of(without_empty_fields(message).get("content")) for message in messages]
        apply = functools.partial(
            self.hf.apply_chat_template,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_kwargs,
        )

        def render(conversation: list[dict[str, Any]]) -> str:
            return str(apply(in_formats(conversation, parts, formats)))

        return self.encode(self._written(prepared, render, max_model_len), add_special_tokens)

    def _written(
        self, prepared: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str], max_model_len: int | None
    ) -> str:
        """Return the text that ``render`` makes. Raise RequestError if the text lacks a message, or is too long."""
        if max_model_len is not None:
            check_conversation_can_fit(prepared, render, self.text_bound, max_model_len)
        try:
            text = render(prepared)
        except Exception as error:  # a template may raise anything
            raise RequestError(f"messages: the chat template does not take them: {error}") from None
        check_nothing_is_left_out(prepared, text, render)
        if max_model_len is not None:
            check_can_fit(text, self.text_bound, max_model_len)
        return text

    def content_formats(
        self, wanted: str = "auto", chat_template: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> dict[str, Format]:
        """Return the content format by role: ``string``, ``openai`` (lists of parts), or for "auto" the template's own.

        A role without an entry has that of "user".
        """
        if wanted not in ("auto", *get_args(Format)):
            raise ConfigError(f"content_format must be one of auto, string, openai, not {wanted!r}")
        if wanted != "auto":
            return {"user": cast(Format, wanted)}
        try:
            template = self.hf.get_chat_template(chat_template, tools)
        except ValueError as error:  # the model has several templates, and none is the default
            raise RequestError(f"messages: {error}") from None
        # Most chat templates whose content format is remembered
        most_templates = 32
        if template not in self._formats:
            kept = dict(list(self._formats.items())[-most_templates:])
            self._formats = kept | {template: formats_of(template, self.hf.special_tokens_map)}
        return self._formats[template]


def check_chat_template(template: str) -> None:
    """Raise ConfigError, with the line, if ``template`` is not valid Jinja. Errors at rendering are not found."""
    from jinja2 import TemplateSyntaxError

    try:
        render_jinja_template([[{"role": "user", "content": "hi"}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template: line {error.lineno} is no Jinja template: {error.message}") from None
    except Exception:  # a valid template may reject this message by any error
        return


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Return OpenAI messages in the form that chat templates expect, as vLLM does.

    Raise RequestError if ``messages`` is no conversation. Content in parts becomes one text with each part on its own
    lines; no content becomes "". Arguments of tool calls are parsed.
    """
    if not messages or not _all_mappings(messages) or not all(isinstance(each.get("role"), str) for each in messages):
        raise RequestError('messages must be a list of {"role": …, "content": …}')
    return [_prepared(without_empty_fields(message)) for message in messages]


def _prepared(message: dict[str, Any]) -> dict[str, Any]:
    message["content"] = in_format(_parts_of(message.get("content")), "string")
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        message["tool_calls"] = [_with_arguments_read(call) for call in (calls if isinstance(calls, list) else [calls])]
    return message


def _parts_of(content: Any) -> list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return [] if content is None else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"content of a message must be text or a list of parts, not {type(content).__name__}")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _said(part) for part in content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError('parts of a message must be {"type": "text", "text": …}: the model takes text only')
    return [{"type": "text", "text": part["text"]} for part in parts]


def _said(part: Any) -> Any:
    """Return a message's part; a refusal that a client sends back becomes text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _with_arguments_read(call: Any) -> Any:
    """Return a tool call with its arguments parsed from JSON, since templates expect an object."""
    try:
        arguments = call["function"].get("arguments")
        read = json.loads(arguments or "{}") if arguments is None or isinstance(arguments, str) else arguments
        return {**call, "function": {**call["function"], "arguments": read}}
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        raise RequestError('tool_calls must be a list of {"function": {"name": …, "arguments": JSON text}}') from None


def _all_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)
