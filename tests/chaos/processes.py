"""The processes of a round: some may be killed, some join, and none may remain at the end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil
from helpers import r_workers
from helpers.processes import alive

from chaos.parking import disk_flags
from fastdecode.engine.engine import LLMEngine

END_SECONDS = 60.0
PR_SET_CHILD_SUBREAPER = 36


class Processes:
    """The R-workers' processes by the engine's names for them, one process per rank each."""

    def __init__(self, cleanup: contextlib.ExitStack, told_to_end: Path) -> None:
        """``cleanup`` ends the started processes. ``told_to_end``: a file to write before an MPI job is ended."""
        self._cleanup, self.told_to_end = cleanup, told_to_end
        self._by_name: dict[str, list[int]] = {}
        self._flags: tuple[str, ...] = ()

    def listen(self, count: int, *flags: str, place: Path | None = None) -> str:
        """Start ``count`` R-workers; return their addresses in the form of ``--r-workers``."""
        addresses = []
        for number in range(count):
            process, address = self._cleanup.enter_context(r_workers.listening(*flags, *disk_flags(place, number)))
            self._by_name[address] = [process.pid]
            addresses.append(address)
        return ",".join(addresses)

    def find(self, engine: LLMEngine, *flags: str) -> None:
        """Find the R-workers that ``engine`` has started for all ranks. Later joining ones get ``flags``."""
        self._flags = flags
        by_parent: dict[int, list[int]] = {}
        for each in sorted(psutil.Process().children(recursive=True), key=lambda each: each.create_time()):
            with contextlib.suppress(psutil.Error):
                if "--control-fd" in each.cmdline():
                    by_parent.setdefault(each.ppid(), []).append(each.pid)
        groups = [by_parent.pop(os.getpid(), []), *by_parent.values()]
        for index, pids in enumerate(zip(*groups, strict=False)):
            self._by_name[engine.r_workers[index].name] = list(pids)

    def pids(self, name: str) -> list[int]:
        """Return the process ids of R-worker ``name``, one per rank; empty if it has no process of its own."""
        if name not in self._by_name and ":" in name:
            self._by_name |= {f"{name.rpartition(':')[0]}:{port}": [pid] for port, pid in _actors()}
        return self._by_name.get(name, [])

    def join(self, engine: LLMEngine) -> None:
        """Start an R-worker per rank that joins ``engine``."""
        host, _, port = (engine.config.pool_listen or "").rpartition(":")
        started = [
            self._cleanup.enter_context(r_workers.joining(f"{host}:{int(port) + rank}", *self._flags))
            for rank in range(engine.config.tensor_parallel_size)
        ]
        self._by_name[started[0][1]] = [process.pid for process, _ in started]

    def prefill_workers(self) -> list[int]:
        """Return the living prefill workers that the engine started, oldest first."""
        found = []
        for each in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "prefill-worker" in each.cmdline() and alive(each.pid):
                    found.append(each.pid)
        return sorted(found)

    def mpi_ranks(self) -> list[int]:
        """Return the R-workers of this process's MPI job, oldest first."""
        found = []
        for each in psutil.Process(os.getppid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "r-worker" in each.cmdline() and alive(each.pid):
                    found.append(each.pid)
        return sorted(found)


def _actors() -> Iterable[tuple[int, int]]:
    """Yield each listening port of R-workers on Ray, with the process id."""
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::RWorkerActor" in " ".join(each.cmdline()):
                for socket in each.net_connections("tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        yield socket.laddr.port, each.pid


class Leftovers:
    """Checks what a round leaves behind: processes, shared memory, file descriptors and files.

    This process adopts all orphaned processes until its own end.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: the temporary folder of processes that are started from now on."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._folder = folder
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder)
        self._segments: set[str] = set()
        self._memory = Counter[str]()

    def begin(self) -> None:
        """Ignore everything that exists now."""
        self._before = {each.pid for each in psutil.Process().children(recursive=True)}
        self._files = set(self._folder.iterdir())
        self._memory = _memfds()

    def look(self) -> None:
        """Remember the shared memory of this process and of those that it started."""
        for pid in [os.getpid(), *(each.pid for each in self._children())]:
            with contextlib.suppress(OSError):
                self._segments |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))

    def faults(self) -> list[str]:
        """Return a line for each thing that still exists END_SECONDS after the round's end."""
        deadline = time.monotonic() + END_SECONDS
        while self._children() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = []
        for process in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"process {process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
        found += [f"shared memory {path}" for path in sorted(self._segments) if Path(path).exists()]
        gc.collect()
        found += [f"{count} of memory {name}" for name, count in (_memfds() - self._memory).items()]
        found += [f"file {path}" for path in set(self._folder.iterdir()) - self._files]
        return [f"left: {each}" for each in found]

    def _children(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [each for each in children if each.pid not in self._before and alive(each.pid)]


def _memfds() -> Counter[str]:
    """Return the memory files (memfd) that this process has open or mapped, counted by name."""
    found = Counter[str]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(path.readlink())] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        found[" ".join(line.split(maxsplit=5)[5:])] += 1
    return Counter({name: count for name, count in found.items() if name.startswith("/memfd:")})
