"""Findings of ``fastdecode doctor`` about a folder for parked sessions: is it writable, and how fast?"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cli.findings import Finding
from fastdecode.cluster.r_worker.parking.directory import chain_files
from fastdecode.core.machine import advise_cache, force_to_disk


def check_parking(folder: str) -> Iterator[Finding]:
    """Yield findings about ``folder``, which an R-worker may be using. No probe file stays behind."""
    path = Path(folder)
    if not path.is_dir():
        yield Finding("broken", f"park_dir {folder}: no folder", "an R-worker with --park-dir makes it")
        return
    try:
        files = chain_files(path)
        num_bytes, free = sum(each.stat().st_size for each in files), shutil.disk_usage(path).free
        write, read = _speeds(path)
    except OSError as error:
        cure = "a folder that this user may write, on a disk with room"
        yield Finding("broken", f"park_dir {folder}: {error.strerror}", cure)
        return
    held = f"{len(files):,} chains of {num_bytes / 2**30:.2f} GiB, {free / 2**30:.1f} GiB free"
    speeds = f"written with {write / 1e6:,.0f} MB/s until it is on the disk, read with {read / 1e6:,.0f} MB/s"
    yield Finding("ok", f"park_dir {folder}: {held}; {speeds}")


def _speeds(folder: Path) -> tuple[float, float]:
    """Return the disk's write and read speeds in bytes per second, without the page cache where possible."""
    path, data = folder / f"doctor-{secrets.token_hex(4)}.tmp", os.urandom(1 << 20)
    # Bytes that the probe writes, syncs and reads back: enough to show the disk's speed within about a second
    probe_bytes = 32 << 20
    try:
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(probe_bytes // len(data)):
                file.write(data)
            force_to_disk(file.fileno())
            written = time.perf_counter() - start
            advise_cache(file.fileno(), "DONTNEED")
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(len(data)):
                pass
        return probe_bytes / written, probe_bytes / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)
