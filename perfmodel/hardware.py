"""GPUs, CPU hosts and links as plans describe them. Every rate comes with an efficiency and a source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.core.errors import ConfigError

FLOPS_EFFICIENCY = 0.62
"""Fraction of nominal 16-bit tensor FLOP/s that large matrix products reach, from the FastDecode paper's A10."""

GPU_READ_EFFICIENCY = 0.8
"""Fraction of nominal GPU memory bandwidth that reading a KV cache is assumed to reach.

No paper gives this figure; the value favours the GPU-only alternative.
"""

A10_WEIGHT_EFFICIENCY = 0.46
"""Fraction of 600 GB/s that T(1) in FastDecode's paper reaches: 402 MB of a 7B layer in 1.46 ms, launches included."""

CPU_READ_EFFICIENCY = 0.645
"""FastDecode's R-part on Epyc 7452: 132 GB/s of KV per socket of 205 nominal; its figures lie between 0.64 and 0.72."""

GROUP_SIZES = (1, 4, 8, 32)
"""Numbers of query heads per KV head at which the R-worker kernels below were measured."""


@dataclass(frozen=True)
class Figure:
    """A vendor's nominal rate, and the fraction of it that programs reach (``efficiency``).
    ``measured``: the efficiency was measured on this hardware; otherwise it is assumed, and ``source`` says why. The
    unit is in the name of the ``Gpu`` or ``CpuHost`` field that holds the figure.
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
        """The rate that programs reach, which plans use: nominal times efficiency."""
        return self.nominal * self.efficiency

    def __str__(self) -> str:
        basis = "measured" if self.measured else "nominal, efficiency assumed"
        return f"{self.efficiency:.3g} of {self.nominal:.4g} ({basis}: {self.source})"


@dataclass(frozen=True)
class ListPrice:
    """The list price of a GPU or host in US dollars per hour, the provider, and the date."""

    per_hour: float
    source: str

    def __str__(self) -> str:
        return f"{self.per_hour:g} USD an hour ({self.source})"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or several treated as one; their communication is modelled by ``RankGroup``.

    ``weight_bytes_per_second``: reading weights in small batches. ``kv_bytes_per_second``: reading a KV cache, as a
    server without R-workers does. ``host_bytes_per_second``: PCIe, one direction. ``nvlink_bytes_per_second``: NVLink,
    one direction; 0 without it. ``memory_bytes``: nominal.
    """

    name: str
    flops_per_second: Figure
    weight_bytes_per_second: Figure
    kv_bytes_per_second: Figure
    memory_bytes: float
    host_bytes_per_second: float
    nvlink_bytes_per_second: float = 0.0
    price: ListPrice | None = None

    @property
    def counted_name(self) -> str:
        """The GPU's name, preceded by the number of GPUs if there are several."""
        return self.name if " x " in self.name else f"1 x {self.name}"

    def times(self, count: int) -> Gpu:
        """Return ``count`` of these GPUs as one ``Gpu`` with their summed rates and memory."""
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
    """A host of R-workers, one per NUMA node. Figures are of one R-worker; ``memory_bytes`` is an assumption.

    ``holds_gpu``: a single host that also has the GPU, so PCIe is the only link. ``shares_cores``: the S-worker runs on
    the same cores, since the host has no GPU.
    """

    name: str
    r_workers_per_host: int
    cores: int
    read_bytes_per_second: Figure
    memory_bytes: float
    holds_gpu: bool = False
    shares_cores: bool = False
    price: ListPrice | None = None


def parse_link(text: str) -> float:
    """Return a link's bytes per second in one direction. ``text``: "100Gb" (bits) or "12.5GB" (bytes) per second.

    Raise ConfigError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(b|B|bit|bps)(?:/s)?\s*", text)
    if not match:
        raise ConfigError(f"link must be a bandwidth such as 100Gb (bits) or 12.5GB (bytes) per second, not {text!r}")
    number = float(match.group(1)) * {"M": 1e6, "G": 1e9, "T": 1e12}[match.group(2)]
    rate = number if match.group(3) == "B" else number / 8
    if rate <= 0:
        raise ConfigError(f"link: {text!r} is no bandwidth at all; q, k, v and o have to cross the link")
    return rate


def kernel_bytes_per_second(kv_dtype: str, group: float, cores: int) -> float:
    """Return the KV bytes per second that attention on ``cores`` cores processes. ``group``: query heads per KV head.
    Between measured values of ``group``, logarithms of the rates are interpolated linearly. Beyond the largest one,
    time grows in proportion to ``group``.
    """
    # GB/s of KV that one thread read, by query heads per KV head, as measured in docs/performance.md (head size 128,
    # context 1024, Zen 3 with AVX2). These times include waiting for memory; the arithmetic alone can be faster.
    gb_per_second_per_core = {
        "float32": (14.8, 10.9, 7.8, 3.4),
        "float16": (16.8, 12.7, 7.9, 2.2),
        "bfloat16": (17.3, 13.9, 7.8, 2.1),
        "int8": (13.7, 8.7, 4.5, 1.1),
        "int4": (9.8, 4.0, 2.1, 0.5),
    }
    rates = gb_per_second_per_core[kv_dtype]
    inside = min(group, GROUP_SIZES[-1])
    rate = math.exp(np.interp(math.log(inside), np.log(GROUP_SIZES), np.log(rates)))
    return cores * rate * 1e9 * inside / group


def products_per_second(cores: int) -> float:
    """Return the float32 multiply-adds per second of the R-worker's kernels on ``cores`` cores.
    It is measured with the most query heads per KV head, where arithmetic, not memory, is the limit.
    """
    group = GROUP_SIZES[-1]
    return kernel_bytes_per_second("float32", group, cores) * group / ITEM_BYTES["float32"]
