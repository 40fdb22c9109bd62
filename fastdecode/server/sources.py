"""Attention sources as clients read them: with the place in the prompt that each block covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fastdecode.api.outputs import CompletionOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import Tokenizer
from fastdecode.core.weighing import AttentionSource
from fastdecode.server.prompt_reader import PromptTokens
from fastdecode.server.protocol import ChatRequest, CompletionRequest


@dataclass(frozen=True)
class PromptPlaces:
    """One prompt as text: the first character of each of its tokens, and the messages in it.

    ``text``: as the client gave it, before special tokens came to it; None where the tokens' own text is all there is.
    ``messages``: texts of a conversation in order, or of its parts.
    """

    tokenizer: Tokenizer
    token_ids: Sequence[int]
    text: str | None = None
    messages: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def _spelled(self) -> tuple[str, np.ndarray]:
        """The text, and the characters before each token and behind the last one, int64 [num_tokens + 1]."""
        spell = {each: self.tokenizer.token_bytes(each) for each in set(self.token_ids)}
        spelling = b"".join(spell[each] for each in self.token_ids)
        begins = (np.frombuffer(spelling, np.uint8) & 0xC0) != 0x80  # of a character in UTF-8
        characters = np.concatenate([[0], np.cumsum(begins)])
        ends = np.cumsum([0, *(len(spell[each]) for each in self.token_ids)])
        spelled = spelling.decode(errors="replace")
        added = max(0, spelled.find(self.text)) if self.text else 0
        return spelled[added:], np.maximum(characters[ends] - added, 0)

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """The characters of each message, first and one past the last; (0, 0) of one that is not in the text."""
        text, start, found = self._spelled[0], 0, []
        for parts in self.messages:
            places = []
            for part in filter(None, (each.strip() for each in parts)):
                at = text.find(part, start)
                if at >= 0:
                    places += [at, start := at + len(part)]
            found.append((places[0], places[-1]) if places else (0, 0))
        return found

    def of(self, source: AttentionSource) -> dict[str, Any]:
        """Return the message and the characters that a block covers, of what lies in the prompt; else None."""
        if source.first >= len(self.token_ids):
            return {"message": None, "characters": None}
        places = self._spelled[1]
        first, end = int(places[source.first]), int(places[min(source.last + 1, len(self.token_ids))])
        shared = [min(end, last) - max(first, start) for start, last in self._extents]
        most = max(shared, default=0)
        return {"message": shared.index(most) if most > 0 else None, "characters": [first, end]}


@dataclass(frozen=True)
class SourceForm:
    """Tells attention sources: ``prompts``: each prompt's text, None without one; ``num_samples`` per prompt."""

    prompts: tuple[PromptPlaces | None, ...] = (None,)
    num_samples: int = 1

    def of(self, completion: CompletionOutput, start: int = 0, choice: int = 0) -> list[Any] | None:
        """Return the reported sources of each token of a choice from ``start`` on; None if they were not asked for."""
        if completion.all_sources is None:
            return None
        prompt = self.prompts[min(choice // self.num_samples, len(self.prompts) - 1)]
        return [
            None if found is None else [_told(prompt, each) for each in found]
            for found in completion.all_sources[start:]
        ]

    def beside(self, completion: CompletionOutput, start: int = 0, choice: int = 0) -> dict[str, Any]:
        """Return the same as a dict with its field name; {} if they were not asked for."""
        found = self.of(completion, start, choice)
        return {} if found is None else {"attention_sources": found}


def source_form(
    tokenizer: Tokenizer | None,
    chat: ChatRequest | CompletionRequest,
    prompts: Sequence[PromptTokens],
    params: SamplingParams,
) -> SourceForm:
    """Return the form of the attention sources that ``params`` ask for. ``prompts``: the prompts of ``chat``."""
    if not params.attention_sources or tokenizer is None:
        return SourceForm(num_samples=params.n)
    messages = tuple(map(_texts, chat.messages)) if isinstance(chat, ChatRequest) else ()
    places = tuple(PromptPlaces(tokenizer, each.token_ids, each.text, messages) for each in prompts)
    return SourceForm(places, params.n)


def _told(prompt: PromptPlaces | None, source: AttentionSource) -> dict[str, Any]:
    told = {"first_token": source.first, "last_token": source.last, "weight": source.weight}
    return told if prompt is None else {**told, **prompt.of(source)}


def _texts(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of a message's content."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (each.get("text") if isinstance(each, dict) else each for each in parts)
    return tuple(each for each in texts if isinstance(each, str))
