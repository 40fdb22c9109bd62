"""Measure a layer's time on the way to an R-worker and back: the round trip without the R-worker's busy time.

    python benchmarks/transport.py --payload-kb 1,64,1024 --pause-us 0,500
    mpirun -n 1 python benchmarks/transport.py --transports mpi : \
      -n 1 fastdecode r-worker --transport mpi --cores 1 --threads 1 --kv-cache-memory 1GiB

The S side runs on the first core, and one R-worker with one thread on the last. ``--pause-us``: pause of the S side
between layers, as if it computed. The transports take turns. TCP is on loopback: without a key, with a key and
unencrypted data (``--security authenticate``), and with CURVE.

``there``: from submit to the beginning of the R-worker's work. ``back``: from its end to the collected output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastdecode.api.settings import SECURITY_LEVELS
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.mpi import MpiBackend
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.machine import mend_binding
from fastdecode.core.types import CONTROL, SPAN, StepPlan, WorkerPlan
from fastdecode.kinds.attending import Dense
from fastdecode.kinds.layout import KVLayout

NUM_LAYERS = 32
LAYER = Dense(4, 4, 64, 64, 0.1)
LAYOUT = KVLayout((LAYER,) * NUM_LAYERS, "float32", "float32")
ROW_BYTES = 3 * 4 * 64 * 4  # float32 q, k and v of 4 heads of 64 dims
CACHE_BYTES = 1 << 30
BLOCK_SIZE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-kb", default="1,64,1024", metavar="LIST", help="of q, k and v together")
    parser.add_argument("--pause-us", default="0,500", metavar="LIST")
    parser.add_argument("--transports", metavar="LIST", help="some of those in the table (all there are)")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    mend_binding()
    cores = sorted(os.sched_getaffinity(0))
    with backends(cores[-1]) as transports:
        os.sched_setaffinity(0, cores[:1])
        if args.transports:
            transports = {name: transports[name] for name in args.transports.split(",")}
        for backend in transports.values():
            backend.open(LAYOUT)
        print("| payload KB | pause µs | transport | µs p10 | p50 | p90 | there p50 | back p50 |")
        print("|---|---|---|---|---|---|---|---|")
        for payload_kb in map(int, args.payload_kb.split(",")):
            rows = max(1, payload_kb * 1024 // ROW_BYTES)
            for pause_us in map(int, args.pause_us.split(",")):
                found: dict[str, list[np.ndarray]] = {name: [] for name in transports}
                for _ in range(args.steps):
                    for name, backend in transports.items():
                        found[name].append(step(backend, rows, pause_us * 1e-6))
                for name, steps in found.items():
                    there, back = np.concatenate(steps[2:], axis=1) * 1e6
                    figures = [*np.percentile(there + back, (10, 50, 90)), np.median(there), np.median(back)]
                    print("|", " | ".join([str(payload_kb), str(pause_us), name, *(f"{x:.0f}" for x in figures)]), "|")


def step(backend: PoolBackend, num_rows: int, pause_seconds: float) -> np.ndarray:
    """Return the seconds that each layer is on the way there and back, float64 [2, num_layers - 1].
    Every sequence attends to one token. The first layer is left out, since an R-worker makes new blocks for it.
    """
    spans = np.array([(sequence_id, 0, 1, 1) for sequence_id in range(num_rows)], SPAN)
    backend.begin_step(StepPlan((WorkerPlan(np.zeros(0, CONTROL), (spans,)),)))
    array = np.ones((num_rows, 4, 64), np.float32)
    starts, ends = np.zeros(NUM_LAYERS), np.zeros(NUM_LAYERS)
    for layer in range(NUM_LAYERS):
        if pause_seconds:
            time.sleep(pause_seconds)
        starts[layer] = time.perf_counter()
        backend.submit(0, layer, array, array, array)
        backend.collect(0)
        ends[layer] = time.perf_counter()
    report = backend.end_step().workers[0]
    release = np.array([(2, sequence_id, 0, 0) for sequence_id in range(num_rows)], CONTROL)
    backend.begin_step(StepPlan((WorkerPlan(release, ()),)))
    backend.abandon_step()
    return np.stack([report.busy_start[0] - starts, ends - report.busy_end[0]])[:, 1:]


@contextlib.contextmanager
def backends(core: int) -> Iterator[dict[str, PoolBackend]]:
    """Yield one backend per transport, by name; its R-worker runs on ``core``."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        key = folder / "key"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        found: dict[str, PoolBackend] = {
            "inproc": InprocBackend([RWorkerSize(CACHE_BYTES, 1, (core,))], BLOCK_SIZE),
            "spawn": SpawnBackend([RWorkerSize(CACHE_BYTES, 1, (core,))], BLOCK_SIZE),
            "tcp": TcpBackend([cleanup.enter_context(listening(core))], BLOCK_SIZE),
        }
        for level in SECURITY_LEVELS:
            address = cleanup.enter_context(listening(core, "--key-file", str(key), "--security", level))
            found[f"tcp, {level}"] = TcpBackend([address], BLOCK_SIZE, str(key), level)
        if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
            found["mpi"] = MpiBackend(BLOCK_SIZE)
        for backend in found.values():
            cleanup.callback(backend.close)
        yield found


@contextlib.contextmanager
def listening(core: int, *arguments: str) -> Iterator[str]:
    """Start an R-worker on ``core``; yield its "host:port"."""
    program = str(Path(sys.executable).with_name("fastdecode"))
    command = [program, "r-worker", "--listen", "tcp://127.0.0.1:0", "--cores", str(core)]
    command += ["--threads", "1", "--kv-cache-memory", str(CACHE_BYTES), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            yield line.split("tcp://")[1].split()[0]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
