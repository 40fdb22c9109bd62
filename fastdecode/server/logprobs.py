"""Log-probabilities for OpenAI clients, with the bytes that each token stands for."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.outputs import CompletionOutput, Logprob, RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import Tokenizer

Spell = Callable[[int], bytes]
"""A function that returns the bytes which a token id adds to the text."""

Chosen = Sequence[tuple[int, dict[int, Logprob]]]
"""The chosen token ids, each with the log-probabilities of the tokens at its position."""


@dataclass(frozen=True)
class LogprobForm:
    """The form in which an answer shows log-probabilities.

    ``num_top``: likeliest tokens per position (-1: all). ``spell``: gives a token's bytes; None without a tokenizer.
    ``hidden``: ids of tokens that the text omits.
    """

    num_top: int = 0
    spell: Spell | None = None
    hidden: frozenset[int] = frozenset()

    def of_chat(self, completion: CompletionOutput, start: int = 0) -> list[dict[str, Any]]:
        """Return a chat's object per token from index ``start`` on, with the likeliest tokens at its position."""
        return [
            {
                **self._chat_logprob(token_id, found[token_id]),
                "top_logprobs": [self._chat_logprob(each, entry) for each, entry in self._likeliest(found)],
            }
            for token_id, found in chosen(completion, start)
        ]

    def of_completion(self, tokens: Chosen, offsets: TextOffsets) -> dict[str, Any]:
        """Return a completion's tokens and log-probabilities. A prompt's first token has no log-probability.

        A token that is only a part of a character is shown by its bytes, as OpenAI does.
        """
        told = [self._name(token_id, found.get(token_id)) for token_id, found in tokens]
        return {
            "tokens": told,
            "token_logprobs": [found[token_id].logprob if found else None for token_id, found in tokens],
            "top_logprobs": [
                {self._name(each, entry): entry.logprob for each, entry in sorted(found.items(), key=_rank)} or None
                for _, found in tokens
            ],
            "text_offset": [
                offsets.of(self._bytes(token_id, token)) for (token_id, _), token in zip(tokens, told, strict=True)
            ],
        }

    def _likeliest(self, found: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Return the ``num_top`` likeliest tokens of ``found``, without the chosen token if that is not among them."""
        ranked = sorted(found.items(), key=_rank)
        return ranked if self.num_top < 0 else [each for each in ranked if each[1].rank <= self.num_top]

    def _chat_logprob(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        token = _text(token_id, entry)
        return {"token": token, "logprob": entry.logprob, "bytes": list(self._bytes(token_id, token))}

    def _bytes(self, token_id: int, token: str) -> bytes:
        if token_id in self.hidden:
            return b""
        return token.encode() if self.spell is None else self.spell(token_id)

    def _name(self, token_id: int, entry: Logprob | None) -> str:
        is_whole = entry is not None and "\ufffd" not in _text(token_id, entry)
        if is_whole or self.spell is None:
            return _text(token_id, entry)
        spelling = self.spell(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class TextOffsets:
    """Counts the characters before each token of a growing text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def of(self, spelling: bytes) -> int:
        """Append a token with the bytes ``spelling``; return the number of characters before this token."""
        offset = self._count
        self._count += len(self._decoder.decode(spelling))
        return offset


def logprob_form(tokenizer: Tokenizer | None, params: SamplingParams) -> LogprobForm:
    """Return the form in which an answer shows the log-probabilities that ``params`` request."""
    if params.logprobs is None or tokenizer is None:
        return LogprobForm(params.logprobs or 0)
    special = tokenizer.special_token_ids.difference(params.shown_special_token_ids or ())
    hidden = special if params.skip_special_tokens else frozenset()
    ends = frozenset() if params.include_stop_str_in_output else frozenset(params.stop_token_ids or ())
    return LogprobForm(params.logprobs, tokenizer.token_bytes, hidden | ends)


def chosen(completion: CompletionOutput, start: int = 0) -> Chosen:
    """Return the tokens of ``completion`` from index ``start`` on, with log-probabilities."""
    return list(zip(completion.tokens[start:], (completion.all_logprobs or ())[start:], strict=False))


def prompt_chosen(output: RequestOutput) -> Chosen:
    """Return the tokens of the prompt, with log-probabilities."""
    known = output.prompt_logprobs
    if known is None:
        return []
    return [(token_id, found or {}) for token_id, found in zip(output.prompt_token_ids, known, strict=True)]


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def _text(token_id: int, entry: Logprob | None) -> str:
    """Return the text of token ``token_id``; without a tokenizer "token_id:N", as vLLM does."""
    if entry is None or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token
