"""Mini-batches in flight, reports, sleeping threads, and the symbols that kernel objects export."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import Layer, make_worker, random_rows, table

LAYER = Layer(4, 2, 32, 32)


def test_mini_batches_in_flight_and_the_report() -> None:
    worker = make_worker(LAYER, layers=[LAYER] * 3, num_threads=2)
    rng = np.random.default_rng(0)
    rows = [random_rows(rng, LAYER, 30), random_rows(rng, LAYER, 20)]
    outs = [np.empty_like(row.q) for row in rows]
    start = time.perf_counter()
    worker.begin_step(table([]), [table([(1, 0, 30, 1)]), table([(2, 0, 20, 1)]), table([])])
    empty_q, empty_k = np.zeros((0, 4, 32), np.float32), np.zeros((0, 2, 32), np.float32)
    for layer in range(3):
        for i in (0, 1):
            worker.submit(i, layer, rows[i].q, rows[i].k, rows[i].v, outs[i])
        worker.submit(2, layer, empty_q, empty_k, empty_k, empty_q)
        for i in (2, 1, 0):
            worker.wait(i)
    busy_start, busy_end, bytes_read, blocks_free = worker.end_step()
    assert busy_start.shape == busy_end.shape == (3, 3)
    assert (busy_start[:2] >= start).all() and (busy_end[:2] >= busy_start[:2]).all()
    assert (busy_end <= time.perf_counter()).all() and (busy_start[2] == 0).all()
    assert (busy_start[0] >= np.array([start, *busy_end[1, :2]])).all()
    assert bytes_read == 3 * (30 + 20) * 2 * (32 + 32) * 4
    assert blocks_free == worker.blocks_free == worker.num_blocks - 4


def test_ready_turns_true() -> None:
    worker, rows = make_worker(LAYER), random_rows(np.random.default_rng(0), LAYER, 400)
    worker.begin_step(table([]), [table([(1, 0, 400, 1)])])
    worker.submit(0, 0, rows.q, rows.k, rows.v, np.empty_like(rows.q))
    while not worker.ready(0):
        time.sleep(0)
    worker.wait(0)
    worker.abandon_step()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_running_here_gives_the_same_bits(num_threads: int) -> None:
    """``run`` and ``submit`` in turns on one R-worker give the same bits, also for an empty mini-batch."""
    workers = [make_worker(LAYER, layers=[LAYER] * 2, num_threads=num_threads) for _ in range(2)]
    rows = random_rows(np.random.default_rng(0), LAYER, 700)
    outs = [np.empty_like(rows.q) for _ in workers]
    empty = np.zeros((0, 4, 32), np.float32), np.zeros((0, 2, 32), np.float32)
    for worker in workers:
        worker.begin_step(table([]), [table([(1, 0, 700, 1)]), table([])])
    for layer in range(2):
        workers[0].submit(0, layer, rows.q, rows.k, rows.v, outs[0])
        workers[0].wait(0)
        if layer == 0:
            workers[1].run(0, layer, rows.q, rows.k, rows.v, outs[1])
        else:
            workers[1].submit(0, layer, rows.q, rows.k, rows.v, outs[1])
            workers[1].wait(0)
        for worker in workers:
            worker.run(1, layer, empty[0], empty[1], empty[1], empty[0])
        assert outs[0].tobytes() == outs[1].tobytes()
    reports = [worker.end_step() for worker in workers]
    assert reports[0][2:] == reports[1][2:]
    assert (reports[1][0][0] > 0).all() and (reports[1][1][0] >= reports[1][0][0]).all() and not reports[1][1][1].any()


def test_running_here_while_something_runs_is_refused() -> None:
    worker, rows = make_worker(LAYER), random_rows(np.random.default_rng(0), LAYER, 40)
    arrays = rows.q[:20], rows.k[:20], rows.v[:20], np.empty_like(rows.q[:20])
    with pytest.raises(ValueError, match="no step is open"):
        worker.run(0, 0, *arrays)
    worker.begin_step(table([]), [table([(1, 0, 20, 1)]), table([(2, 0, 20, 1)])])
    worker.submit(0, 0, *arrays)
    with pytest.raises(ValueError, match="run: a layer is outstanding; wait for it"):
        worker.run(1, 0, *arrays)
    worker.wait(0)
    worker.run(1, 0, *arrays)
    with pytest.raises(ValueError, match="submitted before in this step"):
        worker.run(1, 0, *arrays)
    worker.end_step()


def test_many_short_jobs() -> None:
    worker = make_worker(LAYER, num_threads=3, num_blocks=4096)
    rows = random_rows(np.random.default_rng(0), LAYER, 300)
    out = np.empty_like(rows.q)
    for step in range(100):
        worker.begin_step(table([]), [table([(i, step, 1, 1) for i in range(300)])])
        worker.submit(0, 0, rows.q, rows.k, rows.v, out)
        worker.wait(0)
        worker.end_step()
    np.testing.assert_allclose(out.reshape(300, 2, 2, 32), np.repeat(rows.v[:, :, None], 2, axis=2), atol=1e-5)


def test_idle_threads_sleep() -> None:
    worker = make_worker(LAYER, num_threads=2)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15  # Each thread that spins would take 0.3 s.
    worker.close()


def test_reported_sizes() -> None:
    worker = make_worker(LAYER, layers=[LAYER, Layer(4, 1, 16, 16)], kv_dtype="bfloat16", block_size=32, num_blocks=7)
    assert (worker.num_blocks, worker.block_size, worker.num_threads) == (7, 32, 1)
    assert worker.block_bytes == 32 * 2 * (2 * 64 + 32)
    assert _rworker.read_peak(1, 1 << 24, 3) > 0.1


TABLES = {
    "scalar": "kScalarKernels",
    "avx2": "kAvx2Kernels",
    "avx512": "kAvx512Kernels",
    "avx512_vnni": "kAvx512Vnni",
    "avx512_bf16": "kAvx512Bf16",
    "avx512_amx": "kAvx512Amx",
    "neon": "kNeonKernels",
    "neon_dot": "kNeonDot",
    "neon_bf16": "kNeonBf16",
}
"""The symbol that each kernel file exports."""


def test_kernels_export_nothing_but_their_table() -> None:
    """A weak symbol of a kernel file would be AVX-512 code, which the linker might keep for all instruction sets."""
    nm, library = shutil.which("nm"), Path(_rworker.__file__).resolve()
    archives = [*library.parent.rglob("librworker.a"), *Path(__file__).parents[2].glob("build/cp*/**/librworker.a")]
    if nm is None or not archives:
        pytest.skip("needs nm and the build folder's librworker.a")
    listing = subprocess.run(
        [nm, "--defined-only", "-C", archives[0]], capture_output=True, text=True, check=True
    ).stdout
    member, exported = "", {}
    for line in listing.splitlines():
        if line.endswith(":"):
            member = line.split(".")[0]
        elif member in TABLES and line:
            _, kind, symbol = line.split(maxsplit=2)
            if kind not in "tdrb":  # Lower-case letters name symbols that are local to the file.
                exported[symbol] = kind
    assert set(exported) <= {f"rworker::{table}" for table in TABLES.values()}
    assert exported and set(exported.values()) <= {"D", "R"}
