"""A bound on the length of text. A text that cannot fit the model is refused before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import RequestError

LONG_TEXT_BYTES = 1 << 16
"""Texts of at least this many bytes take long to tokenize; shorter texts are not queued behind them."""


@dataclass(frozen=True)
class TextBound:
    """An upper bound on the text that one token stands for, to refuse long texts before tokenizing them.

    ``bytes_per_token``: UTF-8 bytes. ``dropped``: bytes that do not count, because no token stands for them.
    """

    bytes_per_token: int
    dropped: bytes = b""

    def num_bytes(self, text: str) -> int:
        """Return how many UTF-8 bytes of ``text`` count, that is, are not ``dropped``."""
        if not self.dropped and text.isascii():
            return len(text)
        pieces = (text[start : start + LONG_TEXT_BYTES] for start in range(0, len(text), LONG_TEXT_BYTES))
        return sum(len(piece.encode(errors="surrogatepass").translate(None, self.dropped)) for piece in pieces)

    def check(self, subject: str, num_bytes: int, max_model_len: int) -> None:
        """Raise RequestError, about ``subject``, if ``num_bytes`` bytes need more than ``max_model_len`` tokens."""
        most = max_model_len * self.bytes_per_token
        if num_bytes > most:
            raise RequestError(
                f"{subject} {num_bytes} bytes of text, and max_model_len is {max_model_len} tokens of at most "
                f"{self.bytes_per_token} bytes each: a text over {most} bytes cannot fit"
            )


def check_can_fit(text: str, bound: TextBound | None, max_model_len: int) -> None:
    """Raise RequestError if ``text`` has too many bytes for ``max_model_len`` tokens, without tokenizing it.

    If ``bound`` is None, accept every text.
    """
    if bound is not None:
        bound.check("prompt has", bound.num_bytes(text), max_model_len)


def check_conversation_can_fit(
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    bound: TextBound | None,
    max_model_len: int,
) -> None:
    """Raise RequestError if the texts of ``messages`` have too many bytes for ``max_model_len`` tokens.

    The check comes before rendering, and counts only texts that the chat template copies. To find these, ``render`` is
    called with a short mark in place of each text. If a mark is missing, the template raises, or ``bound`` is None,
    nothing is refused. The assistant's reasoning and surrounding white space do not count, since templates omit them.
    """
    if bound is None:
        return
    counted = [index for index, message in enumerate(messages) if message["role"] != "assistant"]
    num_bytes = sum(bound.num_bytes(messages[index]["content"].strip()) for index in counted)
    if num_bytes <= max_model_len * bound.bytes_per_token:
        return
    marks = {index: f"mark{index}mark" for index in counted}
    marked = [{**message, "content": marks.get(index, "")} for index, message in enumerate(messages)]
    try:
        text = render(marked)
    except Exception:  # a template may raise anything; rendering the real messages will raise it again
        return
    if all(mark in text for mark in marks.values()):
        bound.check("messages have", num_bytes, max_model_len)
