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
    """One R-worker: ``seconds_per_token`` per cached token and layer, ``call_seconds`` once per layer's call."""

    seconds_per_token: float
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.seconds_per_token < math.inf and 0 <= self.call_seconds < math.inf):
            raise ConfigError(
                f"an R-worker's seconds per cached token must be finite and above zero, and its call not below, not "
                f"{self.seconds_per_token:g} and {self.call_seconds:g}"
            )

    def seconds(self, kv_tokens: float) -> float:
        """One layer's attention over ``kv_tokens`` of this R-worker's tokens."""
        return self.call_seconds + self.seconds_per_token * kv_tokens


def host_r_part(shape: ModelShape, kv_dtype: str, host: CpuHost) -> RPart:
    """An R-worker of ``host``: the slower of reading its KV and of computing with it.

    Bytes per token include scales, so R falls with the KV dtype and with n_kv/n_q.
    """
    computing = kernel_bytes_per_second(kv_dtype, shape.group, host.cores)
    rate = min(host.read_bytes_per_second.achieved, computing)
    return RPart(shape.layer_layout.kv_bytes_per_token(kv_dtype) / rate)
