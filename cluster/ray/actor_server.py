"""An R-worker in a Ray actor's process: a thread that listens, joins the job's pool, and serves its S-worker."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fastdecode.cluster.links.zeromq import ZmqListener
from fastdecode.cluster.r_worker.host import Host, take_host
from fastdecode.cluster.r_worker.joiner import Joiner, local_address
from fastdecode.cluster.r_worker.server import Server
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.machine import has_cpu_quota, numa_nodes

WATCH_SECONDS = 1.0
"""Seconds between two checks whether this node's raylet lives, and whether Ray drains the node."""

LEFT = 3
"""Exit status of an R-worker that has left a draining node; Ray restarts it elsewhere."""

log = logging.getLogger("fastdecode.r_worker")


@dataclass(frozen=True)
class Order:
    """An actor's task: the pool's "host:port", its key, and the R-worker's threads and memory."""

    pool: str
    security: Security
    num_threads: int
    kv_cache_bytes: int


class ActorServer:
    """Runs an R-worker's ordinary loop in a thread. The process ends with that thread.

    ``is_draining`` tells whether Ray drains this node. The S-worker then moves its sequences away, and the process
    ends.
    """

    def __init__(self, order: Order, is_draining: Callable[[], bool], is_restarted: bool) -> None:
        self._order, self._is_draining, self._is_restarted = order, is_draining, is_restarted
        self._started: Future[str] = Future()
        self._server: Server | None = None
        self._raylet = os.getppid()

    def start(self) -> str:
        """Return the R-worker's address and size once it listens. Raise FastDecodeError if this node cannot run it."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        threading.Thread(target=self._run, name="R-worker", daemon=True).start()
        return self._started.result()

    def _run(self) -> None:
        try:
            server, address = self._listen()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._server = server
        self._started.set_result(address)
        status = 1
        try:
            server.run()
            status = LEFT
        except BaseException:
            log.exception("the R-worker ends")
        os._exit(status)  # end the whole process, so that Ray starts another

    def _listen(self) -> tuple[Server, str]:
        while self._is_draining():
            # Ray has restarted the R-worker on the node that it just left; that node ends soon
            time.sleep(WATCH_SECONDS)
        _reset_niceness()
        order = self._order
        self._slot, cores = take_cores(order.num_threads)
        mine = local_address(order.pool)
        listener = ZmqListener(mine, 0, order.security.curve_secret)
        try:
            machine = self._take_host(cores)
        except BaseException:
            listener.close()
            raise
        address = f"{mine}:{listener.address.rpartition(':')[2]}"
        joiner = Joiner(order.pool, address, order.security.secret)
        log.info("R-worker at %s, %s", address, machine.describe())
        return Server(listener, machine, joiner, order.security, mine), f"{address}, {machine.describe()}"

    def _take_host(self, cores: list[int] | None) -> Host:
        # Seconds between two attempts of a restarted R-worker to take its memory, which its predecessor may still hold
        retry_seconds = 1.0
        while True:
            try:
                return take_host(cores, self._order.num_threads, self._order.kv_cache_bytes)
            except FastDecodeError as error:
                if not self._is_restarted:
                    raise
                log.warning("%s; trying again", error)
                time.sleep(retry_seconds)

    def _watch(self) -> None:
        """End when the raylet ends, since Ray then restarts its actors elsewhere; leave a node that Ray drains."""
        is_leaving = False
        while os.getppid() == self._raylet:
            time.sleep(WATCH_SECONDS)
            if self._server and not is_leaving and self._is_draining():
                log.warning("Ray drains this node: the R-worker leaves")
                is_leaving = True
                if not self._server.leave():
                    os._exit(LEFT)
        os._exit(1)  # Ray itself may let an actor's process continue


def take_cores(num_threads: int) -> tuple[socket.socket | None, list[int] | None]:
    """Return cores of one NUMA node that no other R-worker of Ray on this host has, as long as there are any.

    The socket's name reserves the cores, and is free again when this process ends in any way. Return None for both with
    a CPU quota, which limits time and not cores.
    """
    if has_cpu_quota():
        return None, None
    most_slots = 4096
    for slot in range(most_slots):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A socket name that begins with \0 is in Linux's abstract namespace, so no file remains
            claim.bind(f"\0fastdecode-ray-r-worker-{slot}")
        except OSError:
            claim.close()
            continue
        return claim, choose_cores(slot, num_threads, numa_nodes())
    return None, None


def choose_cores(slot: int, num_threads: int, nodes: Sequence[Sequence[int]]) -> list[int]:
    """Return the cores of R-worker number ``slot`` of a host whose NUMA nodes have the cores ``nodes``.

    R-workers take the NUMA nodes in turn, and within a node the next ``num_threads`` cores. For two nodes [0..3] and
    [4..7] and 2 threads, slots 0 to 3 get [0, 1], [4, 5], [2, 3], [6, 7]. An R-worker with more threads than a node has
    cores gets all cores.
    """
    cores = nodes[slot % len(nodes)]
    if num_threads > len(cores):
        return sorted(core for each in nodes for core in each)
    first = slot // len(nodes) * num_threads
    return sorted({cores[(first + index) % len(cores)] for index in range(num_threads)})


def _reset_niceness() -> None:
    """Undo Ray's niceness of 15 for this thread and those that it starts, if the system allows it.

    An R-worker may be the job's bottleneck as much as its S-worker.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
