"""Runs jobs of several tensor-parallel ranks in processes of `rank_job.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.ports import free_port


def run_ranks(size: int, jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return the results of ``jobs``, run one after the other in the same ``size`` processes."""
    first = free_port(len(jobs))
    jobs = [{"params": {}} | job | {"port": port} for port, job in enumerate(jobs, first)]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("rank_job.py")
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "jobs.json"), str(folder / "results.json")],
            env={**os.environ, **place, "RANK": str(index), "LOCAL_WORLD_SIZE": str(size)},
        )
        for index in range(size)
    ]
    try:
        assert [rank.wait(480) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    return list(json.loads((folder / "results.json").read_text()))
