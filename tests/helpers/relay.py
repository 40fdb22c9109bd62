"""``python -I -S relay.py SERVER MODULE WORDS``: lets a fork of the server run the module in place of this process.
The fork has this process's environment, folder, cores and files. Signals are passed on, and both end together. It is
for programs that others than the tests start, such as mpirun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any


def main() -> int:
    """Return the fork's exit status; if a signal ended the fork, end this process by it too."""
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
