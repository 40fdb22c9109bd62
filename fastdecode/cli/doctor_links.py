"""What the doctor measures of each R-worker that listens: latency, bandwidth of the way there and back."""

from __future__ import annotations

import statistics
import time

import numpy as np

from fastdecode.addresses import check_key, parse_r_workers, split_address
from fastdecode.backends import make_backend
from fastdecode.cli.doctor_checks import Finding
from fastdecode.config import EngineConfig
from fastdecode.errors import FastDecodeError
from fastdecode.protocols import AttentionBackend
from fastdecode.types import CONTROL, KVLayout, LayerLayout, StepPlan, WorkerPlan

LAYOUT = KVLayout((LayerLayout(8, 8, 128, 128, 1.0),), "float32", "float32")
NUM_STEPS = 50
NUM_TOKENS = 2048
"""16 MiB of keys and values."""

SLOW_SECONDS = 2e-3
"""A step without work that takes longer is felt in every layer."""

SLOW_GB_PER_S = 1.0


def check_links(r_workers: str, key_file: str | None, security: str | None) -> list[Finding]:
    """One finding per R-worker at "host:port,…"; ConfigError for addresses that need a key and have none."""
    addresses = parse_r_workers(r_workers).addresses
    check_key("r_workers", [split_address("r_workers", each)[0] for each in addresses], key_file)
    return [_check(address, key_file, security) for address in addresses]


def _check(address: str, key_file: str | None, security: str | None) -> Finding:
    backend = make_backend(EngineConfig(r_workers=address, key_file=key_file, security=security), [])
    try:
        (info,) = backend.open(LAYOUT)
        seconds, rate = _step_seconds(backend), _gb_per_s(backend)
    except (FastDecodeError, OSError) as error:
        cure = "is `fastdecode r-worker --listen` running there, with the same key, and does a firewall let it through?"
        return Finding("broken", str(error), cure)
    finally:
        backend.close()
    what = (
        f"R-worker {address}: {info.num_threads} thread(s), {info.isa}, reads {info.read_gb_per_s:.1f} GB/s; "
        f"round trip {seconds * 1e6:.0f} µs, link {rate:.2f} GB/s"
    )
    if seconds > SLOW_SECONDS or rate < SLOW_GB_PER_S:
        return Finding("note", what, "a slow link shows in every layer: `fastdecode plan --link` says what yours needs")
    return Finding("ok", what)


def _step_seconds(backend: AttentionBackend) -> float:
    """Median seconds to begin a step of nothing: there and back once."""
    nothing = StepPlan((WorkerPlan(np.zeros(0, CONTROL), ()),))
    seconds = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        backend.begin_step(nothing)
        seconds.append(time.perf_counter() - start)
        backend.end_step()
    return statistics.median(seconds)


def _gb_per_s(backend: AttentionBackend) -> float:
    """1e9 bytes per second of a sequence that goes there and comes back; the faster of two."""
    data = np.zeros(NUM_TOKENS * LAYOUT.kv_bytes_per_token, np.uint8)
    seconds = []
    for sequence_id in range(2):
        start = time.perf_counter()
        backend.import_(0, sequence_id, NUM_TOKENS, data)
        backend.export(0, sequence_id)
        seconds.append(time.perf_counter() - start)
    return 2 * data.nbytes / min(seconds) / 1e9
