"""Attention sources as clients read them: each block with the message and the characters that it covers."""

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
    """Finds which characters and which message of one prompt a block of tokens covers.

    ``text``: the client's text, before special tokens were added; None if the client sent token ids.
    ``messages``: the texts of each message of a conversation, in order.
    """

    tokenizer: Tokenizer
    token_ids: Sequence[int]
    text: str | None = None
    messages: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def _spelled(self) -> tuple[str, np.ndarray]:
        """The prompt's text, and int64 [num_tokens + 1]: each token's first character, then the text's length."""
        spell = {each: self.tokenizer.token_bytes(each) for each in set(self.token_ids)}
        spelling = b"".join(spell[each] for each in self.token_ids)
        begins = (np.frombuffer(spelling, np.uint8) & 0xC0) != 0x80  # True at the first byte of a UTF-8 character
        characters = np.concatenate([[0], np.cumsum(begins)])
        ends = np.cumsum([0, *(len(spell[each]) for each in self.token_ids)])
        spelled = spelling.decode(errors="replace")
        added = max(0, spelled.find(self.text)) if self.text else 0
        return spelled[added:], np.maximum(characters[ends] - added, 0)

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """Each message's character range (start, end) in the text; (0, 0) for a message that is not in the text."""
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
        """Return the message index and character range of block ``source``; both None for a block after the prompt."""
        if source.first >= len(self.token_ids):
            return {"message": None, "characters": None}
        places = self._spelled[1]
        first, end = int(places[source.first]), int(places[min(source.last + 1, len(self.token_ids))])
        shared = [min(end, last) - max(first, start) for start, last in self._extents]
        most = max(shared, default=0)
        return {"message": shared.index(most) if most > 0 else None, "characters": [first, end]}


@dataclass(frozen=True)
class SourceForm:
    """How an answer shows attention sources. ``prompts``: places by prompt; ``num_samples``: choices per prompt."""

    prompts: tuple[PromptPlaces | None, ...] = (None,)
    num_samples: int = 1

    def of(self, completion: CompletionOutput, start: int = 0, choice: int = 0) -> list[Any] | None:
        """Return the sources of each token of ``choice`` from index ``start`` on; None if not requested."""
        if completion.all_sources is None:
            return None
        prompt = self.prompts[min(choice // self.num_samples, len(self.prompts) - 1)]
        return [
            None if found is None else [_told(prompt, each) for each in found]
            for found in completion.all_sources[start:]
        ]

    def beside(self, completion: CompletionOutput, start: int = 0, choice: int = 0) -> dict[str, Any]:
        """Return the sources as the answer's field ``attention_sources``; {} if sources were not requested."""
        found = self.of(completion, start, choice)
        return {} if found is None else {"attention_sources": found}


def source_form(
    tokenizer: Tokenizer | None,
    chat: ChatRequest | CompletionRequest,
    prompts: Sequence[PromptTokens],
    params: SamplingParams,
) -> SourceForm:
    """Return the form of the attention sources that ``params`` request. ``prompts``: the tokenized ``chat``."""
    if not params.attention_sources or tokenizer is None:
        return SourceForm(num_samples=params.n)
    messages = tuple(map(_texts, chat.messages)) if isinstance(chat, ChatRequest) else ()
    places = tuple(PromptPlaces(tokenizer, each.token_ids, each.text, messages) for each in prompts)
    return SourceForm(places, params.n)


def _told(prompt: PromptPlaces | None, source: AttentionSource) -> dict[str, Any]:
    told = {"first_token": source.first, "last_token": source.last, "weight": source.weight}
    return told if prompt is None else {**told, **prompt.of(source)}


def _texts(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts in the content of ``message``."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (each.get("text") if isinstance(each, dict) else each for each in parts)
    return tuple(each for each in texts if isinstance(each, str))
