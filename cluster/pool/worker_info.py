"""Describes R-workers to the S-worker, from their WELCOME: cores, ports, clock offset and instruction sets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fastdecode.api.settings import is_loopback
from fastdecode.cluster.wire.messages import Welcome
from fastdecode.core.machine import allowed_cores, host_id, own_address
from fastdecode.core.types import KvAddress, RWorkerInfo, best_common_isa
from fastdecode.kinds.layout import KVLayout

logger = logging.getLogger(__name__)

NUM_PINGS = 8


def worker_info(name: str, layout: KVLayout, block_size: int, welcome: Welcome) -> RWorkerInfo:
    """Return the description of R-worker ``name``, which has opened a cache for ``layout``."""
    return RWorkerInfo(
        name=name,
        num_blocks=welcome.num_blocks,
        block_size=block_size,
        num_threads=welcome.num_threads,
        isa=welcome.isa,
        own_cores=_has_own_cores(welcome),
        read_gb_per_s=welcome.read_gb_per_s,
        kv_ports=_kv_ports(name, layout.kv_port, welcome),
        host=welcome.host_id,
        state_blocks=welcome.state_blocks,
        park_after=welcome.park_after,
    )


def _has_own_cores(welcome: Welcome) -> bool:
    """Return whether the R-worker shares no core with the S-worker: it is on another machine, or on other cores."""
    return welcome.host_id != host_id() or not set(welcome.cores) & allowed_cores()


def _kv_ports(name: str, kv_port: str, welcome: Welcome) -> tuple[KvAddress, ...]:
    """Return the R-worker's KV port, at most one. If the address lacks a host, the host is that in ``name``."""
    address = welcome.kv_address
    if address.startswith(":"):
        host = name.rpartition(":")[0]
        address = f"{host if kv_port == 'loopback' or not is_loopback(host) else own_address()}{address}"
    return (KvAddress(address, welcome.kv_epoch),) if address else ()


def clock_offset(ping: Callable[[], float]) -> float:
    """Return the R-worker's clock minus this process's in seconds, from the quickest of NUM_PINGS calls of ``ping``.

    Return 0 if the difference is so small that both may be the same clock.
    """
    rounds = []
    for _ in range(NUM_PINGS):
        asked = time.perf_counter()
        theirs = ping()
        answered = time.perf_counter()
        rounds.append((answered - asked, theirs - (asked + answered) / 2))
    round_seconds, offset = min(rounds)
    return 0.0 if abs(offset) <= round_seconds / 2 else offset


class Arithmetic:
    """The instruction sets that the R-workers of a pool use; each rounds differently.

    ``of_merges``: the instruction set for merging the R-workers' partial results, "scalar" or "auto".
    """

    def __init__(self) -> None:
        self.of_merges = "auto"
        self._isas: dict[str, str] = {}

    def add(self, infos: Sequence[RWorkerInfo]) -> None:
        """Note the instruction sets of more R-workers; warn if they round differently from the earlier R-workers."""
        before = len(self._isas)
        for info in infos:
            self._isas.setdefault(info.isa, info.name)
        self.of_merges = "scalar" if set(self._isas) == {"scalar"} else "auto"
        if len(self._isas) > max(before, 1):
            logger.warning(
                "R-workers attend in different arithmetic (%s): a sequence that moves may get other tokens; "
                "--uniform-arithmetic %s makes all use one",
                ", ".join(f"{isa} on {name}" for isa, name in self._isas.items()),
                best_common_isa(self._isas),
            )
