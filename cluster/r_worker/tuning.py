"""Choices that only a measurement can make: a processor's fastest arithmetic, and its fastest prefetching."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastdecode import __version__, _rworker
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import cpu_identity
from fastdecode.core.types import READ_AHEAD
from fastdecode.kinds import Dense

MARGIN = 0.95
"""Another choice must take less than this part of the default's time, so that no machine alternates between two."""

READ_BYTES = 1 << 27
"""Bytes of one pass of a bandwidth measurement: more than most caches hold, and read in milliseconds."""

CONTEXT, HEADS, HEAD_DIM = 1024, 8, 128
"""Sizes of a trial: tokens of a sequence, query heads per KV head, and elements of a key or value."""

SEQUENCES, KV_HEADS = 12, 8
"""Sizes of a trial of reading: 48 MiB of keys and values. Other trials push most of them out of the caches."""


@dataclass(frozen=True)
class Tuning:
    """A machine's tuning. ``isa``: the fastest instruction set. ``read_ahead``: one of ``READ_AHEAD``."""

    isa: str
    read_ahead: str


def tuning() -> Tuning:
    """Return this machine's tuning: FASTDECODE_ISA and FASTDECODE_READ_AHEAD if set, else the fastest.

    The fastest choices are measured once per processor and kept in the user's cache folder. Raise ConfigError for a
    setting that this machine does not support.
    """
    isa, read_ahead = forced_isa(), forced_read_ahead()
    if "auto" not in (isa, read_ahead):
        return Tuning(isa, read_ahead)
    fastest = measured_tuning()
    return Tuning(fastest.isa if isa == "auto" else isa, fastest.read_ahead if read_ahead == "auto" else read_ahead)


def forced_isa() -> str:
    """Return FASTDECODE_ISA, or "auto" if it is not set. Raise ConfigError if this machine does not support it."""
    isa, supported = os.environ.get("FASTDECODE_ISA") or "auto", _rworker.supported_isas()
    if isa not in ("auto", *supported):
        raise ConfigError(f"FASTDECODE_ISA: this machine supports {', '.join(supported)}, not {isa!r}")
    return isa


def forced_read_ahead() -> str:
    """Return FASTDECODE_READ_AHEAD, or "auto" if it is not set. Raise ConfigError if it is not in ``READ_AHEAD``."""
    read_ahead = os.environ.get("FASTDECODE_READ_AHEAD") or "auto"
    if read_ahead not in ("auto", *READ_AHEAD):
        raise ConfigError(f"FASTDECODE_READ_AHEAD must be one of {', '.join(READ_AHEAD)}, not {read_ahead!r}")
    return read_ahead


@functools.cache
def measured_tuning() -> Tuning:
    """Return the tuning from the cache folder, or measure and store it."""
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
    """Return the newest instruction set or the one before it, whichever is faster.

    The newest set may be slower: on some processors a product of bfloat16 pairs takes two cycles, and a product of
    float32 numbers takes half a cycle.
    """
    best = _rworker.supported_isas()[-1]
    if best != "avx512_bf16":
        return best
    newest, before = (min(times) for times in _in_turns([_Trial(best, rows=8), _Trial("avx512_vnni", rows=8)]))
    return "avx512_vnni" if before < MARGIN * newest else best


def fastest_read_ahead() -> str:
    """Return the fastest way on this machine to prefetch cached tokens, one of ``READ_AHEAD``.

    On some processors, one ascending run ("run") starts the prefetchers. Others have more buffers for "run-l2", or
    read eight memory pages at a time ("pages") fastest. The right way makes attention up to 1.5 times as fast.
    """
    trials = {way: _Trial("auto", way, SEQUENCES, KV_HEADS) for way in READ_AHEAD}
    seconds = {way: min(times) for way, times in zip(trials, _in_turns(trials.values()), strict=True)}
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < MARGIN * seconds["run"] else "run"


def _in_turns(trials: Iterable[_Trial]) -> list[tuple[float, ...]]:
    """Run the trials in turn; return each trial's times in seconds, one per round."""
    # Runs of each trial. The shortest time is used, since other processes only slow a measurement down.
    rounds = 5
    return list(zip(*([trial.seconds() for trial in trials] for _ in range(rounds)), strict=True))


class _Trial:
    """A measurement of attention: ``rows`` rows of each of ``sequences`` sequences of random bfloat16 tokens."""

    def __init__(self, isa: str, read_ahead: str = "run", sequences: int = 1, kv_heads: int = 1, rows: int = 1) -> None:
        layer = Dense(HEADS * kv_heads, kv_heads, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5)
        self._worker = _rworker.RWorker(
            layers=[layer], model_dtype="bfloat16", kv_dtype="bfloat16", block_size=64,
            num_blocks=sequences * ((CONTEXT + rows) // 64 + 1), num_threads=1, isa=isa, read_ahead=read_ahead,
        )  # fmt: skip
        self._spans = [[sequence, CONTEXT, rows, True] for sequence in range(sequences)]
        self._rows = _random(sequences * rows, HEADS * kv_heads), _random(sequences * rows, kv_heads)
        prompt, nobody = _random(CONTEXT, kv_heads), self._rows[0][:0]
        for sequence in range(sequences):
            self._step([[sequence, 0, CONTEXT, False]], nobody, prompt)
            self._worker.end_step()

    def seconds(self) -> float:
        """Return the CPU time of a step in this thread, which time slices of other processes do not affect."""
        seconds = self._step(self._spans, *self._rows)
        self._worker.abandon_step()
        return seconds

    def _step(self, spans: list[list[int]], q: np.ndarray, tokens: np.ndarray) -> float:
        """Return the seconds of a step.

        ``q``: [R, heads, HEAD_DIM]; ``tokens``: [T, kv_heads, HEAD_DIM], both keys and values.
        """
        out = np.empty_like(q)
        self._worker.begin_step(np.zeros((0, 4), np.int64), [np.array(spans)])
        start = time.thread_time()
        self._worker.run(0, 0, q, tokens, tokens, out)
        return time.thread_time() - start


def _random(rows: int, heads: int) -> np.ndarray:
    floats = np.random.default_rng(0).standard_normal((rows, heads, HEAD_DIM), dtype=np.float32)
    return np.ascontiguousarray((floats.view(np.uint32) >> 16).astype(np.uint16))


def _cache_path() -> Path:
    """Return a path per processor, version and newest instruction set. Without a home folder the path cannot exist."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode"
    except RuntimeError:  # a user without an entry in the system's table, as in containers
        folder = Path(os.devnull)
    # Version of the measurement; stored results of another version are ignored
    edition = 2
    return folder / f"tuning-{edition}-{__version__}-{cpu_identity()}-{_rworker.supported_isas()[-1]}.json"


def _keep(path: Path, measured: Tuning) -> None:
    """Store ``measured`` at ``path`` for later processes; without a writable folder they measure again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            json.dump(asdict(measured), file)
        Path(file.name).replace(path)
    except OSError:
        return
