"""Reads answers as they grow: content, reasoning and tool calls, in the order in which the model writes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastdecode.server.call_parts import CallPart, arguments_text, call_id, calls_in
from fastdecode.server.response_templates import AnswerSyntax
from fastdecode.server.schema_refs import argument_types
from fastdecode.server.tool_calls import CallReader, ForcedCalls
from fastdecode.sworker.sampling.answer_parser import CONTENT, THOUGHTS, WRAPPER, AnswerCutter
from fastdecode.sworker.sampling.answer_parser import Piece as Region


@dataclass(frozen=True)
class Thought:
    """A part of the model's reasoning. ``first``: this part begins a block of reasoning."""

    text: str
    first: bool


Piece = str | Thought | CallPart


class AnswerReader(Protocol):
    """Splits the growing text of one answer into pieces: content, reasoning and tool calls."""

    def read(self, text: str, finished: bool) -> Sequence[Piece]:
        """Return the new pieces of ``text``, all of the answer until now. ``finished``: the answer is complete."""

    @property
    def thought_spans(self) -> Sequence[tuple[int, int]]:
        """Character ranges (start, end) of the answer's text that are reasoning."""


@dataclass(frozen=True)
class AnswerReading:
    """Splits a request's answers into content, reasoning and tool calls.

    ``forced``: calls that ``tool_choice`` forces; None for a free text. ``tools``: a chat's tools that a free text may
    call; None if calls are not allowed. ``prompt``: the end of the prompt, which may open a block of reasoning.
    ``syntax``: None if all text is content.
    """

    forced: ForcedCalls | None = None
    syntax: AnswerSyntax | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    prompt: str = ""
    is_json: bool = False
    parallel: bool = True

    @property
    def is_plain(self) -> bool:
        """True if an answer is nothing but text."""
        return self.forced is None and self.syntax is None

    def reader(self, answer: str) -> AnswerReader:
        """Return a reader for the answer whose id is ``answer``; the ids of its tool calls are derived from that id."""
        if self.forced:
            return CallReader(self.forced, answer)
        return ParsedReader(self, self.syntax, answer) if self.syntax else PlainReader()


def num_thought_tokens(reader: AnswerReader, text_ends: Sequence[int]) -> int:
    """Return how many of an answer's tokens are reasoning. ``text_ends``: length of the text after each token."""
    return sum(bisect_right(text_ends, end) - bisect_right(text_ends, start) for start, end in reader.thought_spans)


class PlainReader:
    """Reads an answer that is only text."""

    thought_spans: Sequence[tuple[int, int]] = ()

    def __init__(self) -> None:
        self._num_read = 0

    def read(self, text: str, finished: bool) -> list[Piece]:
        """See ``AnswerReader``."""
        new, self._num_read = text[self._num_read :], len(text)
        return [new] if new else []


class ParsedReader:
    """Reads a free text by the model's syntax. Malformed calls, and calls of unknown functions, stay text."""

    def __init__(self, reading: AnswerReading, syntax: AnswerSyntax, answer: str) -> None:
        self._parallel, self._answer, self._syntax = reading.parallel, answer, syntax
        self._template = syntax.without if reading.tools is None else syntax.with_calls
        functions = [tool.get("function") for tool in reading.tools or ()]
        names = [each.get("name") for each in functions if isinstance(each, Mapping)]
        self._names = {name for name in names if isinstance(name, str)}
        self._types = argument_types(reading.tools or ())
        prompt = "" if reading.is_json else reading.prompt
        self._cutter = AnswerCutter(self._template, prompt)
        omits = syntax.starts_with and not (self._cutter.is_open or reading.is_json or syntax.is_told(prompt))
        self._opening = syntax.starts_with if omits else ""
        self._num_read, self._num_added = 0, 0
        self._content, self._thought = _Text(self._cutter.follows_thought), _Text(after_mark=True)
        self._is_new_thought, self._thought_start = True, -1
        self._wrapper, self._num_calls, self._after_call = "", 0, False
        self._ids: set[str] = set()
        self.thought_spans: list[tuple[int, int]] = []

    def read(self, text: str, finished: bool) -> list[Piece]:
        """See ``AnswerReader``."""
        if self._opening and not self._begin(text, finished):
            return []
        new = self._opening[: self._num_added if not self._num_read else 0] + text[self._num_read :]
        self._num_read = len(text)
        regions = self._cutter.feed(new)
        if not finished:
            return [piece for region in regions for piece in self._pieces(region)]
        found = [piece for region in (*regions, *self._cutter.finish()) for piece in self._pieces(region)]
        return [*found, *self._shown(self._take_wrapper()), *filter(None, [self._content.end()])]

    def _begin(self, text: str, finished: bool) -> bool:
        """Return whether ``text`` suffices to tell if the answer starts with the delimiter that opens reasoning."""
        if self._num_read:
            return True
        begun = text.lstrip()[: len(self._opening)]
        if begun != self._opening and self._opening.startswith(begun) and not finished:
            return False
        self._num_added = 0 if begun == self._opening else len(self._opening)
        return True

    def _pieces(self, region: Region) -> list[Piece]:
        if region.field == CONTENT:
            return self._shown(region.text)
        if region.field in THOUGHTS:
            return self._thoughts(region)
        if region.field.startswith(WRAPPER):
            before = self._shown(self._take_wrapper())
            self._wrapper = "" if self._after_call else region.text
            return before
        if self._template.is_field_of_calls(region.field):
            return self._calls(region)
        return []

    def _shown(self, text: str) -> list[Piece]:
        """Return ``text`` as content. A held-back wrapper for tool calls comes before it, since no call followed."""
        if self._wrapper and not text.strip():
            self._wrapper += text
            return []
        shown = self._content.add(self._take_wrapper() + text)
        self._after_call &= not shown
        return [shown] if shown else []

    def _take_wrapper(self) -> str:
        taken, self._wrapper = self._wrapper, ""
        return taken

    def _thoughts(self, region: Region) -> list[Piece]:
        found: list[Piece] = []
        at = region.end - self._num_added
        if self._thought_start < 0:
            found += [*self._shown(self._take_wrapper()), *filter(None, [self._content.mark()])]
            self._thought_start, self._is_new_thought = max(0, at - len(region.text)), True
        text = self._thought.add(region.text)
        if region.closes:
            text += self._thought.mark()
            self.thought_spans.append((self._thought_start, at))
            self._thought_start = -1
        if text:
            found.append(Thought(text, self._is_new_thought))
            self._is_new_thought = False
        return found

    def _calls(self, region: Region) -> list[Piece]:
        """Return the tool calls in ``region``, or its plain text if a call is invalid or of a function not offered."""
        try:
            read = [self._call(each) for each in self._read(region)]
            if not read:
                raise ValueError("there are no calls in this text")
        except (ValueError, RecursionError):
            return self._shown(region.text)
        before = self._content.mark()
        self._wrapper, self._after_call = "", True
        if not self._parallel:
            read = read[: 0 if self._num_calls else 1]
        parts = [
            CallPart(number, self._id(number, given), name, arguments, first=True, complete=True)
            for number, (name, arguments, given) in enumerate(read, self._num_calls)
        ]
        self._num_calls += len(parts)
        return [*([before] if before else []), *parts]

    def _read(self, region: Region) -> list[Any]:
        found: list[Any] = []
        for each in self._template.read_calls(region, self._types):
            if isinstance(each, str):
                found += [{"function": call} for call in calls_in(each)]
            else:
                found += each if isinstance(each, list) else [each]
        return found

    def _call(self, call: Any) -> tuple[str, str, Any]:
        """Return name, arguments and id (if the model gave one) of a parsed call. Raise ValueError if it is no call."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a call must be an object")
        name = function.get("name")
        given = function.get("arguments", function.get("parameters"))
        if not isinstance(name, str) or name.strip() not in self._names:
            raise ValueError(f"the request offers no function {name!r:.80}")
        return name.strip(), arguments_text(given), call.get("id")

    def _id(self, number: int, given: Any) -> str:
        """Return ``given``, the model's id for call ``number``, if no earlier call has that id; else a new id."""
        if isinstance(given, str) and given and given not in self._ids:
            self._ids.add(given)
            return given
        return call_id(self._answer, number, self._syntax.id_length)


class _Text:
    """A growing text. Drops line breaks next to the syntax's delimiters, and white space between two delimiters."""

    def __init__(self, after_mark: bool = False) -> None:
        self._blanks, self._after_mark, self._has_text = "", after_mark, False

    def add(self, text: str) -> str:
        """Append ``text`` and return what can be shown now. White space at the end is held back for the next call."""
        text = self._blanks + text
        if self._after_mark and not self._has_text:
            text = text.lstrip("\n")
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._has_text |= bool(shown)
        return shown

    def mark(self) -> str:
        """Handle a delimiter: return the held-back white space before this delimiter that must be shown."""
        left = self._blanks.rstrip("\n") if self._has_text else ""
        self._blanks, self._after_mark, self._has_text = "", True, False
        return left

    def end(self) -> str:
        """Return the held-back white space at the end of the answer."""
        return self._blanks if self._has_text or not self._after_mark else ""
