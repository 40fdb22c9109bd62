"""The tokens of simulated requests: only how many there are counts, and when each came."""

from __future__ import annotations

from collections.abc import Sequence as PySequence

import numpy as np

from fastdecode.scheduler import Sequence


class TokenTimes:
    """Every request's moments side by side in one array, so that a step of thousands is a few operations."""

    def __init__(self) -> None:
        self._seconds = np.zeros(0)
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._next = np.zeros(0, np.int64)

    def expect(self, output_lens: PySequence[int]) -> None:
        """More requests, numbered on, with so many tokens each."""
        ends = len(self._seconds) + np.cumsum(output_lens, dtype=np.int64)
        starts = ends - np.array(output_lens, np.int64)
        self._seconds = np.append(self._seconds, np.zeros(sum(output_lens)))
        self._starts, self._ends = np.append(self._starts, starts), np.append(self._ends, ends)
        self._next = np.append(self._next, starts)

    def take(self, request_ids: np.ndarray, now_seconds: float) -> np.ndarray:
        """One token for each of ``request_ids``, int64 [n], all different; returns those that have all of theirs."""
        places = self._next[request_ids]
        self._seconds[places] = now_seconds
        self._next[request_ids] = places + 1
        return request_ids[places + 1 == self._ends[request_ids]]

    def count(self, request_id: int) -> int:
        """Tokens that a request has."""
        return int(self._next[request_id] - self._starts[request_id])

    def of(self, request_id: int) -> np.ndarray:
        """The moments of a request's tokens, float64 [tokens so far]."""
        return self._seconds[self._starts[request_id] : self._next[request_id]]


class SimulatedSequence(Sequence):
    """A sequence whose output is zeros, as many as were counted: nobody appends to thousands of lists in every step."""

    def __init__(self, sequence_id: int, prompt_token_ids: list[int], max_tokens: int, tokens: TokenTimes) -> None:
        self._tokens = tokens
        super().__init__(sequence_id, prompt_token_ids, max_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """A new list at every look."""
        return [0] * self._tokens.count(self.sequence_id)

    @output_token_ids.setter
    def output_token_ids(self, token_ids: list[int]) -> None:
        """What ``Sequence`` starts with, an empty list, is not kept."""
