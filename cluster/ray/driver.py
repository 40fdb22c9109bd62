"""The process that speaks with Ray for an engine. Only this file imports ray.

The engine (``ray_backend.py``) starts this process, and exchanges JSON objects with it over its stdin and stdout, one a
line. When the engine ends in any way, this process ends the actors and itself::

    engine                                             driver
    {count, num_threads, kv_cache_bytes, strict}  →
                                                  ←    {placed, host, is_alone, ask}, or {refused, message}
    {pool, secret, encrypts}                      →
                                                  ←    {started} or {refused, message} for each actor
    (closes stdin)                                →    ends the actors, and a cluster that it has started

It is a separate process, since Ray prints to stdout, takes SIGTERM, and aborts the process when its cluster has gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any, TextIO

import ray
from ray._private import state as ray_state
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fastdecode.cluster.ray.actor_server import ActorServer, Order
from fastdecode.cluster.ray.resources import Ask, Node, check_fits, choose_ask
from fastdecode.cluster.wire.handshake import Security
from fastdecode.core.errors import BackendError, CapacityError, ConfigError, FastDecodeError
from fastdecode.core.machine import usable_cores


class RWorkerActor:
    """An R-worker as a Ray actor. Ray calls it once, and carries none of its data."""

    def __init__(self, pool: str, security: Security, num_threads: int, kv_cache_bytes: int) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        again = ray.get_runtime_context().was_current_actor_reconstructed
        server = ActorServer(Order(pool, security, num_threads, kv_cache_bytes), _is_draining, again)
        try:
            self._outcome = {"started": server.start()}
        except FastDecodeError as error:
            self._outcome = _refusal(error)

    def outcome(self) -> dict[str, str]:
        """Return the actor's address and resources, or the reason why it has none."""
        return self._outcome


class ActorGroup:
    """The actors of one engine, in their own placement group."""

    def __init__(self, count: int, num_threads: int | None, kv_cache_bytes: int | None, strict: bool) -> None:
        nodes = _nodes()
        self.ask = choose_ask(count, nodes, num_threads, kv_cache_bytes, strict)
        wait_seconds = os.environ.get("FASTDECODE_RAY_SECONDS")
        if wait_seconds is None:
            check_fits(self.ask, nodes)  # the variable is for clusters whose autoscaler may add nodes meanwhile
        self._actors: list[Any] = []
        self._group: PlacementGroup = placement_group([self.ask.bundle] * count, strategy=self.ask.strategy)
        if not self._group.wait(_seconds(wait_seconds)):
            self.end()
            raise CapacityError(_busy(self.ask, _seconds(wait_seconds)))

    def start(self, pool: str, security: Security) -> list[Any]:
        """Start one actor in each bundle; return Ray's references to their ``outcome``."""
        kind: Any = ray.remote(RWorkerActor)
        for bundle in range(self.ask.count):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            actor = kind.options(
                num_cpus=self.ask.num_cpus,
                memory=self.ask.memory_bytes,
                max_restarts=-1,
                scheduling_strategy=place,
            ).remote(pool, security, self.ask.num_cpus, self.ask.memory_bytes)
            self._actors.append(actor)
        return [actor.outcome.remote() for actor in self._actors]

    def outcome(self, index: int, answer: Any) -> dict[str, str] | None:
        """Return the outcome of actor ``index``; None if Ray is just restarting it."""
        try:
            return ray.get(answer)
        except ActorUnavailableError:
            return None
        except RayError as error:
            last = str(error).strip().splitlines()[-1].strip()
            return _refusal(BackendError(f"r_workers: Ray cannot start R-worker {index} of {self.ask.count}: {last}"))

    def ask_again(self, index: int) -> Any:
        return self._actors[index].outcome.remote()

    def end(self) -> None:
        """Kill the actors and remove their placement group."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


def connect(stack: contextlib.ExitStack) -> bool:
    """Connect to the cluster at RAY_ADDRESS, or to one on this machine, or start one; return True if it was started.

    When ``stack`` closes, this process disconnects, and a cluster that it started ends.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS: the engine must run on a node of the cluster, not outside it ({address}): start it with "
            f"ray job submit"
        )
    if address not in ("", "auto", "local"):
        _probe(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "fastdecode"}
    if address != "local":
        try:
            ray.init(address="auto", **quiet)
            stack.callback(ray.shutdown)
            return False
        except (ConnectionError, ValueError) as error:
            if address:
                raise BackendError(f"RAY_ADDRESS: {address} cannot be joined: {error}") from None
    folder = tempfile.mkdtemp(prefix="fd-ray-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    stack.callback(ray.shutdown)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Object store of a cluster started here: near Ray's minimum, since no payload uses it
    object_store_bytes = 80 << 20
    ray.init(
        address="local",
        num_cpus=len(usable_cores()),
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        **quiet,
    )
    return True


def main() -> None:
    """Serve the engine at stdin and stdout until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Ray prints to stdout
    os.chdir("/")  # Ray adds the current folder to its workers' path, which may be a checkout without a build
    with contextlib.ExitStack() as stack:
        try:
            _serve(stack, sys.stdin, out)
        except FastDecodeError as error:
            _say(out, _refusal(error))
        except RayError as error:
            _say(out, _refusal(BackendError(f"Ray: {str(error).strip().splitlines()[-1]}")))


def _serve(stack: contextlib.ExitStack, orders: TextIO, out: TextIO) -> None:
    wanted = json.loads(orders.readline())
    started = connect(stack)
    job = ActorGroup(**wanted)
    stack.callback(job.end)
    where = "that was started on this machine" if started else f"of {len(_nodes())} node(s)"
    placed = {"placed": f"{job.ask.describe()}, in a cluster {where}", "is_alone": started}
    _say(out, placed | {"host": "127.0.0.1" if started else _own_address()})
    line = orders.readline()
    if not line:
        return
    order = json.loads(line)
    answers = job.start(order["pool"], Security(order["secret"].encode(), order["encrypts"]))
    pending = {answer: index for index, answer in enumerate(answers)}
    poll_seconds = 0.2
    while pending and not select.select([orders], [], [], 0)[0]:
        for answer in ray.wait(list(pending), timeout=poll_seconds)[0]:
            index = pending.pop(answer)
            outcome = job.outcome(index, answer)
            if outcome is None:
                pending[job.ask_again(index)] = index
            else:
                _say(out, outcome)
    orders.read()


def _nodes() -> list[Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    has = [(node["NodeManagerAddress"], node["Resources"]) for node in alive]
    return [Node(address, int(each.get("CPU", 0)), int(each.get("memory", 0))) for address, each in has]


def _own_address() -> str:
    mine = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)


def _is_draining() -> bool:
    """Return whether Ray drains this actor's node: its end was announced, or an operator drains it."""
    return ray.get_runtime_context().get_node_id() in ray_state.state.get_draining_nodes()


def _busy(ask: Ask, seconds: float) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    cpus = f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPU(s)"
    memory = f"{free.get('memory', 0) / 2**30:.2f} of {total.get('memory', 0) / 2**30:.2f} GiB"
    wanted = f"{ask.count * ask.num_cpus} CPU(s) and {ask.count * ask.memory_bytes / 2**30:.2f} GiB"
    return (
        f"r_workers: Ray did not place {ask.describe()} within {seconds:g} s: that takes {wanted} in all, and the "
        f"cluster has {cpus} and {memory} free. Wait for other jobs, or ask for less with --r-threads and "
        f"--kv-cache-memory; FASTDECODE_RAY_SECONDS is the time to wait, for nodes that an autoscaler adds too"
    )


def _seconds(given: str | None) -> float:
    try:
        return float(given or 60.0)
    except ValueError:
        raise ConfigError(f"FASTDECODE_RAY_SECONDS must be a number of seconds, not {given!r}") from None


def _probe(address: str) -> None:
    """Raise BackendError if nothing listens at ``address``; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    # Most seconds to connect to the cluster's head over TCP
    probe_seconds = 5.0
    try:
        socket.create_connection((host.strip("[]"), int(port)), probe_seconds).close()
    except (OSError, ValueError) as error:
        raise BackendError(f"RAY_ADDRESS: no Ray cluster answers at {address}: {error}") from None


def _refusal(error: FastDecodeError) -> dict[str, str]:
    # Names of errors in messages to the engine, with their classes
    errors = {"config": ConfigError, "capacity": CapacityError, "backend": BackendError}
    kind = next((name for name, each in errors.items() if isinstance(error, each)), "backend")
    return {"refused": kind, "message": str(error)}


def _say(out: TextIO, what: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the engine has ended; ``main`` sees that at its stdin
        print(json.dumps(what), file=out, flush=True)
