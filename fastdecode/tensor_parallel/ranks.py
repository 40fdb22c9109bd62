"""Starts or finds the ranks of a job, and runs every rank except rank 0."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import ClassVar

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import BackendError, FastDecodeError, RankLostError
from fastdecode.core.machine import usable_cores
from fastdecode.core.metrics import StateClock
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import RWorkerInfo
from fastdecode.engine.compose.backends import make_backend, parks_of, pool_layout
from fastdecode.engine.compose.own_caches import make_prompt_backend
from fastdecode.engine.compose.setup import pin_s_worker
from fastdecode.journal.records import Run
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker import PromptCache, SModel, SWorker, set_threads
from fastdecode.sworker.model.sharding import Rank, Rendezvous, leave
from fastdecode.sworker.run.random_prompts import RandomPrompts
from fastdecode.tensor_parallel.lifeline import Lifelines, hold_on
from fastdecode.tensor_parallel.member import Group, Member
from fastdecode.tensor_parallel.rank_backend import TensorParallelBackend
from fastdecode.tensor_parallel.rank_messages import Message, read_rows, read_step
from fastdecode.tensor_parallel.rank_parking import MemberParks, carry_out
from fastdecode.tensor_parallel.rank_place import RankPlace, cores_of, find_place, settings_of

MEETING_SECONDS = 300.0
END_SECONDS = 5.0
"""Most seconds that a started rank's process may take to end before it is killed."""

logger = logging.getLogger(__name__)


class Ranks:
    """Rank 0's view of the job: it starts or connects to the other ranks, and opens one backend over all R-workers.

    ``config``: rank 0's settings. ``on_one_machine``: True if all ranks run on the same machine.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        place = find_place(size)
        self._processes: list[subprocess.Popen[bytes]] = []
        host = place.host if place else "127.0.0.1"
        if place is None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._meeting = Rendezvous(0, size, host, place.port if place else 0, place is None or place.has_store)
        self._lifelines = Lifelines(host if place else "127.0.0.1")
        try:
            if place is None:
                self._start(config, size)
            self._meeting.tell("lifeline", str(self._lifelines.port))
            self._wait_for([f"rank {index}" for index in range(1, size)])
            self._lifelines.accept(size - 1, MEETING_SECONDS)
            self.rank = self._meeting.join(config.device, place.local_index if place else 0)
        except BaseException:
            self.close()
            raise
        self.on_one_machine = place is None or place.local_size == size
        own = config if place else cores_of(config, 0, size)
        self.config = settings_of(own, 0, size, place.local_size if place else size)

    def backend(self, pool: AttentionBackend) -> TensorParallelBackend:
        """Return one backend over the R-workers of all ranks; ``pool``: those of rank 0."""
        member = Member(self.rank, pool, self.config.stands_by)  # type: ignore[arg-type]
        return TensorParallelBackend(member, self._lifelines)

    def tell(self, run: Run) -> None:
        """Tell the other ranks which ``run`` of the journal this is; their R-workers keep sequences under its name.

        Raise RankLostError if a rank is lost.
        """
        try:
            self.rank.broadcast(Message("run", asdict(run)).encode())
        except RuntimeError as error:  # torch.distributed raises this if a rank is lost
            raise RankLostError(self._lifelines.describe(error)) from error

    def close(self) -> None:
        """End the rank processes that this process started; may be called twice."""
        self._lifelines.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                continue
            process.kill()
            process.wait()
        leave(getattr(self, "rank", None))

    def _start(self, config: EngineConfig, size: int) -> None:
        for index in range(1, size):
            settings = json.dumps(asdict(cores_of(config, index, size)))
            place: dict[str, object] = {
                "RANK": index,
                "WORLD_SIZE": size,
                "LOCAL_RANK": index,
                "LOCAL_WORLD_SIZE": size,
            }
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._meeting.port}
            environment = os.environ | {name: str(value) for name, value in place.items()} | {"PYTHONSAFEPATH": "1"}
            command = [sys.executable, "-m", "fastdecode.tensor_parallel.process", settings, str(os.getpid())]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def _wait_for(self, names: list[str]) -> None:
        deadline = time.monotonic() + MEETING_SECONDS
        while not self._meeting.knows(names):
            for index, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankLostError(
                        f"rank {index} of tensor parallelism ended while it started, with status {process.returncode}"
                    )
            if time.monotonic() > deadline:
                raise RankLostError(f"not all tensor-parallel ranks connected within {MEETING_SECONDS:.0f} s")
            time.sleep(0.01)


def follow(config: EngineConfig) -> None:
    """In a process that a launcher started as a rank other than 0, serve rank 0 until it ends, then exit.

    Elsewhere do nothing. Call this before anything else.
    """
    place = find_place(config.tensor_parallel_size)
    if place is not None and place.index:
        serve(config, place)


def serve(config: EngineConfig, place: RankPlace) -> None:
    """Run this process as the rank at ``place`` until rank 0 ends; then raise SystemExit."""
    ending = contextlib.ExitStack()
    try:
        meeting = Rendezvous(place.index, place.size, place.host, place.port, False)
        meeting.tell(f"rank {place.index}", place.name)
        ending.callback(hold_on(place.host, int(meeting.ask("lifeline")), place.name))
        rank = meeting.join(config.device, place.local_index)
        own = settings_of(config, place.index, place.size, place.local_size)
        Follower(own, rank, place.local_size == place.size).run()
    except FastDecodeError as error:
        print(f"fastdecode: {place.name}: error: {error}", file=sys.stderr, flush=True)
        ending.close()
        leave()
        raise SystemExit(1) from None
    except RuntimeError as error:  # torch.distributed raises this if a rank is lost
        print(f"fastdecode: {place.name} ends: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(1)
    ending.close()
    leave()
    raise SystemExit(0)


COMPARED = ("admit", "chains", "end", "export", "import", "park", "reserve", "wake", "weigh")
"""Kinds of messages after whose action all ranks compare results (``Member``)."""


class Follower:
    """A rank other than rank 0: its part of the model, its R-workers, and its answers to rank 0's messages."""

    def __init__(self, config: EngineConfig, rank: Rank, on_one_machine: bool) -> None:
        """``on_one_machine``: True if all ranks run on the same machine."""
        self._rank, self._cleanup = rank, contextlib.ExitStack()
        set_threads(pin_s_worker(config))
        model = SModel(config, rank)
        layout = pool_layout(config, model.layout, on_one_machine)
        self._member, r_workers = self._join(config, model.identity_of_part, layout)
        pool = self._member.pool
        self._cleanup.push(lambda kind, error, trace: pool.break_off() if error else pool.close())
        message = Message.decode(rank.broadcast())
        if message.kind == "close":
            raise RankLostError("rank 0 ended before it was ready")
        num_tokens = message.told["num_tokens"]
        prompts = None
        if num_tokens and not model.on_gpu:
            backend = make_prompt_backend(config, layout, num_tokens, r_workers)
            self._cleanup.callback(backend.close)
            prompts = PromptCache(backend)
        self._pool, own = pool, parks_of(pool)
        self._parks = MemberParks(self._member, own) if own else None
        self._s_worker = SWorker(model.code, model.layout, pool, StateClock(), prompts=prompts, in_order=True)
        self._computes = {
            "model": self._s_worker,
            "random": RandomPrompts(model.code, model.layout, pool, StateClock()),
        }
        if config.speculative and config.speculative.method == "early_exit":
            first = model.first_layers(config.speculative.num_layers)
            self._computes["first layers"] = self._s_worker.beside(first, model.layout, pool)

    def _join(self, config: EngineConfig, part: str, layout: KVLayout) -> tuple[Member, list[RWorkerInfo]]:
        """Open this rank's R-workers for the run that rank 0 names; return (this rank's member, logical R-workers).

        A standby job's rank 0 tries again and again to take over the R-workers' session. Each time, this rank tries as
        well.
        """
        while (message := Message.decode(self._rank.broadcast())).kind == "run":
            cores = config.r_core_list or usable_cores()
            pool: Group = make_backend(config, cores, model=part, run=Run(**message.told))  # type: ignore[assignment]
            member = Member(self._rank, pool, config.stands_by)
            try:
                return member, member.open(layout)
            except BaseException as error:
                pool.break_off()
                if not (config.stands_by and isinstance(error, BackendError)):
                    raise
        raise RankLostError("rank 0 ended before it was ready")

    def run(self) -> None:
        """Carry out rank 0's messages until the connection to rank 0 ends."""
        with self._cleanup:
            while (message := Message.decode(self._rank.broadcast())).kind != "close":
                try:
                    self._do[message.kind](self, message)
                except FastDecodeError:
                    # all ranks exchange errors of these messages, and rank 0 decides what follows
                    if message.kind not in COMPARED:
                        raise

    def _step(self, message: Message) -> None:
        step = read_step(message)
        self._pool.begin_step(step.to_step_plan())
        if message.told["computes"]:
            self._computes[message.told["by"]].follow(step, message.told["overlap"])

    def _park(self, message: Message) -> None:
        if self._parks is None:
            raise BackendError("this rank's R-workers park nothing: give every R-worker a folder to park in, or none")
        carry_out(self._parks, message.kind, message.told)

    _do: ClassVar[dict[str, Callable[[Follower, Message], object]]] = {
        "step": _step,
        "abandon": lambda self, message: self._pool.abandon_step(),
        "dismiss": lambda self, message: self._member.dismiss(message.told["worker"]),
        "forget": lambda self, message: self._s_worker.forget(message.told["sequence_id"]),
        "admit": lambda self, message: self._member.admit(message.told["vacant"]),
        "end": lambda self, message: self._member.end_step(),
        "export": lambda self, message: self._member.export(**message.told),
        "import": lambda self, message: self._member.import_(**message.told),
        "weigh": lambda self, message: self._member.weigh(read_rows(message), self._s_worker.taps),
        "reserve": lambda self, message: self._member.reserve(read_step(message).to_step_plan()),
        **dict.fromkeys(("chains", "park", "wake"), _park),
    }
