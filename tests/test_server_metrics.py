"""Metrics forget an R-worker that has left, and describe a session."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.core.metrics import StepRecord
from fastdecode.server.engine_state import EngineState, RWorkerState, SessionState
from fastdecode.server.prometheus import Metrics

STEP = StepRecord(
    is_decode=True, overlapped=True, num_tokens=2, num_output_tokens=2, kv_loads=(20, 10), wall_seconds=0.5,
    s_seconds=0.3, wait_seconds=0.15, host_seconds=0.05, r_seconds=(0.25, 0.125), transfer_seconds=(0.5, 0.5),
    kv_bytes_read=1,
)  # fmt: skip


def test_the_series_of_an_r_worker_go_with_it() -> None:
    metrics = Metrics("m")
    stays, goes = RWorkerState("stays"), RWorkerState("goes")
    for _ in range(2):
        metrics.after_step(EngineState(1.0, r_workers=(stays, goes)), [STEP], [], True)
    assert 'r_seconds_total{model_name="m",r_worker="goes"} 0.25' in metrics.text().decode()
    metrics.after_step(EngineState(2.0, r_workers=(stays, replace(goes, present=False))), [STEP], [], True)
    text = metrics.text().decode()
    assert "goes" not in text
    assert 'r_seconds_total{model_name="m",r_worker="stays"} 0.75' in text


def test_a_session_is_told_of() -> None:
    metrics = Metrics("m")
    metrics.stored_responses = lambda: (2, 300)
    metrics.after_step(EngineState(1.0), [STEP], [], True)
    assert "session" not in metrics.text().decode()
    metrics.after_step(EngineState(1.0, session=SessionState("s", 3, 4096, 0.25)), [STEP], [], True)
    text = metrics.text().decode()
    for row in ('session_epoch{model_name="m",session="s"} 3.0', 'journal_bytes{model_name="m"} 4096.0',
                'journal_seconds_total{model_name="m"} 0.25', 'stored_responses{model_name="m"} 2.0',
                'stored_response_bytes{model_name="m"} 300.0'):  # fmt: skip
        assert row in text
