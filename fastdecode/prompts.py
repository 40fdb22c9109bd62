"""Turning what a user passes as a prompt into checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from fastdecode.errors import RequestError
from fastdecode.text import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}."""


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int]]:
    """The text (None when token ids were given) and its token ids; RequestError names what is wrong."""
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & set(prompt)
        if not known:
            raise RequestError('prompt must have a key "prompt" or "prompt_token_ids"')
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if ids is None:
        ids = _encode(text, tokenizer)
    ids = _checked(ids, vocab_size)
    if not ids:
        raise RequestError("prompt is empty: give at least one token")
    if len(ids) >= max_model_len:
        raise RequestError(
            f"prompt has {len(ids)} tokens, and max_model_len is {max_model_len}: it must be at most "
            f"{max_model_len - 1} to leave room for one new token"
        )
    return text, ids


def _encode(text: Any, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise RequestError(f"prompt must be text or token ids, not {type(text).__name__}")
    if tokenizer is None:
        raise RequestError("prompt is text, but the tokenizer was not loaded (skip_tokenizer_init): give token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt is no valid text: half of a surrogate pair at position {error.start}") from None
    return tokenizer.encode(text)


def _checked(ids: Any, vocab_size: int) -> list[int]:
    if isinstance(ids, (bytes, bytearray, memoryview)):  # sequences of numbers, but not of token ids
        raise RequestError(f"prompt must be text or token ids, not {type(ids).__name__}: decode it to text")
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        try:
            ids = list(ids)
        except TypeError:
            raise RequestError(f"prompt_token_ids must be a list of whole numbers, not {type(ids).__name__}") from None
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"prompt_token_ids must be whole numbers, not {token!r}")
        if not 0 <= int(token) < vocab_size:
            raise RequestError(f"prompt token id {token} is outside the vocabulary: it must be in 0…{vocab_size - 1}")
    return [int(token) for token in ids]
