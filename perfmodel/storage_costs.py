"""Costs, besides attention, of sequences split into ranges over several R-workers, and of second copies."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.stages import RPart

APPENDED_TOKENS = 22.0
"""Cached tokens that an R-worker reads in the time of storing one.

Appending a row takes 2.0 to 2.4 % of a step at context 1,024 (docs/performance.md).
"""


@dataclass(frozen=True)
class StorageCosts:
    """Costs of one row in one layer; unknown ones are 0.

    Ranges: ``query_bytes`` go to each closed range, ``partial_bytes`` of a partial result return, the S-worker merges
    it in ``merged_seconds``, and each call of a layer takes ``call_seconds``. ``slowness``: how many times slower the
    S-worker is than in the measurement of these costs. Second copies: ``copied_bytes`` of keys and values go to one
    more R-worker, which stores them in ``append_seconds``.
    """

    query_bytes: float = 0.0
    partial_bytes: float = 0.0
    merged_seconds: float = 0.0
    call_seconds: float = 0.0
    slowness: float = 1.0
    copied_bytes: float = 0.0
    append_seconds: float = 0.0

    @staticmethod
    def of(shape: ModelShape | None, r_part: RPart | None = None, slowness: float = 1.0) -> StorageCosts:
        """Return the costs for the heads of ``shape`` (of one rank under tensor parallelism) and for ``r_part``.

        A measured cost per row covers storing and attending, so storing takes at most that.
        """
        append = APPENDED_TOKENS * r_part.seconds_per_token if r_part else 0.0
        storing = min(append, r_part.row_seconds or append) if r_part else 0.0
        if shape is None:
            return StorageCosts(append_seconds=storing)
        layer = shape.layer_layout
        # Bytes of each number of a partial result: a maximum, a sum, and the undivided output
        partial_bytes = ITEM_BYTES["float32"]
        query, partial = layer.query_dim * shape.item_bytes, (2 + layer.output_dim) * partial_bytes
        heads = shape.num_heads
        # Seconds of merging a layer's partial results, whatever their number, on Zen 4
        merge_call_seconds = 30e-6
        # Seconds of merging the partial result of one row and head, with its exponential, on Zen 4
        merged_seconds = 28e-9
        return StorageCosts(
            heads * query, heads * partial, heads * merged_seconds, merge_call_seconds, slowness,
            shape.appending_row_bytes, storing,
        )  # fmt: skip

    def link_bytes(self, load: Load) -> float:
        """Return the link bytes of queries and partial results in one layer, in addition to the rows' q, k, v and o."""
        return load.reads * self.query_bytes + load.partials * self.partial_bytes

    def merge_seconds(self, load: Load, num_mini_batches: int) -> float:
        """Return the S-worker's seconds for sequences in ranges, per layer and mini-batch of ``load``.

        The S-worker copies each row's query for its own R-worker and once per closed range, and merges partial results.
        """
        if not load.partials:
            return 0.0
        rows, reads, partials = (each / num_mini_batches for each in (load.rows, load.reads, load.partials))
        copied = (reads + rows) * self.query_bytes + partials * self.partial_bytes
        merged = partials * self.merged_seconds
        # Rate at which one thread copies queries and receives partial results, on Zen 4
        copied_bytes_per_second = 12e9
        return self.slowness * (self.call_seconds + merged + copied / copied_bytes_per_second)


NO_STORAGE_COSTS = StorageCosts()
