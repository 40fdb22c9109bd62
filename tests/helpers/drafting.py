"""Policies and drafters that force decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.core.protocols import Drafter, DraftRequest, PendingControls
from fastdecode.engine.engine import LLMEngine


class AlwaysMost:
    """A ``DraftPolicy`` that always drafts as many tokens as allowed."""

    def acceptance(self, tried: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return np.ones(len(tried))

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        return most

    def observe(
        self,
        num_tokens: int,
        num_sequences: int,
        kv_loads: Sequence[int],
        s_seconds: float,
        wait_seconds: float,
        r_seconds: Sequence[float],
    ) -> None:
        pass

    def observe_drafting(self, num_sequences: int, num_passes: int, seconds: float) -> None:
        pass


class Clairvoyant:
    """A ``Drafter`` that knows the outputs by prompt; each token is wrong with probability ``error``.

    After a wrong token come right ones, which must not be accepted.
    """

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], error: float, seed: int = 0) -> None:
        self._outputs, self._error, self._rng = outputs, error, np.random.default_rng(seed)
        self.num_proposed = 0

    def propose(self, requests: Sequence[DraftRequest], pending: PendingControls) -> dict[int, list[int]]:
        drafts = {each.sequence_id: self._draft(each) for each in requests}
        self.num_proposed += sum(map(len, drafts.values()))
        return drafts

    def _draft(self, request: DraftRequest) -> list[int]:
        done = len(request.output_token_ids)
        right = self._outputs[tuple(request.prompt_token_ids)][done : done + request.num_drafts]
        wrong = self._rng.random(len(right)) < self._error
        return [token ^ 1 if err else token for token, err in zip(right, wrong, strict=True)]

    def forget(self, sequence_id: int) -> None:
        pass


def always_draft(engine: LLMEngine, drafter: Drafter | None = None) -> None:
    """Make ``engine`` draft in every step, with ``drafter`` if given."""
    engine.scheduler.drafts.policy = AlwaysMost()
    if drafter:
        assert engine.speculation
        engine.speculation.drafter = drafter
