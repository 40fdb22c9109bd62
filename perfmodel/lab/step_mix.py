"""The steps of a steady state: some steps compute a prompt's chunk beside the decodes, the others only decode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.perfmodel.equations import TILE_TOKENS
from fastdecode.perfmodel.service import CHUNK_TOKENS
from fastdecode.perfmodel.sizing import Workload


def batch_tokens(in_flight: int, workload: Workload) -> int:
    """Return the token budget of a step: the engine's default, or more tiles if arriving prompts need them."""
    return max(CHUNK_TOKENS, math.ceil(in_flight * workload.rows_per_output_token / TILE_TOKENS) * TILE_TOKENS)


@dataclass(frozen=True)
class StepMix:
    """The mean numbers of sequences and rows in the two kinds of steps of a steady state.
    ``decoding``: sequences that get a token in a step; the prompts of other sequences in flight are still computed.
    ``chunk_share``: fraction of the steps that also compute a prompt's chunk, of ``chunk_rows`` rows. The time of a
    step is the longest of several stages, so the mean over both kinds exceeds the time of the mean step.
    """

    decoding: float
    chunk_share: float = 0.0
    chunk_rows: float = 0.0

    @staticmethod
    def of(workload: Workload, in_flight: float) -> StepMix:
        """Return the mix for ``in_flight`` sequences, with the token budget of :func:`batch_tokens` in each step."""
        each = workload.rows_per_output_token - 1.0
        if each <= 0:
            return StepMix(in_flight)
        decoding = in_flight
        prompt_rows = each * workload.output_len
        budget = batch_tokens(math.ceil(in_flight), workload)
        for _ in range(3):  # iterate, since decodes and chunks depend on each other
            chunk = budget - decoding
            steps = max(prompt_rows / chunk - 0.5, 0.0)  # the step of the last chunk also gives a token
            decoding = in_flight * workload.output_len / (workload.output_len + steps)
        together = max(1, round(in_flight / 32))  # a micro-batch's prompts are computed in one step, if they fit
        chunk = min(budget - decoding, together * prompt_rows)
        share = min(1.0, decoding * each / chunk)
        return StepMix(decoding, share, decoding * each / share)

    def steps(self) -> Iterator[tuple[float, float]]:
        """Yield, for each kind of step, its fraction of all steps and its rows."""
        if self.chunk_share < 1.0:
            yield 1.0 - self.chunk_share, self.decoding
        if self.chunk_share:
            yield self.chunk_share, self.decoding + self.chunk_rows
