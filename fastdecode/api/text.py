"""Converts prompts to token ids, and token ids to streamed text that ends at stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol, TypedDict

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import DecodeStream

from fastdecode.api.text_limits import TextBound, check_can_fit
from fastdecode.core.errors import RequestError


class Tokenizer(Protocol):
    """The interface that the engine needs of a tokenizer."""

    backend: BackendTokenizer
    eos_token_id: int | None

    @property
    def text_bound(self) -> TextBound | None:
        """An upper bound on the bytes of text per token; None if the tokenizer has no bound."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Special tokens, which ``skip_special_tokens`` leaves out of the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text. They may be only a part of a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids of ``text``, with the special tokens the model expects."""

    def encode_chat(self, messages: Any, max_model_len: int | None = None, /, **template_arguments: Any) -> list[int]:
        """Return the token ids of a conversation, rendered up to where the answer begins."""


class TextStream:
    """The growing text of one completion.

    The tokenizers library holds incomplete characters back. A stop string ends the text wherever it occurs, also across
    tokens. The text excludes the stop string unless ``include_stop``.
    """

    def __init__(
        self,
        tokenizer: BackendTokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        prompt_token_ids: Sequence[int] = (),
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """Start a text after the prompt's last tokens: some tokenizers drop a space at the beginning of a text.

        ``hidden``: ids of further tokens that the text omits.
        """
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._hidden = hidden
        # Number of last prompt tokens to decode in front of the first output token
        prompt_context = 6
        self._stream = DecodeStream(ids=list(prompt_token_ids[-prompt_context:]), skip_special_tokens=skip_special)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest_stop = max((len(string) for string in stop), default=0)

    def push(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that it completes, or None.

        Without ``may_stop``, stop strings are ignored.
        """
        piece = None if token_id in self._hidden else self._decode(token_id)
        if not piece:
            return None
        num_before = len(self.text)
        self.text += piece
        if not may_stop:
            return None
        found = [(self.text.find(string, max(0, num_before - len(string) + 1)), string) for string in self._stop]
        hits = [(position, string) for position, string in found if position >= 0]
        if not hits:
            return None
        position, string = min(hits, key=lambda hit: hit[0])
        self.text = self.text[: position + len(string) * self._include_stop]
        return string

    def _decode(self, token_id: int) -> str | None:
        """Return the text that the token adds; None while its last character is incomplete.

        The tokenizers library fails on byte tokens that form no character; decoding then starts afresh.
        """
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # the tokenizers library raises a plain Exception for invalid byte tokens
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skip_special)
            return self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)

    def decode_one(self, token_id: int) -> str:
        """Return the text of one token, decoded without its neighbors."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def visible(self, finished: bool) -> str:
        """Return the text to show. Unless ``finished``, this excludes an end that may be the start of a stop string."""
        return self.text if finished else self.text[: self.num_visible()]

    def num_visible(self) -> int:
        """Return the length, in characters, of the text to show while the text grows."""
        if not self._longest_stop:
            return len(self.text)
        return len(self.text) - max((overlap(self.text, string) for string in self._stop), default=0)


def overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``string``."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)


class TextPrompt(TypedDict):
    """A prompt given as text. vLLM has a class of this name."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt given as token ids, as in vLLM. ``prompt``: the text of these tokens, if known, to show in outputs."""

    prompt_token_ids: list[int]
    prompt: str


PromptType = str | Sequence[int] | Mapping[str, Any] | TextPrompt | TokensPrompt
"""The accepted forms of a prompt: text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}."""


def read_prompt(
    prompt: PromptType,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
    add_special_tokens: bool = True,
) -> tuple[str | None, list[int]]:
    """Return the prompt's text (None if given as token ids) and its token ids. Raise RequestError for a bad prompt."""
    if isinstance(prompt, Mapping):
        given: dict[str, Any] = dict(prompt)
        known = {"prompt", "prompt_token_ids"} & given.keys()
        if not known:
            raise RequestError('prompt must have a key "prompt" or "prompt_token_ids"')
        more = sorted(name for name in given.keys() - known if given[name])
        if more:
            raise RequestError(f"prompt: {more[0]!r:.80} is not supported: give text or token ids alone")
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
    else:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
    if ids is None:
        ids = encode_text(text, tokenizer, max_model_len, add_special_tokens)
    ids = check_token_ids(ids, vocab_size)
    if not ids:
        raise RequestError("prompt is empty: give at least one token")
    if len(ids) >= max_model_len:
        raise RequestError(
            f"prompt has {len(ids)} tokens, and max_model_len is {max_model_len}: it must be at most "
            f"{max_model_len - 1} to leave room for one new token"
        )
    return text, ids


def encode_text(
    text: Any, tokenizer: Tokenizer | None, max_model_len: int, add_special_tokens: bool = True
) -> list[int]:
    """Return token ids of ``text``.

    Raise RequestError if ``text`` is no string or cannot fit ``max_model_len``, or without a tokenizer.
    """
    if not isinstance(text, str):
        raise RequestError(f"prompt must be text or token ids, not {type(text).__name__}")
    if tokenizer is None:
        raise RequestError("prompt is text, but the tokenizer was not loaded (skip_tokenizer_init): give token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt is no valid text: half of a surrogate pair at position {error.start}") from None
    check_can_fit(text, tokenizer.text_bound, max_model_len)
    return tokenizer.encode(text, add_special_tokens)


def check_token_ids(ids: Any, vocab_size: int) -> list[int]:
    """Return ``ids`` as a list. Raise RequestError unless all are integers from 0 to ``vocab_size`` - 1."""
    if type(ids) is list and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids.copy()
    if isinstance(ids, (bytes, bytearray, memoryview)):  # bytes are sequences of integers, but not of token ids
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
