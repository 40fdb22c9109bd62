"""The machine that ``--gpu``, ``--cpu`` and ``--link`` describe by a preset, by numbers, or as "here" (measured)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import CpuHost, Gpu, parse_link
from fastdecode.perfmodel.lab.cli.machine_flags import DEFAULT_LINK
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.machine_words import cpu_host_of, gpu_of
from fastdecode.perfmodel.sizing import Prices
from fastdecode.perfmodel.stages import NO_CONTENTION, SHARED, Contention

HERE_WORD = "here"
"""The value of ``--gpu`` and ``--cpu`` for this machine, which is then measured."""


@dataclass(frozen=True)
class NamedMachine:
    """A GPU and a host of R-workers. ``link_bytes_per_second``: the network's rate; None if the host has the GPU.

    ``contention``: how much S-worker and R-workers slow each other down on shared cores.
    """

    gpu: Gpu
    host: CpuHost
    link_bytes_per_second: float | None
    contention: Contention = NO_CONTENTION

    def hops(self, num_ranks: int) -> tuple[float, ...]:
        """Return the rates of the hops between a rank and its R-workers: PCIe, and its part of the network."""
        pcie = self.gpu.host_bytes_per_second
        return (pcie,) if self.link_bytes_per_second is None else (pcie, self.link_bytes_per_second / num_ranks)

    @property
    def trip_latency_seconds(self) -> float:
        """Seconds of a layer's round trip to R-workers, whatever its bytes, as measured with this engine."""
        if self.contention != NO_CONTENTION:
            return 0.0
        # Seconds of a layer's round trip with 64 KB: between processes of a host, and by MPI (docs/performance.md)
        host_trip_seconds, network_trip_seconds = 113e-6, 159e-6
        return host_trip_seconds if self.link_bytes_per_second is None else network_trip_seconds

    def waits(self, overlapped: bool) -> str:
        """Return a text line on what a layer waits for besides the work of S-worker and R-workers."""
        trip = f"{self.trip_latency_seconds * 1e6:.0f} us for a layer's way there and back (docs/performance.md)"
        hidden = "hidden behind work (--overlapped-transport)" if overlapped else "not hidden, as the paper measured"
        return f"{trip}; transfers are {hidden}; each layer waits for the slowest R-worker (arXiv 2601.21351)"

    def at_home(self, planner: Planner) -> Planner:
        """Return ``planner`` limited to the R-workers of the GPU's own host; unchanged if they are on other hosts."""
        if self.link_bytes_per_second is not None:
            return planner
        number = planner.num_r_workers or max(1, self.host.r_workers_per_host // planner.num_ranks)
        return replace(planner, num_r_workers=number, contention=self.contention)

    def links(self, gpu: Gpu) -> str:
        """Return a text line on the links between S-worker and R-workers."""
        pcie = f"PCIe {gpu.host_bytes_per_second / 1e9:.4g} GB/s"
        if self.contention != NO_CONTENTION:
            return "S-worker and R-workers share the same cores: what one does, the other cannot"
        if self.link_bytes_per_second is None:
            return f"{pcie} (nominal); R-workers run on the GPU's own host (--link pcie)"
        return f"link {self.link_bytes_per_second / 1e9:.4g} GB/s, {pcie} (nominal)"

    def list_prices(self, num_gpus: int) -> Prices:
        """Return the presets' list prices; None if unknown. A rented GPU includes its host."""
        gpu, host = self.gpu.price, self.host.price
        included = 0.0 if self.link_bytes_per_second is None else None  # the price of a rented GPU includes its host
        return Prices(gpu.per_hour if gpu else None, host.per_hour if host else included, num_gpus)

    def price_lines(self, args: argparse.Namespace) -> tuple[str, ...]:
        """Return text lines with prices from flags; without ``--gpu-price``, also list prices, with source and date."""
        given = ((self.gpu, args.gpu_price, "--gpu-price"), (self.host, args.cpu_price, "--cpu-price"))
        listed = args.gpu_price is None
        prices = (
            (each.name, f"{price:g} an hour ({flag})" if price is not None else each.price if listed else None)
            for each, price, flag in given
        )
        return tuple(f"{name}: {price}" for name, price in prices if price)


def named_machine(args: argparse.Namespace) -> NamedMachine:
    """Return the machine that the flags name. Raise ConfigError for unknown words."""
    gpu, is_gpu = _gpu(args.gpu, bool(args.quantization))
    check_on_cpu(args, is_gpu)
    host = host_of(args)
    if not is_gpu and not args.cpu == HERE_WORD:
        raise ConfigError("gpu: there is no GPU here, so the S-worker runs on this CPU: give --cpu here too, or a GPU")
    link = _link(args.link, host)
    return NamedMachine(gpu, host, link, NO_CONTENTION if is_gpu else SHARED)


def check_on_cpu(args: argparse.Namespace, is_gpu: bool) -> None:
    """Raise ConfigError for ``--quantization`` with a GPU, whose packed weights are set by ``--weights``."""
    if args.quantization and is_gpu:
        raise ConfigError(
            "quantization: int8 is multiplied on CPUs only: give --gpu here --cpu here on a machine without a GPU, "
            "or --profile; for packed weights on a GPU give --weights int8"
        )


def host_of(args: argparse.Namespace) -> CpuHost:
    """Return the host of ``--cpu`` with the requested R-workers; if it also has the GPUs, at least one per rank."""
    host, ranks = _cpu_host(args.cpu), args.tensor_parallel_size or 1
    at_home = _link(args.link, host) is None
    number = max(host.r_workers_per_host, ranks) if at_home else host.r_workers_per_host
    return _shared_host(host, per_host(args, number))


def one_gpu_or_cpu(words: str, multiplies_int8: bool) -> Gpu:
    """Return the GPU that ``words`` describe; for "here" on a machine without a GPU, its CPU."""
    return _gpu(words, multiplies_int8)[0]


def one_gpu(words: str) -> Gpu:
    """Return the GPU that ``words`` describe. Raise ConfigError for "here" on a machine without a GPU."""
    gpu, is_gpu = _gpu(words, False)
    if not is_gpu:
        raise ConfigError("gpu: there is no GPU here; name one, or give numbers")
    return gpu


def _link(words: str | None, host: CpuHost) -> float | None:
    if words is None:
        return None if host.holds_gpu else parse_link(DEFAULT_LINK)
    # The value of ``--link`` for R-workers on the GPU's own host
    pcie_link = "pcie"
    return None if words.strip().lower() == pcie_link else parse_link(words)


@cache
def _gpu(words: str, multiplies_int8: bool) -> tuple[Gpu, bool]:
    if words.strip().lower() != HERE_WORD:
        return gpu_of(words), True
    from fastdecode.perfmodel.lab.measure.here import gpu_here

    return gpu_here(multiplies_int8)


@cache
def _cpu_host(words: str) -> CpuHost:
    if words.strip().lower() != HERE_WORD:
        return cpu_host_of(words)
    from fastdecode.perfmodel.lab.measure.here import cpu_here

    return cpu_here()


def per_host(args: argparse.Namespace, unless_given: int) -> int:
    """Return the requested number of R-workers per host, or ``unless_given``."""
    return unless_given if args.r_workers_per_host is None else args.r_workers_per_host


def _shared_host(host: CpuHost, number: int) -> CpuHost:
    """Return a host with ``number`` R-workers. More than one per NUMA node share its resources."""
    part = min(1.0, host.r_workers_per_host / number) if number > 0 else 1.0
    read = replace(host.read_bytes_per_second, nominal=part * host.read_bytes_per_second.nominal)
    return replace(
        host, r_workers_per_host=number, cores=max(1, int(part * host.cores)), read_bytes_per_second=read,
        memory_bytes=part * host.memory_bytes,
    )  # fmt: skip
