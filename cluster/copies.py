"""Second copies: R-workers that store rows of others, too, get their keys and values beside those of their own rows."""

from __future__ import annotations

import numpy as np


class CopiedRows:
    """One mini-batch in which sequences have second copies: what each R-worker stores besides its own rows."""

    def __init__(self, copies: np.ndarray, num_workers: int) -> None:
        """``copies``: COPY [num_copied_chunks]."""
        order = np.argsort(copies["worker"], kind="stable")
        counts = copies["num_rows"][order]
        starts = copies["row"][order] - (np.cumsum(counts) - counts)
        rows = np.repeat(starts, counts) + np.arange(counts.sum())
        per_worker = np.bincount(copies["worker"], copies["num_rows"], num_workers).astype(np.int64)
        self._rows = np.split(rows, np.cumsum(per_worker)[:-1])
        self._buffers: dict[tuple[int, str, tuple[int, ...]], np.ndarray] = {}

    def num_copied(self, worker: int) -> int:
        """Rows of k and v that an R-worker stores of others."""
        return len(self._rows[worker])

    def stored(self, worker: int, name: str, rows: np.ndarray, own: slice) -> np.ndarray:
        """What R-worker ``worker`` stores of ``rows``, all of the mini-batch's: its ``own``, then those of others.

        ``name``: "k" or "v". The result is used anew by the mini-batch's next layer.
        """
        copied = self._rows[worker]
        if not len(copied):
            return rows[own]
        num_own, key = own.stop - own.start, (worker, name, rows.shape[1:])
        if key not in self._buffers:
            self._buffers[key] = np.empty((num_own + len(copied), *rows.shape[1:]), rows.dtype)
        both = self._buffers[key]
        both[:num_own] = rows[own]
        np.take(rows, copied, axis=0, out=both[num_own:], mode="clip")  # which needs no copy in between
        return both
