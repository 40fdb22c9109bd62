"""Sessions with R-worker processes: keys, backends of one R-worker, and frames that no proper S-worker sends."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from fastdecode import _rworker
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker.host import RWorkerSize, make_rworker
from fastdecode.cluster.wire.frames import HEADER, MAGIC, VERSION
from fastdecode.cluster.wire.messages import Hello, encode_hello
from fastdecode.core.errors import BackendError
from fastdecode.core.types import StepPlan
from helpers import contract
from helpers.processes import PATIENCE_SECONDS


def make() -> _rworker.RWorker:
    """Return an R-worker in this process, as a lease makes one for ``contract.LAYOUT``."""
    return make_rworker(contract.LAYOUT, 16, RWorkerSize(1 << 20, 1))


def make_key(path: Path, text: str, mode: int = 0o600) -> Path:
    """Write a key file; by default only its owner can read it."""
    path.write_text(text)
    path.chmod(mode)
    return path


def alone(plan: StepPlan) -> StepPlan:
    """Return the first worker's part of ``plan``."""
    return StepPlan(plan.workers[:1])


def works(backend: TcpBackend) -> bool:
    """Run one step of one worker; return whether it succeeded."""
    mini_batch = ([(1, 0, 4, 1)], [])
    backend.begin_step(alone(contract.plan([mini_batch])))
    for layer in range(len(contract.LAYERS)):
        backend.submit(0, layer, *contract.rows(mini_batch, 0, layer))
        backend.collect(0)
    return backend.end_step().workers[0].bytes_read > 0


def opened(address: str, key: Path | None = None, security: str | None = None) -> TcpBackend:
    """Return a backend with an open session at the R-worker at ``address``."""
    backend = TcpBackend([address], contract.BLOCK_SIZE, str(key) if key else None, security)
    backend.open(contract.LAYOUT)
    return backend


def serves(address: str, key: Path | None = None) -> bool:
    """Run a whole session; wait while the previous session ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            backend = opened(address, key)
        except BackendError as error:
            if "another S-worker" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        try:
            return works(backend)
        finally:
            backend.close()


def log_of(process: subprocess.Popen[str], until: str = "", count: int = 1) -> str:
    """Return an R-worker's stderr, and end it once ``count`` lines contain ``until``: it may log after it answers."""
    assert process.stderr is not None
    lines: list[str] = []
    while until and sum(until in line for line in lines) < count:
        lines.append(process.stderr.readline())
        assert lines[-1], f"the R-worker ended before it said {until!r}: {''.join(lines)}"
    process.terminate()
    return "".join(lines) + process.stderr.read()


def frame(kind: int, *parts: bytes, **changes: Any) -> list[bytes]:
    """Return header and bodies of a frame; ``changes`` set fields of the header."""
    fields: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "kind": kind, "epoch": 0, "sequence": 0}
    lengths = [len(part) for part in parts] + [0] * (3 - len(parts))
    fields |= {"mini_batch": 0, "layer": 0} | {f"length{i}": length for i, length in enumerate(lengths)} | changes
    return [HEADER.pack(*fields.values()), *parts]


HELLO = encode_hello(Hello("stranger", contract.LAYOUT, 16))
