"""Starts processes of ``fastdecode`` quickly, as forks of a process that has imported everything.

conftest.py replaces ``subprocess.Popen`` by ``ForkedPopen`` for the tests. A process started in this way is an ordinary
child of the test process. It has the given words, environment, files and session, and its own process id; the same
signals end it. Only the imports, most of a start's time, are not repeated. Tests of the rest of a start (imports,
variables that libraries read when loaded) use `true_starts`.

Processes of ``pytest -n`` are such forks too, each with its own server.

A process that mpirun starts is not the tests' child: it is a ``relayed`` command (relay.py), which stands for its fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
RANK_JOB = str(Path(__file__).with_name("rank_job.py"))
RELAY = str(Path(__file__).with_name("relay.py"))
R_SIDE = tuple(f"fastdecode.{name}" for name in ("cli.r_worker", "cluster.r_worker.joiner", "cluster.r_worker.health",
               "cluster.links.shared_memory", "cluster.links.tcp", "cluster.r_worker.server"))  # fmt: skip
S_SIDE = tuple(f"fastdecode.{name}" for name in ("engine.compose.build", "cli.serve", "cli.prefill_worker",
               "cli.run_batch", "cli.main", "cluster.links.shared_memory", "cluster.links.tcp", "cluster.pool.backend",
               "cluster.pool.inproc", "drafting.drafters", "engine.compose.timed_steps", "engine.engine",
               "journal.kept_journal", "server.run", "sworker.products.products", "tensor_parallel.ranks"))  # fmt: skip
S_SIDE += ("llguidance", "transformers.models.llama.modeling_llama")
XDIST_WORKER = [sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""The command by which pytest-xdist starts a process that runs tests."""
SERVER_VARIABLE = "FASTDECODE_TEST_FORK_SERVER"
"""Variable with a fork's own server: the fork's process id, the server's id, and the socket's number."""
READ_EARLY = ("GOMP_", "HF_", "KMP_", "LD_", "LRU_", "MALLOC_", "OMP_", "ONEDNN_", "OMPI_", "PMIX_", "PYTHON", "TORCH_")
"""Prefixes of variables that are read before a program's first line, or by its imports."""

_PR_SET_CHILD_SUBREAPER = 36
_STATE: dict[str, Any] = {"is_on": True, "servers": {}}
_LOCK = threading.Lock()


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A ``subprocess.Popen`` that lets a server fork processes of ``fastdecode``, and starts all others itself."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell = rest[:7]
        module = None if executable or preexec_fn or shell or not close_fds else module_of(args)
        if module is None or not _STATE["is_on"] or _is_read_early(env):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[7:13]
        files = [mine if theirs == -1 else theirs for mine, theirs in enumerate((p2cread, c2pwrite, errwrite))]
        asked = {
            "module": module[0], "words": [module[0], *module[1]], "shown": list(map(str, args)),
            "env": dict(os.environ if env is None else env), "cwd": os.fspath(cwd or Path.cwd()),
            "pass_fds": list(pass_fds), "new_session": bool(rest[18]),
            "cores": sorted(os.sched_getaffinity(0)), "is_to_fork": module[0] == "-c",
        }  # fmt: skip
        self.pid = _server_of("r-worker" in module[1]).fork(asked, [*files, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


@contextlib.contextmanager
def true_starts() -> Iterator[None]:
    """Start all processes without forking within the context."""
    before, _STATE["is_on"] = _STATE["is_on"], False
    try:
        yield
    finally:
        _STATE["is_on"] = before


def module_of(args: Any) -> tuple[str, list[str]] | None:
    """Return what a command runs (a module of fastdecode, RANK_JOB or "-c") with its words; else None."""
    if isinstance(args, (str, bytes, os.PathLike)) or not args:
        return None
    words = [str(word) for word in args]
    if words[0] == FASTDECODE:
        return "fastdecode.cli.main", words[1:]
    if words[:2] == [sys.executable, "-m"] and words[2].startswith("fastdecode."):
        return words[2], words[3:]
    if words[:2] == [sys.executable, RANK_JOB]:
        return RANK_JOB, words[2:]
    if words == XDIST_WORKER and "RWORKER_EXTENSION" not in os.environ:
        return "-c", words[3:]
    return None


def relayed(words: Sequence[str]) -> list[str]:
    """Return a command for other programs to start: it runs ``words``, also scripts (``-c``), in a fork."""
    module = ("-c", words[2:]) if list(words[:2]) == [sys.executable, "-c"] else module_of(words)
    if module is None or not _STATE["is_on"]:
        return list(words)
    return [sys.executable, "-I", "-S", RELAY, _server_of(False).address, module[0], *module[1]]


def _is_read_early(env: Any) -> bool:
    """Return whether ``env`` changes variables that the server has read already."""
    if env is None:
        return False
    names = {name for name in {*env, *os.environ} if name.startswith(READ_EARLY) and name != "PYTHONSAFEPATH"}
    return any(env.get(name) != os.environ.get(name) for name in names)


class _Server:
    """A process that has imported what forks need. ``connection``: to the server. ``address``: for relays."""

    def __init__(self, connection: socket.socket, address: str, wait: Callable[[], object]) -> None:
        self.address = address
        self._socket, self._wait, self._owner = connection, wait, os.getpid()
        atexit.register(self.end)

    def fork(self, asked: dict[str, Any], files: Sequence[int]) -> int:
        """Fork, and return the child's id. ``files``: its standard files and those of asked["pass_fds"]."""
        data = json.dumps(asked).encode()
        with _adopting():
            socket.send_fds(self._socket, [len(data).to_bytes(8, "little")], list(files))
            self._socket.sendall(data)
            answer = self._socket.recv(9, socket.MSG_WAITALL)
        if len(answer) < 9:
            raise RuntimeError("the process that forks has ended: see above")
        return int.from_bytes(answer[:8], "little")

    def end(self) -> None:
        """End the server by closing its socket, unless this process is a fork of the tests' process."""
        if os.getpid() == self._owner:
            self._socket.close()
            self._wait()


def _start_server(modules: Sequence[str]) -> _Server:
    mine, theirs = socket.socketpair()
    relays = socket.socket(socket.AF_UNIX)
    address = f"fastdecode-tests-{os.getpid()}-{len(modules)}"
    relays.bind("\0" + address)
    relays.listen()
    room = "." * 4000  # /proc shows this as the words of the server's forks
    with theirs, relays:
        ends = theirs.fileno(), relays.fileno()
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), ",".join(modules)]
        process = subprocess.Popen(
            [*command, f"{ends[0]},{ends[1]}", room], pass_fds=ends, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONSAFEPATH": "1"},
        )  # fmt: skip
    return _Server(mine, address, process.wait)


def _own_server() -> _Server | None:
    """Return the server that a fork was given at its start (fork_server.py)."""
    process_id, server_id, number = map(int, os.environ.get(SERVER_VARIABLE, "0 0 0").split())
    if process_id != os.getpid():
        return None
    connection = socket.socket(fileno=number)
    return _Server(connection, f"fastdecode-tests-{process_id}", partial(os.waitpid, server_id, 0))


def _server_of(is_r_worker: bool) -> _Server:
    with _LOCK:
        key = (os.getpid(), is_r_worker)
        if key not in _STATE["servers"]:
            own = None if is_r_worker else _own_server()
            _STATE["servers"][key] = own or _start_server(R_SIDE if is_r_worker else S_SIDE)
        return _STATE["servers"][key]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt orphaned processes within the context."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with _LOCK:
        if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
