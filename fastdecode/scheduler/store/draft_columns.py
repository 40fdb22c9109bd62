"""Draft tokens of the sequences that decode, as columns of the sequence table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEPT = 0.9
"""The part of earlier counts that counts after another verification: the last ten or so say how likely a sequence's
drafts are accepted."""


class DraftColumns:
    """``tokens``: int64 [most_rows, most_drafts], of which the first ``counts`` of each row are proposed for the next
    step. ``tried`` and ``kept``: float64 [most_rows], how many were tested and accepted, the last ones counting most.
    """

    def __init__(self, most_rows: int, most_drafts: int) -> None:
        self.tokens, self.counts = np.zeros((most_rows, most_drafts), np.int64), np.zeros(most_rows, np.int64)
        self.tried, self.kept = np.zeros((2, most_rows))

    def open(self, row: int) -> None:
        """Begin ``row`` for another sequence."""
        self.counts[row], self.tried[row], self.kept[row] = 0, 0.0, 0.0

    def propose(self, row: int, token_ids: Sequence[int]) -> None:
        """Have the next step verify ``token_ids`` of ``row``."""
        self.tokens[row, : len(token_ids)] = token_ids
        self.counts[row] = len(token_ids)

    def forget(self, row: int) -> None:
        """Have the next step verify nothing of ``row``."""
        self.counts[row] = 0

    def cut(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Keep only the first ``counts`` draft tokens of each of ``rows``."""
        self.counts[rows] = counts

    def verify(self, row: int, num_tested: int, num_accepted: int) -> None:
        """Count a verification of ``row``: drafts after the first that was rejected were not tested."""
        self.tried[row] = KEPT * self.tried[row] + min(num_accepted + 1, num_tested)
        self.kept[row] = KEPT * self.kept[row] + num_accepted
