"""Runs a round in this process, over a server, in an MPI job, or over Ray actors."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import mpi_jobs

from chaos.configuration import Configuration, accepted_settings, draw
from chaos.processes import Leftovers
from chaos.reference import Reference, compute_reference, engine_config
from chaos.round import Result, Round, cache_bytes
from chaos.served import ServedRound

JOB_SECONDS = 180
RANK_END_SECONDS = 30.0
"""Seconds within which an MPI job must end after a rank was killed."""

NODE: dict[str, Any] = {"num_cpus": 3, "memory": 1 << 30, "object_store_memory": 80 << 20, "include_dashboard": False}


def run_round(drawn: Configuration, folder: Path) -> Result:
    """Compute the reference, run the round, and check what the round left behind."""
    leftovers = Leftovers(folder / "temporary")
    leftovers.begin()
    wanted = compute_reference(drawn, folder)
    if drawn.kind == "serve":
        result = ServedRound(drawn, folder, leftovers).run(wanted)
    elif drawn.kind == "mpi":
        result = run_mpi(drawn, folder, wanted)
    else:
        with ray_cluster() if drawn.kind == "ray" else contextlib.nullcontext():
            result = Round(drawn, folder, leftovers).run(wanted)
    result.faults += leftovers.faults()
    return result


def run_mpi(drawn: Configuration, folder: Path, wanted: Reference) -> Result:
    """Run the round in an MPI job of its own. If a rank is killed, the job must end soon and say so."""
    segments = folder / "segments"
    segments.mkdir(exist_ok=True)
    for name in ("mpi.json", "told-to-end.txt"):
        (folder / name).unlink(missing_ok=True)
    wanted.write(folder / "wanted.json")
    settings = accepted_settings(drawn, lambda given: engine_config(drawn, folder, **given, r_workers="mpi"))
    memory = str(cache_bytes(drawn, wanted, "kv_shard_tokens" in settings))
    r_worker = [mpi_jobs.r_workers.FASTDECODE, "r-worker", "--transport", "mpi", "--threads", "1"]
    r_worker += ["--kv-cache-memory", memory]
    engine = [sys.executable, "-m", "chaos.jobs", str(drawn.seed), drawn.kind, str(folder)]
    words = mpi_jobs.command((1, engine), (drawn.num_workers, r_worker))
    environment = mpi_jobs.environment(OMPI_MCA_btl_sm_backing_directory=str(segments))
    job = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = job.communicate(timeout=JOB_SECONDS)
    result = _read(folder / "mpi.json") or Result()
    killed = folder / "told-to-end.txt"
    if killed.exists():
        result = Result(counts=Counter(kills=1, events=1), log=[f"a rank was killed at {killed.read_text()}"])
        seconds = time.time() - killed.stat().st_mtime
        if job.returncode == 0 or seconds > RANK_END_SECONDS:
            result.fault(f"exception: the job ended with {job.returncode}, {seconds:.0f} s after a rank was killed")
    elif job.returncode or not result.counts:
        result.fault(f"exception: the job ended with {job.returncode}:\n{output[-3000:]}")
    result.faults += [f"left: shared memory {path}" for path in segments.iterdir()]
    return result


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """Run a Ray node on this machine, at the address in RAY_ADDRESS, within the context."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="fd-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            nodes.add_node(**NODE)
            os.environ["RAY_ADDRESS"] = nodes.address
            yield
        finally:
            nodes.shutdown()


def write(result: Result, path: Path) -> None:
    """Write ``result`` as JSON for another process."""
    path.write_text(json.dumps(vars(result)))


def _read(path: Path) -> Result | None:
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    return Result(**told | {"counts": Counter(told["counts"])})


def main() -> None:
    """Run as the S-worker of an MPI job: ``python -m chaos.jobs SEED KIND FOLDER``."""
    seed, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    leftovers = Leftovers(folder / "temporary")
    leftovers.begin()
    result = Round(draw(seed, [kind]), folder, leftovers).run(Reference.read(folder / "wanted.json"))
    write(result, folder / "mpi.json")


if __name__ == "__main__":
    main()
