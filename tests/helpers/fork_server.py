"""``python fork_server.py MODULES SOCKETS ROOM``: imports the modules, then forks a process for each request.

The server has one thread, and neither pytest nor the tests in memory (see forks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from typing import Any


def serve(tests: socket.socket, relays: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer each request with a process id. Return only in the new processes, with the request and its files."""
    while True:
        with contextlib.suppress(ChildProcessError):  # forks of relays have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        is_relayed = tests not in select.select([tests, relays], [], [])[0]
        connection = relays.accept()[0] if is_relayed else tests
        size, files, _, _ = socket.recv_fds(connection, 8, 64)
        if not size and not is_relayed:
            os._exit(0)
        asked = json.loads(connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL) or "{}")
        child = os.fork()
        if child == 0:
            between = os.getpid()
            grandchild = os.fork()
            if grandchild:
                with contextlib.suppress(OSError):  # the relay was killed
                    connection.sendall(grandchild.to_bytes(8, "little"))
                if is_relayed:
                    watch(connection, grandchild)
                os._exit(0)
            while not is_relayed and os.getppid() == between:  # wait until the process between them has ended
                time.sleep(0.0002)
            return asked, files
        if is_relayed:
            connection.close()
        else:
            os.waitpid(child, 0)
            connection.sendall(b"!")  # the new process now has its parent
        for file in files:
            os.close(file)


def watch(relay: socket.socket, fork: int) -> None:
    """Send a relay the exit status of its fork. If the relay ends first, it was killed, so kill the fork."""
    for file in {int(name) for name in os.listdir("/proc/self/fd")} - {relay.fileno()}:  # noqa: PTH208
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            os.close(file)
    if relay.fileno() in select.select([relay.fileno(), os.pidfd_open(fork)], [], [])[0]:
        os.kill(fork, signal.SIGKILL)
    status = os.waitpid(fork, 0)[1]
    with contextlib.suppress(OSError):
        relay.sendall(status.to_bytes(8, "little"))


def become(asked: dict[str, Any], files: list[int]) -> None:
    """Take on the files, environment, folder, session and words of the request."""
    if asked["new_session"]:
        os.setsid()
    wanted = [0, 1, 2, *asked["pass_fds"]]
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # keep each file apart from the others' numbers
    for file, place in zip(apart, wanted, strict=True):
        os.dup2(file, place)
    for file in {int(name) for name in os.listdir("/proc/self/fd")} - set(wanted):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            os.close(file)
    for name in set(os.environ) - set(asked["env"]):
        del os.environ[name]
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    os.sched_setaffinity(0, asked["cores"])
    sys.argv = asked["words"]
    show("\0".join(asked["shown"]).encode())


def show(words: bytes) -> None:
    """Replace this program's words in /proc/PID/cmdline."""
    with open("/proc/self/stat") as file:  # noqa: PTH123
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, words[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Import the modules, then serve."""
    tests, relays = (socket.socket(fileno=int(number)) for number in sys.argv[2].split(","))
    for module in sys.argv[1].split(","):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    serve_and_run(tests, relays)


def serve_and_run(tests: socket.socket, relays: socket.socket) -> None:
    """Serve; in a new process, run the module's ``main`` or the script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for forks
    asked, files = serve(tests, relays)
    for each in (tests, relays):  # otherwise they would later close files that reuse their numbers
        each.close()
    become(asked, files)
    if asked["is_to_fork"]:
        begin_server()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run(asked)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        leave(end.code or 0)
        raise
    else:
        leave(0)


def run(asked: dict[str, Any]) -> None:
    """Run the module's ``main``, the script, or the code after ``-c``."""
    if asked["module"].endswith(".py"):
        runpy.run_path(asked["module"], run_name="__main__")
    elif asked["module"] == "-c":
        exec(asked["words"].pop(1), {"__name__": "__main__"})
    else:
        sys.exit(importlib.import_module(asked["module"]).main())


def leave(status: int) -> None:
    """Exit without destroying modules, if torch is loaded. Otherwise return.

    Python's own exit writes to each object, so the system would copy 240 MB of pages that the forks share, in a third
    of a second. Threads are joined and exit functions run, as in any exit. A rank of an MPI job exits as usual, since
    MPI finalizes only after the exit functions; so does a rank with vLLM, whose library then removes its shared memory.
    """
    if "torch" not in sys.modules or {"mpi4py.MPI", "vllm"} & sys.modules.keys():
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def begin_server() -> None:
    """Start a server for a fork of this process, as this process's own server does."""
    mine, theirs = socket.socketpair()
    relays = socket.socket(socket.AF_UNIX)
    relays.bind(f"\0fastdecode-tests-{os.getpid()}")
    relays.listen()
    child = os.fork()
    if child == 0:
        mine.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        serve_and_run(theirs, relays)
        sys.exit()
    theirs.close()
    relays.close()
    os.environ["FASTDECODE_TEST_FORK_SERVER"] = f"{os.getpid()} {child} {mine.detach()}"


if __name__ == "__main__":
    main()
