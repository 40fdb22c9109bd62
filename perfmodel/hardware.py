"""GPUs, CPU hosts and links as the plan sees them, every figure with its efficiency and where it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fastdecode.errors import ConfigError


@dataclass(frozen=True)
class Figure:
    """A vendor's figure and the part of it that is reached; the unit stands in the name of the field that holds it.

    ``measured``: the efficiency was measured on this very hardware; otherwise it is assumed, and ``source`` says why.
    """

    nominal: float
    efficiency: float
    measured: bool
    source: str

    def __post_init__(self) -> None:
        if not self.nominal > 0 or not 0 < self.efficiency <= 1:
            raise ConfigError(f"{self.nominal:g} at efficiency {self.efficiency:g}: a rate must be above zero")

    @property
    def achieved(self) -> float:
        """What a plan counts on."""
        return self.nominal * self.efficiency

    def __str__(self) -> str:
        basis = "measured" if self.measured else "nominal, efficiency assumed"
        return f"{self.efficiency:.3g} of {self.nominal:.4g} ({basis}: {self.source})"


@dataclass(frozen=True)
class Gpu:
    """An S-worker's GPU, or several under tensor parallelism taken as one (their all-reduce is left out).

    ``weight_bytes_per_second``: reading weights in small batches. ``kv_bytes_per_second``: reading a KV cache, as a
    server without R-workers does. ``host_bytes_per_second``: PCIe, one direction. ``memory_bytes``: nominal.
    """

    name: str
    flops_per_second: Figure
    weight_bytes_per_second: Figure
    kv_bytes_per_second: Figure
    memory_bytes: float
    host_bytes_per_second: float

    def times(self, count: int) -> Gpu:
        """``count`` of them as one."""
        if count < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1, not {count}")
        rates = ("flops_per_second", "weight_bytes_per_second", "kv_bytes_per_second")
        scaled = {rate: replace(getattr(self, rate), nominal=count * getattr(self, rate).nominal) for rate in rates}
        return replace(
            self,
            **scaled,
            name=f"{count} x {self.name}" if count > 1 else self.name,
            memory_bytes=count * self.memory_bytes,
            host_bytes_per_second=count * self.host_bytes_per_second,
        )


@dataclass(frozen=True)
class CpuHost:
    """A host of R-workers, one per NUMA node; figures are of one R-worker. ``memory_bytes`` is an assumption."""

    name: str
    r_workers_per_host: int
    cores: int
    read_bytes_per_second: Figure
    memory_bytes: float


def parse_link(text: str) -> float:
    """Bytes per second, one direction, from "100Gb" (bits) or "12.5GB" (bytes); ConfigError when it is neither."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(b|B|bit|bps)(?:/s)?\s*", text)
    if not match:
        raise ConfigError(f"link must be a bandwidth such as 100Gb (bits) or 12.5GB (bytes) per second, not {text!r}")
    number = float(match.group(1)) * {"M": 1e6, "G": 1e9, "T": 1e12}[match.group(2)]
    rate = number if match.group(3) == "B" else number / 8
    if rate <= 0:
        raise ConfigError(f"link: {text!r} is no bandwidth at all; q, k, v and o have to cross it")
    return rate
