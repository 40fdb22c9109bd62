"""What the metrics keep: nothing of an R-worker that is gone."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.core.metrics import StepRecord
from fastdecode.server.observer import EngineState, RWorkerState
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
