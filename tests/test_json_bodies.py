"""JSON bodies are decoded by many threads: those of each R-worker, and those of KV ports."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading, msgspec
from fastdecode.cluster.wire.json_bodies import decode_json
sys.setswitchinterval(1e-6)
for _ in range(60):
    class Inner(msgspec.Struct):
        a: int = 0
    Outer = msgspec.defstruct("Outer", [("x", list[Inner], []), ("y", Inner | None, None), ("z", tuple[int, ...], ())])
    barrier, read = threading.Barrier(6), []
    def decode():
        barrier.wait()
        read.append(decode_json("test", b'{"x":[{"a":1}],"z":[1,2]}', Outer))
    threads = [threading.Thread(target=decode) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(read) == 6 and all(each == Outer([Inner(1)], None, (1, 2)) for each in read)
"""


def test_threads_may_read_a_form_for_the_first_time_at_once() -> None:
    """The test has a process of its own, since msgspec without a lock ends it by SIGSEGV."""
    assert subprocess.run([sys.executable, "-c", CODE], check=False).returncode == 0
