"""Draft tokens by lookup: what followed the last tokens when they came before (vLLM's ngram, prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.protocols import DraftRequest

LOOK_BACK = 64
"""Tokens by which earlier places are told apart: the one that agrees with the end furthest back is taken."""


class NgramDrafter:
    """Looks in each sequence's own prompt and output."""

    def __init__(self, least: int, most: int) -> None:
        """``least``, ``most``: tokens that have to agree; ``most`` is tried first, and is enough."""
        self._least, self._most = least, most
        self._histories: dict[int, History] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        """See ``Drafter``."""
        return {each.sequence_id: self._draft(each) for each in requests}

    def forget(self, sequence_id: int) -> None:
        """See ``Drafter``."""
        self._histories.pop(sequence_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        history = self._histories.get(request.sequence_id)
        if history is None:
            history = self._histories[request.sequence_id] = History(request.prompt_token_ids)
        history.extend(request.output_token_ids[history.num_tokens - len(request.prompt_token_ids) :])
        return continuation(history.tokens, self._least, self._most, request.num_drafts)


class History:
    """A sequence's tokens as an array that grows."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._buffer = np.zeros(2 * len(token_ids) + 16, np.int64)
        self.extend(token_ids)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [num_tokens]."""
        return self._buffer[: self.num_tokens]

    def extend(self, token_ids: Sequence[int]) -> None:
        """More tokens."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.append(self.tokens, np.zeros(end + 16, np.int64))
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end


def continuation(tokens: np.ndarray, least: int, most: int, count: int) -> list[int]:
    """``count`` tokens that followed the last ``least`` to ``most`` of ``tokens``, int64 [n], when they came before.

    Of several places the one that agrees furthest back is taken, and of equal ones the last. What follows a place close
    to the end goes on in a circle. Empty where fewer than ``least`` agree anywhere.
    """
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    agreeing = 1
    while len(places) > 1 or agreeing < least:
        longer = places[places >= agreeing]
        if len(longer):
            longer = longer[tokens[longer - agreeing] == tokens[-1 - agreeing]]
        if not len(longer) or agreeing >= max(most, LOOK_BACK):
            break
        places, agreeing = longer, agreeing + 1
    if agreeing < least or not len(places):
        return []
    start = int(places[-1]) + 1
    period = len(tokens) - start
    return tokens[start + np.arange(count) % period].tolist()
