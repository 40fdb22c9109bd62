"""What it costs that a second R-worker stores each row too (``kv_replicas``), and what a lost R-worker costs."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.stages import RPart

APPENDED_TOKENS = 22.0
"""Cached tokens that an R-worker reads in the time in which it stores one: appending a row takes 2.0 to 2.4 % of a step
at context 1,024 (docs/performance.md)."""


@dataclass(frozen=True)
class CopyCosts:
    """Of one row and layer: ``link_bytes`` of its keys and values, once more on the way to the R-workers, and the
    ``append_seconds`` of the R-worker that only stores them. Nothing is counted where nothing is known."""

    link_bytes: float = 0.0
    append_seconds: float = 0.0

    @staticmethod
    def of(shape: ModelShape | None, r_part: RPart) -> CopyCosts:
        """For the heads of ``shape``, which are a rank's own under tensor parallelism.

        Where a row's cost was measured, which is of storing and attending, storing takes no longer than that.
        """
        append = APPENDED_TOKENS * r_part.seconds_per_token
        most = r_part.row_seconds or append
        return CopyCosts(shape.appending_row_bytes if shape else 0.0, min(append, most))


FREE_COPIES = CopyCosts()
