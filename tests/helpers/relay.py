"""``python -I -S relay.py SERVER MODULE WORDS``: have a fork of the server (fork_server.py) run the module in the place
of this process: with its environment, folder, cores and files; signals go there, and its end is the end of both.

For what others than the tests start, such as mpirun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any


def main() -> int:
    """The status of the fork; a signal that ended that ends this process, too."""
    server = socket.socket(socket.AF_UNIX)
    server.connect("\0" + sys.argv[1])
    words = sys.argv[2:]
    asked = {
        "module": words[0], "words": words, "shown": words, "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109
        "pass_fds": [], "new_session": True, "is_to_fork": False, "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip
    data = json.dumps(asked).encode()
    socket.send_fds(server, [len(data).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(data)
    fork = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little")

    def forward(number: int, frame: Any) -> None:
        os.kill(fork, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    status = os.waitstatus_to_exitcode(int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little"))
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
