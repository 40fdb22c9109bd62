"""Makes S-workers capture their graphs through the stand-in for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from doubles.graph_recorder import FakeRecorder

from fastdecode.sworker.model import transformers_code
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.support import probe_layers
from fastdecode.sworker.run import cuda_graphs, s_worker
from fastdecode.sworker.run.cuda_graphs import ModelGraphs


class Unreplaced:
    """Disables replacements that are only for a CPU and that the stand-in for graphs cannot see."""

    def __init__(self, model: torch.nn.Module) -> None:
        pass

    def undo(self) -> None:
        pass


def fake_recorders(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    """Return the list of stand-ins that S-workers made from now on capture through."""
    made: list[FakeRecorder] = []

    def make(code: ModelCode, recorder: FakeRecorder, *more: int) -> ModelGraphs:
        recorder.num_layers = len(probe_layers(code, code.module.config))
        return ModelGraphs(code, recorder, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(s_worker, "make_recorder", lambda device: made.append(FakeRecorder(0)) or made[-1])
    monkeypatch.setattr(cuda_graphs, "ModelGraphs", make)
    for name in ("PackedLinears", "FusedRows"):
        monkeypatch.setattr(transformers_code, name, Unreplaced)
    return made
