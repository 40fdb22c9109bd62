"""Seconds of each stage of a layer: the S-part T(B), the R-part, the way between them, and what S and R take from each
other on one machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape

MOVED_BYTES_PER_SECOND = 0.5e9
"""Rate of a cache's way from one R-worker to another, until the first was timed: export at 1.1 to 1.8 GB/s, then import
at 1.0 to 1.4 (docs/performance.md), and the way over the S-worker between them."""


@dataclass(frozen=True)
class Stages:
    """Seconds of one layer and one mini-batch: on the S-worker, on the busiest R-worker, on the slowest hop, and the
    whole way there and back."""

    s_part: float
    r_part: float
    hop: float
    trip: float


class SPart(Protocol):
    """The times of the S-part; neither figure may fall with more rows."""

    def layer_seconds(self, rows: float) -> float:
        """T(B): everything of one layer but attention, for ``rows`` tokens."""

    def head_seconds(self, rows: float) -> float:
        """Return the seconds that come once per mini-batch: those of the output projection."""


@dataclass(frozen=True)
class GpuSPart:
    """The S-part on a GPU, from its figures: time to load the weights plus time to multiply.

    A roofline takes the larger of the two, as if loading and multiplying overlapped entirely. FastDecode's A10 lies
    near the sum: T(1024) of a 7B layer is 7.08 ms as measured, 6.8 as a sum, 5.3 as the larger.
    """

    shape: ModelShape
    gpu: Gpu

    def layer_seconds(self, rows: float) -> float:
        """T(B); of a mixture of experts all weights are loaded, and each row meets its own experts."""
        loaded = self.shape.layer_parameters * self.shape.layer_item_bytes
        return self._seconds(rows, loaded, self.shape.active_layer_parameters)

    def head_seconds(self, rows: float) -> float:
        """The output projection of the rows that are sampled."""
        parameters = self.shape.head_parameters
        return self._seconds(rows, parameters * self.shape.item_bytes, parameters)

    def _seconds(self, rows: float, loaded_bytes: float, active_parameters: int) -> float:
        load = loaded_bytes / self.gpu.weight_bytes_per_second.achieved
        return load + 2.0 * rows * active_parameters / self.gpu.flops_per_second.achieved


@dataclass(frozen=True)
class MeasuredSPart:
    """The S-part as measured at a few batch sizes: straight lines between them.

    Below the smallest its time is taken (loading the weights), above the largest its time per row (arithmetic), so
    both ends err towards slow. ``layer_seconds_at`` and ``head_seconds_at`` are seconds at ``batch_sizes``, ascending.
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
        """T(B) of one layer."""
        return self._interpolated(rows, self.layer_seconds_at)

    def head_seconds(self, rows: float) -> float:
        """Return the seconds of the head."""
        return self._interpolated(rows, self.head_seconds_at)

    def times(self, layer_factor: float, head_factor: float) -> MeasuredSPart:
        """Return this S-part with slower, or faster, layers and head."""
        return MeasuredSPart(
            self.batch_sizes,
            tuple(layer_factor * seconds for seconds in self.layer_seconds_at),
            tuple(head_factor * seconds for seconds in self.head_seconds_at),
        )

    def _interpolated(self, rows: float, seconds: Sequence[float]) -> float:
        beyond = max(rows / self.batch_sizes[-1], 1.0)
        return float(np.interp(rows, self.batch_sizes, seconds)) * beyond


PROMPT_ROWS_PER_STATE = 3
"""Rows of a prompt that take an R-worker as long as one row of decode, which reads and writes the state: 2.1 to 4.2,
median 2.7, on a Zen 4 (1 row over 256 and 1,024; docs/performance.md)."""


@dataclass(frozen=True)
class RPart:
    """One R-worker: ``seconds_per_token`` per cached token and layer, ``row_seconds`` per row that a layer's call
    appends and attends, ``call_seconds`` once per call. ``prompt_row_seconds``: per row of a prompt, where R-workers
    compute these too. ``bound_by``: "reads" or "arithmetic", "" where not known. ``arithmetic_over_reads``: seconds of
    multiply-adds over those of reading, of all of a cached token; 0 where not known."""

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
                f"an R-worker's seconds per cached token must be finite and above zero, and its call and rows not "
                f"below, not {self.seconds_per_token:g}, {self.call_seconds:g} and {self.row_seconds:g}"
            )

    def seconds(self, kv_tokens: float, rows: float = 0.0, prompt_rows: float = 0.0) -> float:
        """One layer's attention of ``rows`` rows over ``kv_tokens``, all of them this R-worker's, beside prompts'."""
        fixed = self.call_seconds + self.row_seconds * rows + self.prompt_row_seconds * prompt_rows
        return fixed + self.seconds_per_token * kv_tokens

    def times(self, factor: float) -> RPart:
        """Return this R-part ``factor`` times as slow."""
        return RPart(
            factor * self.seconds_per_token, factor * self.call_seconds, factor * self.row_seconds, self.bound_by,
            factor * self.prompt_row_seconds, self.arithmetic_over_reads,
        )  # fmt: skip

    def beside_scan(self, scan: RPart, share: float) -> RPart:
        """Return the mean layer's work where ``share`` of the layers have an index, whose ``scan`` takes so long."""
        return replace(
            self,
            seconds_per_token=self.seconds_per_token + share * scan.seconds_per_token,
            call_seconds=self.call_seconds + share * scan.call_seconds,
            row_seconds=self.row_seconds + share * scan.row_seconds,
        )


def beside_states(rows: RPart, shape: ModelShape, state: tuple[float, float], prompt_context: float = 0.0) -> RPart:
    """The mean layer of a hybrid, whose attending layers take as long as ``rows``, and whose recurrent ones ``state``:
    the seconds of a call and of one sequence's state.

    Rows of a prompt advance a state in less time, as PROMPT_ROWS_PER_STATE says, and read no less than rows of decode.
    Where the S-worker keeps states, recurrent layers take an R-worker no time.
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
    """The hops between S-worker and R-workers, such as PCIe and the network, one after the other.

    ``row_bytes``: q, k, v and o of one row and layer, both directions together, as the paper counts them.
    ``hop_bytes_per_second``: of each hop; none means that nothing is counted. ``latency_seconds``: of one round trip.
    ``overlapped``: the hops work while S and R do; otherwise the slower of the two waits for them in addition.
    """

    row_bytes: float = 0.0
    hop_bytes_per_second: tuple[float, ...] = ()
    latency_seconds: float = 0.0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if self.row_bytes < 0 or self.latency_seconds < 0 or any(not rate > 0 for rate in self.hop_bytes_per_second):
            raise ConfigError("a link must have a bandwidth above zero, and rows and latencies none below")

    def of_layers(self, share: float) -> Transport:
        """Return this way for the mean layer where ``share`` of the layers take it; ``row_bytes`` are the mean's."""
        return replace(self, latency_seconds=share * self.latency_seconds)

    def trip_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return the seconds from submit to o for ``rows`` rows of one layer, the R-part apart: all hops in turn.

        ``more_bytes`` go over every hop, ``last_bytes`` over the last one alone, which ends at the R-workers.
        """
        return self.latency_seconds + sum(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes))

    def stage_seconds(self, rows: float, more_bytes: float = 0.0, last_bytes: float = 0.0) -> float:
        """Return how long the slowest hop is busy with ``rows`` rows of one layer: it bounds an overlapped pipeline."""
        return max(self._hop_seconds(rows * self.row_bytes + more_bytes, last_bytes), default=0.0)

    def _hop_seconds(self, num_bytes: float, last_bytes: float) -> list[float]:
        seconds = [num_bytes / rate for rate in self.hop_bytes_per_second]
        if seconds:
            seconds[-1] += last_bytes / self.hop_bytes_per_second[-1]
        return seconds


@dataclass(frozen=True)
class Contention:
    """The slowness of each side while the other works too, in times; 1 where they share nothing.

    Two sides that share every core in turn have 2 and 2: then :meth:`together` is the sum.
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
        """Return the seconds until both are done, started at once, that alone take ``s_seconds`` and ``r_seconds``.

        Both are slow until the first is done; what is left of the other then goes on alone.
        """
        s_slow, r_slow = s_seconds * self.s_slowdown, r_seconds * self.r_slowdown
        if s_slow <= r_slow:
            return s_slow + r_seconds - s_slow / self.r_slowdown
        return r_slow + s_seconds - r_slow / self.s_slowdown


NO_CONTENTION = Contention()

SHARED = Contention(2.0, 2.0)
"""S and R on the very same cores: what one does, the other cannot."""
