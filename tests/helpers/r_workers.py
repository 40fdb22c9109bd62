"""R-worker processes for tests, as a user starts them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdecode import LLM
from fastdecode.cluster.pool.remote import RemoteWorker
from fastdecode.engine.engine import LLMEngine
from fastdecode.tensor_parallel.rank_backend import TensorParallelBackend

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
SMALL = ("--kv-cache-memory", "64MiB", "--threads", "1")
PROGRAM = "FASTDECODE_TEST_R_WORKER"
"""Variable that names another program to start, such as that of an ARM under qemu."""


def listening(
    *arguments: str, listen: str = "tcp://127.0.0.1:0"
) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Start an R-worker; yield its process and "host:port".
    It is killed at the end. Its log is its stderr, kept for ``communicate``.
    """
    return started("--listen", listen, *arguments)


def joining(pool: str, *arguments: str) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Start an R-worker that asks to join ``pool``, "host:port"; see ``listening``."""
    return started("--join", pool, *arguments)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [os.environ.get(PROGRAM, FASTDECODE), "r-worker", *SMALL, "--log-level", "info", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if "tcp://" not in line:
            raise RuntimeError(f"the R-worker did not start: {line}{process.communicate()[1]}")
        yield process, line.split("tcp://")[1].split()[0]
    finally:
        process.kill()
        process.communicate()


def pool_of(engine: LLMEngine) -> Any:
    """Return the pool of R-workers of ``engine``'s own rank."""
    backend = engine.backend
    return backend.pool if isinstance(backend, TensorParallelBackend) else backend


def spawned_pids(llm: LLM) -> list[int]:
    """Return the process ids of the R-workers that ``llm`` has started."""
    workers = [getattr(worker, "r_worker", worker) for worker in pool_of(llm.engine).workers]
    return [worker.link.process.pid for worker in workers if isinstance(worker, RemoteWorker)]
