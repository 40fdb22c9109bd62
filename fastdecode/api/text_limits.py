"""The longest text that is worth tokenising: one that cannot fit the model is refused before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import RequestError

LONG_TEXT_BYTES = 1 << 16
"""A text beyond it takes a tokenizer long enough that short ones should not wait for it."""


@dataclass(frozen=True)
class TextBound:
    """How much text a tokenizer can put into one token: ``bytes_per_token`` bytes of UTF-8, of which ``dropped`` do not
    count, since no token stands for them."""

    bytes_per_token: int
    dropped: bytes = b""

    def num_bytes(self, text: str) -> int:
        """Return bytes of ``text`` that become tokens."""
        if not self.dropped and text.isascii():
            return len(text)
        pieces = (text[start : start + LONG_TEXT_BYTES] for start in range(0, len(text), LONG_TEXT_BYTES))
        return sum(len(piece.encode(errors="surrogatepass").translate(None, self.dropped)) for piece in pieces)

    def check(self, subject: str, num_bytes: int, max_model_len: int) -> None:
        """Raise RequestError if ``num_bytes`` take more than ``max_model_len`` tokens."""
        most = max_model_len * self.bytes_per_token
        if num_bytes > most:
            raise RequestError(
                f"{subject} {num_bytes} bytes of text, and max_model_len is {max_model_len} tokens of at most "
                f"{self.bytes_per_token} bytes each: a text over {most} bytes cannot fit"
            )


def check_can_fit(text: str, bound: TextBound | None, max_model_len: int) -> None:
    """RequestError, without tokenising it, for a text that has too many bytes for ``max_model_len`` tokens.

    Nothing is refused where ``bound`` is None, for a tokenizer without one.
    """
    if bound is not None:
        bound.check("prompt has", bound.num_bytes(text), max_model_len)


def check_conversation_can_fit(
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
    bound: TextBound | None,
    max_model_len: int,
) -> None:
    """RequestError, before they are rendered, for ``messages`` whose texts alone have too many bytes for
    ``max_model_len`` tokens.

    Only texts count that the chat template takes over: ``render`` gives the text of a conversation, and is asked for
    that of ``messages`` with a short mark in place of each text. Of the assistant's texts templates leave out the
    reasoning, and of all texts the space around them: these do not count. Where a mark does not come back, or the
    template raises, nothing is refused here; nor where ``bound`` is None, for a tokenizer without one.
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
    except Exception:  # whatever the template raises; it is asked again for the messages themselves
        return
    if all(mark in text for mark in marks.values()):
        bound.check("messages have", num_bytes, max_model_len)
