"""R: seconds one R-worker needs per cached token and layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.errors import ConfigError
from fastdecode.perfmodel.hardware import CpuHost
from fastdecode.perfmodel.kernel_rate import kernel_bytes_per_second
from fastdecode.perfmodel.model_shape import ModelShape


@dataclass(frozen=True)
class RPart:
    """One R-worker: ``seconds_per_token`` per cached token and layer, ``row_seconds`` per row that a layer's call
    appends and attends, ``call_seconds`` once per call."""

    seconds_per_token: float
    call_seconds: float = 0.0
    row_seconds: float = 0.0

    def __post_init__(self) -> None:
        fixed = (self.call_seconds, self.row_seconds)
        if not (0 < self.seconds_per_token < math.inf and all(0 <= seconds < math.inf for seconds in fixed)):
            raise ConfigError(
                f"an R-worker's seconds per cached token must be finite and above zero, and its call and rows not "
                f"below, not {self.seconds_per_token:g}, {self.call_seconds:g} and {self.row_seconds:g}"
            )

    def seconds(self, kv_tokens: float, rows: float = 0.0) -> float:
        """One layer's attention of ``rows`` rows over ``kv_tokens``, all of them this R-worker's."""
        return self.call_seconds + self.row_seconds * rows + self.seconds_per_token * kv_tokens

    def times(self, factor: float) -> RPart:
        """The same, ``factor`` times as slow."""
        return RPart(factor * self.seconds_per_token, factor * self.call_seconds, factor * self.row_seconds)


def host_r_part(shape: ModelShape, kv_dtype: str, host: CpuHost) -> RPart:
    """An R-worker of ``host``: the slower of reading its KV and of computing with it.

    Bytes per token include scales, so R falls with the KV dtype and with n_kv/n_q.
    """
    computing = kernel_bytes_per_second(kv_dtype, shape.group, host.cores)
    rate = min(host.read_bytes_per_second.achieved, computing)
    return RPart(shape.layer_layout.kv_bytes_per_token(kv_dtype) / rate)
