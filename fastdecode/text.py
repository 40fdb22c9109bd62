"""Text from tokens as they come, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import DecodeStream

PROMPT_CONTEXT = 6
"""Tokens of the prompt that the first token's text is decoded after."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    backend: BackendTokenizer
    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens the model expects."""
        ...


class TextStream:
    """The growing text of one completion.

    Bytes that do not yet make up a character are held back by the tokenizers library. A stop string ends the text
    wherever it falls, across token borders too, and is left out unless ``include_stop``.
    """

    def __init__(
        self,
        tokenizer: BackendTokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """The end of the prompt goes before the text: some tokenizers drop the space that begins a text."""
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(ids=list(prompt_token_ids[-PROMPT_CONTEXT:]), skip_special_tokens=skip_special)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest_stop = max((len(string) for string in stop), default=0)

    def push(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add a token; the stop string it completed, if any. Without ``may_stop`` none is looked for."""
        piece = self._decode(token_id)
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
        """The text this token adds. Where byte tokens make no character the library gives up, and we begin anew."""
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises its base class
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=self._skip_special)
            return self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)

    def decode_one(self, token_id: int) -> str:
        """One token by itself."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def visible(self, finished: bool) -> str:
        """The text that can be shown: all of it, less a tail that may turn out to begin a stop string."""
        if finished or not self._longest_stop:
            return self.text
        tail = max((_overlap(self.text, string) for string in self._stop), default=0)
        return self.text[: len(self.text) - tail]


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``string``."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)
