"""The resources that R-workers ask of a Ray cluster's nodes, and whether they fit. This is pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.errors import CapacityError
from fastdecode.core.machine import KV_CACHE_SHARE

GIB = 1 << 30


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its address, and all resources that Ray counts there, free or not."""

    address: str
    num_cpus: int
    memory_bytes: int

    def describe(self) -> str:
        return f"{self.address} with {self.num_cpus} CPU(s) and {self.memory_bytes / GIB:.2f} GiB"


@dataclass(frozen=True)
class Ask:
    """A request for ``count`` R-workers of ``num_cpus`` and ``memory_bytes`` each. ``strict``: no two on one node."""

    count: int
    num_cpus: int
    memory_bytes: int
    strict: bool = False

    @property
    def bundle(self) -> dict[str, float]:
        """One R-worker's resources, as Ray names them."""
        return {"CPU": self.num_cpus, "memory": self.memory_bytes}

    @property
    def strategy(self) -> str:
        """Ray's name of the strategy for spreading the R-workers over nodes."""
        return "STRICT_SPREAD" if self.strict else "SPREAD"

    def room(self, node: Node) -> int:
        """Return how many of the requested R-workers ``node`` could hold."""
        most = min(node.num_cpus // self.num_cpus, node.memory_bytes // self.memory_bytes)
        return min(most, 1) if self.strict else most

    def describe(self) -> str:
        where = "each on a node of its own" if self.strict else "spread over nodes"
        return f"{self.count} R-worker(s) of {self.num_cpus} CPU(s) and {self.memory_bytes / GIB:.2f} GiB each, {where}"


def choose_ask(
    count: int, nodes: Sequence[Node], num_threads: int | None, kv_cache_bytes: int | None, strict: bool = False
) -> Ask:
    """Return the request for ``count`` R-workers. A number that is None becomes the largest equal share of ``nodes``.

    The share of memory is KV_CACHE_SHARE of what Ray counts on a node, divided by the most R-workers that it may get.
    """
    num_cpus = num_threads or _largest_share(count, nodes, strict)
    if kv_cache_bytes is None:
        rooms = {node: Ask(count, num_cpus, 1, strict).room(node) for node in nodes}
        shares = [node.memory_bytes * KV_CACHE_SHARE / min(room, count) for node, room in rooms.items() if room]
        kv_cache_bytes = max(int(min(shares, default=GIB)), 1)
    return Ask(count, num_cpus, kv_cache_bytes, strict)


def check_fits(ask: Ask, nodes: Sequence[Node]) -> None:
    """Raise CapacityError if not even an idle cluster has the resources.

    The message says what was asked for, what there is, and what is missing.
    """
    room = sum(ask.room(node) for node in nodes)
    if room >= ask.count:
        return
    missing = ask.count - room
    has = "; ".join(node.describe() for node in nodes) or "no node"
    if ask.strict:
        lacks = f"{missing} more node(s) of that size"
    else:
        lacks = f"{missing * ask.num_cpus} CPU(s) and {missing * ask.memory_bytes / GIB:.2f} GiB more on its nodes"
    raise CapacityError(
        f"r_workers: Ray cannot place {ask.describe()}. The cluster has {has}: room for {room}. Missing: {lacks}; "
        f"or ask for less with --r-threads and --kv-cache-memory"
    )


def _largest_share(count: int, nodes: Sequence[Node], strict: bool) -> int:
    """Return the CPUs of each of ``count`` equal R-workers, at least 1."""
    most = max((node.num_cpus for node in nodes), default=1)
    fits = (
        cpus
        for cpus in range(most, 1, -1)
        if sum(Ask(count, cpus, 1, strict).room(node) for node in nodes if node.memory_bytes) >= count
    )
    return next(fits, 1)
