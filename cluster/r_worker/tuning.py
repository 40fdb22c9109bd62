"""Choices that only a measurement can make: a processor's fastest arithmetic and its fastest way to read memory."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastdecode import __version__, _rworker
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import cpu_identity
from fastdecode.core.types import READ_AHEAD

ROUNDS = 5
"""Measurements of each kind, in turns; the fastest counts, since other processes only slow a measurement down."""

MARGIN = 0.95
"""Part of the default's time that another choice must stay below, so that no machine hovers between two."""

PIECE_BYTES = 1 << 15
"""A block of 64 tokens in one KV head of 128 dims, 16 bits each."""

READ_BYTES = 1 << 27
"""Bytes of each pass of a bandwidth measurement: more than most caches hold, and read in milliseconds."""

CONTEXT, ROWS, HEADS, HEAD_DIM = 1024, 8, 8, 128
"""The trial of an instruction set: half a MiB of keys and values, which stays in a cache, and 64 query rows."""


@dataclass(frozen=True)
class Tuning:
    """``isa``: the instruction set of the fastest arithmetic; ``read_ahead``: of ``READ_AHEAD``."""

    isa: str
    read_ahead: str


def tuning() -> Tuning:
    """Return this machine's tuning: FASTDECODE_ISA and FASTDECODE_READ_AHEAD where set, else the fastest.

    Measured once for a processor and kept in the user's cache folder. ConfigError for a setting that this machine does
    not support.
    """
    isa, read_ahead = forced_isa(), forced_read_ahead()
    if "auto" not in (isa, read_ahead):
        return Tuning(isa, read_ahead)
    fastest = measured_tuning()
    return Tuning(fastest.isa if isa == "auto" else isa, fastest.read_ahead if read_ahead == "auto" else read_ahead)


def forced_isa() -> str:
    """FASTDECODE_ISA, or "auto" where it is not set; ConfigError for one that this machine does not support."""
    isa, supported = os.environ.get("FASTDECODE_ISA") or "auto", _rworker.supported_isas()
    if isa not in ("auto", *supported):
        raise ConfigError(f"FASTDECODE_ISA: this machine supports {', '.join(supported)}, not {isa!r}")
    return isa


def forced_read_ahead() -> str:
    """FASTDECODE_READ_AHEAD, or "auto" where it is not set; ConfigError for one that is not in ``READ_AHEAD``."""
    read_ahead = os.environ.get("FASTDECODE_READ_AHEAD") or "auto"
    if read_ahead not in ("auto", *READ_AHEAD):
        raise ConfigError(f"FASTDECODE_READ_AHEAD must be one of {', '.join(READ_AHEAD)}, not {read_ahead!r}")
    return read_ahead


@functools.cache
def measured_tuning() -> Tuning:
    """From the cache folder, or measured and stored there."""
    path = _cache_path()
    try:
        kept = Tuning(**json.loads(path.read_text()))
        if kept.isa in _rworker.supported_isas() and kept.read_ahead in READ_AHEAD:
            return kept
    except (OSError, ValueError, TypeError):
        pass
    measured = Tuning(fastest_isa(), fastest_read_ahead())
    _keep(path, measured)
    return measured


def fastest_isa() -> str:
    """The newest here, or the one before: a product of bfloat16 pairs takes two cycles on some processors, one of
    float32 half."""
    best = _rworker.supported_isas()[-1]
    if best != "avx512_bf16":
        return best
    trials = {isa: _Trial(isa) for isa in (best, "avx512_vnni")}
    seconds = {isa: min(trial.seconds() for _ in range(ROUNDS)) for isa, trial in trials.items()}
    return "avx512_vnni" if seconds["avx512_vnni"] < MARGIN * seconds[best] else best


def fastest_read_ahead() -> str:
    """One ascending run starts the hardware's own streams on some processors, and some have more buffers for lines on
    their way into the second-level cache; others read eight pages faster."""
    peaks = _rworker.Peaks(num_threads=1, num_bytes=READ_BYTES)
    rates = [
        [peaks.read_scattered(piece_bytes=PIECE_BYTES, read_ahead=way) for way in READ_AHEAD] for _ in range(ROUNDS)
    ]
    best = dict(zip(READ_AHEAD, np.max(rates, axis=0), strict=True))
    fastest = max(best, key=best.__getitem__)
    return fastest if best["run"] < MARGIN * best[fastest] else "run"


class _Trial:
    """One sequence in one KV head, bfloat16, attended to by a few tokens' rows at once."""

    def __init__(self, isa: str) -> None:
        layer: tuple = (HEADS, 1, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5, 0, 0.0, [], [])
        self._worker = _rworker.RWorker(
            layers=[layer], model_dtype="bfloat16", kv_dtype="bfloat16", block_size=64,
            num_blocks=(CONTEXT + ROWS) // 64 + 1, num_threads=1, isa=isa,
        )  # fmt: skip
        self._rng = np.random.default_rng(0)
        self._step(0, CONTEXT, attends=False)
        self._worker.end_step()

    def seconds(self) -> float:
        """CPU time of this thread, which the time slices of other processes do not enter."""
        seconds = self._step(CONTEXT, ROWS, attends=True)
        self._worker.abandon_step()
        return seconds

    def _step(self, context: int, rows: int, attends: bool) -> float:
        q, k, v = (self._random(count, heads) for count, heads in ((rows * attends, HEADS), (rows, 1), (rows, 1)))
        out = np.empty_like(q)
        self._worker.begin_step(np.zeros((0, 4), np.int64), [np.array([[0, context, rows, attends]])])
        start = time.thread_time()
        self._worker.run(0, 0, q, k, v, out)
        return time.thread_time() - start

    def _random(self, rows: int, heads: int) -> np.ndarray:
        floats = self._rng.standard_normal((rows, heads, HEAD_DIM), dtype=np.float32)
        return np.ascontiguousarray((floats.view(np.uint32) >> 16).astype(np.uint16))


def _cache_path() -> Path:
    """A file per processor, version and newest instruction set; a path that cannot exist where there is no home."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode"
    except RuntimeError:  # a user without an entry in the system's table, as in containers
        folder = Path(os.devnull)
    return folder / f"tuning-{__version__}-{cpu_identity()}-{_rworker.supported_isas()[-1]}.json"


def _keep(path: Path, measured: Tuning) -> None:
    """Store for the next process, which measures again where the home folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(measured), file)
        Path(file.name).replace(path)
    except OSError:
        return
