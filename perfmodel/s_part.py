"""T(B): seconds of the S-part of one layer, and of the head, against the rows of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdecode.errors import ConfigError
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape


class SPart(Protocol):
    """Whoever knows how long the S-part takes; neither figure may fall with more rows."""

    def layer_seconds(self, rows: float) -> float:
        """T(B): everything of one layer but attention, for ``rows`` tokens."""
        ...

    def head_seconds(self, rows: float) -> float:
        """What comes once per mini-batch: the output projection."""
        ...


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
        return self._seconds(rows, self.shape.layer_parameters, self.shape.active_layer_parameters)

    def head_seconds(self, rows: float) -> float:
        """The output projection of the rows that are sampled."""
        return self._seconds(rows, self.shape.head_parameters, self.shape.head_parameters)

    def _seconds(self, rows: float, parameters: int, active_parameters: int) -> float:
        load = parameters * self.shape.item_bytes / self.gpu.weight_bytes_per_second.achieved
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
        """Of the head."""
        return self._interpolated(rows, self.head_seconds_at)

    def times(self, layer_factor: float, head_factor: float) -> MeasuredSPart:
        """The same with slower, or faster, layers and head."""
        return MeasuredSPart(
            self.batch_sizes,
            tuple(layer_factor * seconds for seconds in self.layer_seconds_at),
            tuple(head_factor * seconds for seconds in self.head_seconds_at),
        )

    def _interpolated(self, rows: float, seconds: Sequence[float]) -> float:
        beyond = max(rows / self.batch_sizes[-1], 1.0)
        return float(np.interp(rows, self.batch_sizes, seconds)) * beyond
