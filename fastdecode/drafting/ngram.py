"""Draft tokens by look-up: those that followed an earlier occurrence of a sequence's last tokens (vLLM's ngram)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.core.protocols import DraftRequest, PendingControls


class NgramDrafter:
    """Drafts from each sequence's own prompt and output."""

    def __init__(self, least: int, most: int) -> None:
        """``least``, ``most``: see ``continuation``."""
        self._least, self._most = least, most
        self._histories: dict[int, History] = {}

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        return {each.sequence_id: self._draft(each) for each in requests}

    def forget(self, sequence_id: int) -> None:
        self._histories.pop(sequence_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        history = self._histories.get(request.sequence_id)
        if history is None:
            history = self._histories[request.sequence_id] = History(request.prompt_token_ids)
        history.extend(request.output_token_ids[history.num_tokens - len(request.prompt_token_ids) :])
        return continuation(history.tokens, self._least, self._most, request.num_drafts)


class History:
    """A sequence's tokens as a growing array."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._buffer = np.zeros(2 * len(token_ids) + 16, np.int64)
        self.extend(token_ids)

    @property
    def tokens(self) -> np.ndarray:
        return self._buffer[: self.num_tokens]

    def extend(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.append(self.tokens, np.zeros(end + 16, np.int64))
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end


def continuation(tokens: np.ndarray, least: int, most: int, count: int) -> list[int]:
    """Return ``count`` draft tokens: those that followed an earlier occurrence of the last of ``tokens``.
    An occurrence must match at least ``least`` last tokens; without one the result is empty. The longest match wins, up
    to ``most`` or 64 tokens, then the latest. A draft that reaches the end of ``tokens`` starts again at its own
    beginning.
    """
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    agreeing, look_back = 1, max(most, 64)
    # If there are more than ``few`` occurrences, those with short matches are dropped first: comparing all is slow
    few = 32
    close = 8
    while len(places) > few and agreeing < max(least, close):
        longer = places[places >= agreeing]
        longer = longer[tokens[longer - agreeing] == tokens[-1 - agreeing]]
        if not len(longer):
            break
        places, agreeing = longer, agreeing + 1
    if not len(places):
        return []
    furthest = _match_lengths(tokens, places[-few:], min(look_back, len(tokens)))
    if furthest.max() < least:
        return []
    start = int(places[-few:][len(furthest) - 1 - furthest[::-1].argmax()]) + 1
    period = len(tokens) - start
    return tokens[start + np.arange(count) % period].tolist()


def _match_lengths(tokens: np.ndarray, places: np.ndarray, look_back: int) -> np.ndarray:
    """Return, for each of ``places``, how many tokens that end there equal the last of ``tokens``.
    The result is int64 [len(places)], at most ``look_back``.
    """
    back = np.arange(look_back)
    at = places[:, None] - back
    same = (tokens[np.maximum(at, 0)] == tokens[-1 - back]) & (at >= 0)
    return np.where(same.all(axis=1), look_back, same.argmin(axis=1))
