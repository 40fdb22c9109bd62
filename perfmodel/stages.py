"""Seconds of each stage of a layer.

The stages are the S-part T(B), the R-part and the link between them. Contention between S and R on one machine is
included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape


@dataclass(frozen=True)
class Stages:
    """Seconds of one layer and mini-batch.

    They are the seconds on the S-worker, on the busiest R-worker, on the slowest hop, and of the whole round trip.
    """

    s_part: float
    r_part: float
    hop: float
    trip: float


class SPart(Protocol):
    """The interface to the times of the S-part. The times of a layer and of the head may not fall with more rows."""

    def layer_seconds(self, rows: float) -> float:
        """Return T(B): everything of one layer except attention, for ``rows`` tokens."""

    def head_seconds(self, rows: float) -> float:
        """Return the seconds of the output projection of ``rows`` sampled rows, once per mini-batch."""


@dataclass(frozen=True)
class GpuSPart:
    """The S-part on a GPU, from its figures: time to load the weights plus time to multiply.

    A roofline takes the larger of the two, as if loading and multiplying overlapped entirely. FastDecode's A10 is near
    the sum: T(1024) of a 7B layer was measured as 7.08 ms; the sum is 6.8, and the larger 5.3.
    """

    shape: ModelShape
    gpu: Gpu

    def layer_seconds(self, rows: float) -> float:
        """Return T(B). In a mixture of experts all weights are loaded, and each row uses its own experts."""
        loaded = self.shape.layer_parameters * self.shape.layer_item_bytes
        return self._seconds(rows, loaded, self.shape.active_layer_parameters)

    def head_seconds(self, rows: float) -> float:
        """Return the seconds of the output projection of sampled rows."""
        parameters = self.shape.head_parameters
        return self._seconds(rows, parameters * self.shape.item_bytes, parameters)

    def _seconds(self, rows: float, loaded_bytes: float, active_parameters: int) -> float:
        load = loaded_bytes / self.gpu.weight_bytes_per_second.achieved
        return load + 2.0 * rows * active_parameters / self.gpu.flops_per_second.achieved


@dataclass(frozen=True)
class MeasuredSPart:
    """The S-part as measured at a few batch sizes, linear in between.

    Below the smallest size, its seconds apply (loading the weights); above the largest, its seconds per row
    (arithmetic). Both ends thus overestimate the time. ``layer_seconds_at``, ``head_seconds_at``: seconds at
    ``batch_sizes``, ascending.
    """

    batch_sizes: tuple[int, ...]
    layer_seconds_at: tuple[float, ...]
    head_seconds_at: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.batch_sizes or not np.all(np.diff((0, *self.batch_sizes)) > 0):
            raise ConfigError(f"batch sizes of the S-part must be at least 1 and ascend, not {list(self.batch_sizes)}")
        if not len(self.batch_sizes) == len(self.layer_seconds_at) == len(self.head_seconds_at):
            raise ConfigError("the S-part needs one time of a layer and one of the head per batch size")
        layer, head = np.array(self.layer_seconds_at), np.array(self.head_seconds_at)
        if not (np.all((layer > 0) & (layer < np.inf)) and np.all((head >= 0) & (head < np.inf))):
            raise ConfigError("the S-part's times must be finite and above zero seconds")

    def layer_seconds(self, rows: float) -> float:
        """Return T(B): the seconds of one layer except attention, for ``rows`` tokens."""
        return self._interpolated(rows, self.layer_seconds_at)

    def head_seconds(self, rows: float) -> float:
        """Return the seconds of the output projection for ``rows`` rows."""
        return self._interpolated(rows, self.head_seconds_at)

    def times(self, layer_factor: float, head_factor: float) -> MeasuredSPart:
        """Return a copy of this S-part whose times of layers and head are multiplied by these factors."""
        return MeasuredSPart(
            self.batch_sizes,
            tuple(layer_factor * seconds for seconds in self.layer_seconds_at),
            tuple(head_factor * seconds for seconds in self.head_seconds_at),
        )

    def _interpolated(self, rows: float, seconds: Sequence[float]) -> float:
        beyond = max(rows / self.batch_sizes[-1], 1.0)
        return float(np.interp(rows, self.batch_sizes, seconds)) * beyond


PROMPT_ROWS_PER_STATE = 3
"""Prompt rows that take an R-worker as long as one decode row, which reads and writes the state:

2.1 to 4.2, median 2.7, on a Zen 4 (1 row over 256 and 1,024; docs/performance.md).
"""


@dataclass(frozen=True)
class RPart:
    """The times of attention on one R-worker, in seconds.

    ``seconds_per_token``: per cached token and layer. ``row_seconds``: per row that a layer's call appends and attends.
    ``call_seconds``: per call. ``prompt_row_seconds``: per prompt row, if R-workers compute prompts too. ``bound_by``:
    "reads", "arithmetic", or "" if unknown. ``arithmetic_over_reads``: seconds of a cached token's multiply-adds
    divided by those of reading the token; 0 if unknown.
    """

    seconds_per_token: float
    call_seconds: float = 0.0
    row_seconds: float = 0.0
    bound_by: str = ""
    prompt_row_seconds: float = 0.0
    arithmetic_over_reads: float = 0.0

    def __post_init__(self) -> None:
        fixed = (self.call_seconds, self.row_seconds, self.prompt_row_seconds)
        if not (0 < self.seconds_per_token < math.inf and all(0 <= seconds < math.inf for seconds in fixed)):
            raise ConfigError(
                f"an R-worker's seconds per cached token must be finite and above zero, and its seconds per call "
                f"and row at least zero, not {self.seconds_per_token:g}, {self.call_seconds:g} and {self.row_seconds:g}"
            )

    def seconds(self, kv_tokens: float, rows: float = 0.0, prompt_rows: float = 0.0) -> float:
        """Return the seconds of one layer's call with ``rows`` decode rows over ``kv_tokens``, and ``prompt_rows``."""
        fixed = self.call_seconds + self.row_seconds * rows + self.prompt_row_seconds * prompt_rows
        return fixed + self.seconds_per_token * kv_tokens

    def times(self, factor: float) -> RPart:
        """Return a copy of this R-part that is ``factor`` times slower."""
        return RPart(
            factor * self.seconds_per_token, factor * self.call_seconds, factor * self.row_seconds, self.bound_by,
            factor * self.prompt_row_seconds, self.arithmetic_over_reads,
        )  # fmt: skip

    def beside_scan(self, scan: RPart, share: float) -> RPart:
        """Return the mean layer's R-part if a fraction ``share`` of the layers also scan an index (``scan``)."""
        return replace(
            self,
            seconds_per_token=self.seconds_per_token + share * scan.seconds_per_token,
            call_seconds=self.call_seconds + share * scan.call_seconds,
            row_seconds=self.row_seconds + share * scan.row_seconds,
        )


def beside_states(rows: RPart, shape: ModelShape, state: tuple[float, float], prompt_context: float = 0.0) -> RPart:
    """Return the mean layer of a hybrid: attending layers take ``rows``, recurrent ones ``state``.

    ``state``: the seconds of a call and of one sequence's state. Prompt rows advance a state in less time
    (PROMPT_ROWS_PER_STATE), and read no less than decode rows. If the S-worker keeps states, recurrent layers take an
    R-worker no time.
    """
    if shape.state is None:
        return rows
    here = shape.sent_states.num_layers if shape.sent_states else 0
    recurrent, attending = (layers / shape.num_layers for layers in (here, shape.attention_layers))
    own, (call_seconds, state_seconds) = rows.times(attending), state
    reading = own.row_seconds + own.seconds_per_token * prompt_context
    return replace(
        own,
        call_seconds=own.call_seconds + recurrent * call_seconds,
        row_seconds=own.row_seconds + recurrent * state_seconds,
        prompt_row_seconds=reading + recurrent * state_seconds / PROMPT_ROWS_PER_STATE,
    )


@dataclass(frozen=True)
class Transport:
    """The hops between S-worker and R-workers, such as PCIe and the network, in sequence.

    ``row_bytes``: q, k, v and o of one row and layer, both directions together, as the paper counts them.
    ``hop_bytes_per_second``: each hop's rate; () means no cost. ``latency_seconds``: of one round trip.
    ``overlapped``: the hops work while S and R do; otherwise the slower of S and R also waits for the hops.
    """

    row_bytes: float = 0.0
    hop_bytes_per_second: tuple[float, ...] = ()
    latency_seconds: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if self.row_bytes < 0 or self.latency_seconds < 0 or any(not rate > 0 for rate in self.hop_bytes_per_second):
            raise ConfigError("a link must have a bandwidth above zero; bytes and latency must be at least zero")

    def of_layers(self, share: float) -> Transport:
        """Return this link for the mean layer if only a fraction ``share`` of the layers use the link."""
        return replace(self, latency_seconds=share * self.latency_seconds)

    def trip_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return the seconds from submit to o for ``rows`` rows of one layer without the R-part: all hops in sequence.

        ``more_bytes`` go over every hop; ``last_bytes`` only over the last, which ends at the R-workers.
        """
        return self.latency_seconds + sum(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes))

    def stage_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return the seconds that the slowest hop is busy with ``rows`` rows of a layer: the bound of a pipeline."""
        return max(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes), default=0.0)

    def _hop_seconds(self, num_bytes: float, last_bytes: float) -> list[float]:
        seconds = [num_bytes / rate for rate in self.hop_bytes_per_second]
        if seconds:
            seconds[-1] += last_bytes / self.hop_bytes_per_second[-1]
        return seconds


@dataclass(frozen=True)
class Contention:
    """The factor by which each side is slower while the other works; 1 if the sides share nothing.

    If S and R take turns on the same cores, both slowdowns are 2, and :meth:`together` sums their seconds.
    """

    s_slowdown: float = 1.0
    r_slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.s_slowdown < 1 or self.r_slowdown < 1:
            raise ConfigError(
                f"a neighbour makes neither side faster: slowdowns must be at least 1, not {self.s_slowdown:g} and "
                f"{self.r_slowdown:g}"
            )

    def together(self, s_seconds: float, r_seconds: float) -> float:
        """Return the seconds until both sides are done, if they start together.

        Alone they take ``s_seconds`` and ``r_seconds``. Both are slowed down until one side is done; the other side
        then finishes at full speed.
        """
        s_slow, r_slow = s_seconds * self.s_slowdown, r_seconds * self.r_slowdown
        if s_slow <= r_slow:
            return s_slow + r_seconds - s_slow / self.r_slowdown
        return r_slow + s_seconds - r_slow / self.s_slowdown


NO_CONTENTION = Contention()

SHARED = Contention(2.0, 2.0)
"""S and R on the same cores, which take turns."""
