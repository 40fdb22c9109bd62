"""Chat messages for OpenAI clients, whole and as deltas, from the pieces of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdecode.server.answer_reader import AnswerReading, Piece, Thought
from fastdecode.server.call_parts import CallPart


class ChatWriter:
    """Writes the message of one answer. It has reasoning twice: as ``reasoning`` and under vLLM's older field name."""

    def __init__(self, reading: AnswerReading, answer: str, tells_thoughts: bool = True) -> None:
        """``answer``: the answer's id, from which ids of calls are derived."""
        self._reading, self._reader, self._tells_thoughts = reading, reading.reader(answer), tells_thoughts
        self._has_thought = False
        self.has_called = False

    def message(self, text: str) -> dict[str, Any]:
        """Return the assistant's message for ``text``, the text of a finished answer."""
        content, thoughts, parts = self._sorted(self._reader.read(text, True))
        calls = {"tool_calls": [call_of(part) for part in parts]} if parts else {}
        is_none = bool(self._reading.forced or (calls and not content.strip()) or (self._has_thought and not content))
        return {"role": "assistant", "content": None if is_none else content, **_thoughts(thoughts), **calls}

    def delta(self, text: str, finished: bool) -> dict[str, Any] | None:
        """Return the delta for what is new in ``text``, all the text until now; None if there is nothing new."""
        pieces = self._reader.read(text, finished)
        if not pieces and not finished and not self._reading.is_plain:
            return None
        content, thoughts, parts = self._sorted(pieces)
        calls = {"tool_calls": [_call_delta(part) for part in parts]} if parts else {}
        is_told = content or not (parts or thoughts or self._reading.forced)
        if not (is_told or thoughts or calls or finished):
            return None  # only reasoning is new, which this client does not get
        return {**({"content": content} if is_told else {}), **_thoughts(thoughts), **calls}

    def _sorted(self, pieces: Sequence[Piece]) -> tuple[str, str, list[CallPart]]:
        """Return the pieces' joined text, joined reasoning, and tool calls. Blocks of reasoning begin new lines."""
        thoughts = ""
        for each in pieces:
            if isinstance(each, Thought):
                thoughts += ("\n" if each.first and self._has_thought else "") + each.text
                self._has_thought = True
        parts = [each for each in pieces if isinstance(each, CallPart)]
        self.has_called |= bool(parts)
        content = "".join(each for each in pieces if isinstance(each, str))
        return content, thoughts if self._tells_thoughts else "", parts


def call_of(part: CallPart) -> dict[str, Any]:
    """Return a complete tool call as an entry of a message's ``tool_calls``."""
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.call_id, "type": "function", "function": function}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """Return a part of a tool call as an entry of a delta's ``tool_calls``. Later parts have only arguments."""
    told = call_of(part) if part.first else {"function": {"arguments": part.arguments}}
    return {"index": part.index, **told}


def _thoughts(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text} if text else {}
