"""What copying cached tokens from one R-worker to another takes."""

from __future__ import annotations

from fastdecode.core.decayed import Decayed
from fastdecode.scheduler.store.speeds import KEPT


class TransferPrice:
    """Seconds per token, as all transfers so far took: moves that must be, corrections, and second copies alike."""

    def __init__(self, per_token: float) -> None:
        """``per_token``: seconds, before any token was copied; it may be infinite."""
        self.per_token = per_token
        self._seen = Decayed(KEPT, 2)  # seconds, tokens

    def paid(self, num_tokens: int, seconds: float) -> None:
        """A transfer of ``num_tokens`` cached tokens took ``seconds``."""
        self._seen.add(seconds, num_tokens)
        self.per_token = self._seen.ratio(0, 1, 1.0)
