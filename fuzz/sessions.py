"""Fuzz targets with state: an R-worker's session in this process, its KV port, and the S-worker's side of a session."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from answers import AnswersRun
from kv_ports import KvPortRun
from session_runs import SessionRun


def run_kv_port(data: bytes) -> None:
    KvPortRun(data).run()


def run_session(data: bytes) -> None:
    SessionRun(data).run()


def run_answers(data: bytes) -> None:
    AnswersRun(data).run()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "session": run_session,
    "answers": run_answers,
    "kv-port": run_kv_port,
}
_RNG = np.random.default_rng(0)
SEEDS: dict[str, list[bytes]] = {name: [_RNG.bytes(400) for _ in range(20)] for name in TARGETS}
