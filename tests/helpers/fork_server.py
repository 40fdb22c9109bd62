"""``python fork_server.py MODULES SOCKET ROOM``: import the modules, then fork a process for each request.

A process of its own, which has one thread and neither pytest nor the tests in memory (see forks.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from typing import Any


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer with a process id each; returns in the new processes alone, with the request and its files."""
    while True:
        size, files, _, _ = socket.recv_fds(connection, 8, 64)
        if not size:
            os._exit(0)
        asked = json.loads(connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild:
                connection.sendall(grandchild.to_bytes(8, "little"))
                os._exit(0)
            while os.getppid() not in (asked["parent"], 1):  # until the process between is gone
                time.sleep(0.0002)
            connection.close()
            return asked, files
        os.waitpid(child, 0)
        connection.sendall(b"!")  # the new process has its parent
        for file in files:
            os.close(file)


def become(asked: dict[str, Any], files: list[int]) -> None:
    """Take on the files, environment, folder, session and words of the request."""
    if asked["new_session"]:
        os.setsid()
    wanted = [0, 1, 2, *asked["pass_fds"]]
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # none in another's place
    for file, place in zip(apart, wanted, strict=True):
        os.dup2(file, place)
    for file in {int(name) for name in os.listdir("/proc/self/fd")} - set(wanted):  # noqa: PTH208
        with contextlib.suppress(OSError):  # that of the list itself
            os.close(file)
    for name in set(os.environ) - set(asked["env"]):
        del os.environ[name]
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    os.sched_setaffinity(0, asked["cores"])
    sys.argv = asked["words"]
    show("\0".join(asked["shown"]).encode())


def show(words: bytes) -> None:
    """As /proc/PID/cmdline: in the place of this program's own words."""
    with open("/proc/self/stat") as file:  # noqa: PTH123
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, words[: end - start - 1].ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Serve; in a new process, run its module's ``main``, or its script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, and for forks
    connection = socket.socket(fileno=int(sys.argv[2]))
    for module in sys.argv[1].split(","):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asked, files = serve(connection)
    become(asked, files)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["module"].endswith(".py"):
        runpy.run_path(asked["module"], run_name="__main__")
    else:
        sys.exit(importlib.import_module(asked["module"]).main())


if __name__ == "__main__":
    main()
