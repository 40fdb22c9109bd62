"""Checks whether the engine can run a plan at all, before the plan is recommended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.kinds.kind import LayerKind, Way
from fastdecode.perfmodel.lab.cli.named_machine import HERE_WORD
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase
from fastdecode.perfmodel.model_shape import ModelShape


def check_runs(name_or_path: str | None) -> None:
    """Raise UnsupportedModelError if the engine refuses all models of this type."""
    kind = _model_type(name_or_path)
    # Types of models that the engine refuses to load (docs/models.md)
    refused_types = {
        "bart", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt", "cpmant", "deepseek_v4",
        "diffllama", "doge", "gemma4_unified_assistant", "git", "hrm_text", "marian", "mbart", "mllama", "moshi",
        "mvp", "pegasus", "plbart", "prophetnet", "reformer", "roformer", "rwkv", "trocr", "whisper", "xlm", "xlnet",
        "xlstm", "zaya",
    }  # fmt: skip
    if kind in refused_types:
        raise UnsupportedModelError(
            f"{name_or_path}: the engine refuses models of the type {kind} (docs/models.md says why): nothing to plan"
        )


def engine_cannot(case: PlanCase) -> str | None:
    """Return why the engine cannot run the plan: a layer of the model lacks a needed feature. Return None if it can."""
    if not case.args.model or case.inputs.shape is None:
        return None
    for way in _ways(case):
        for layer in _layers(case.inputs.shape):
            if reason := layer.cannot(way):
                return f"{way}: {reason}"
    return None


def _ways(case: PlanCase) -> Iterator[Way]:
    """Yield the engine's features that the plan uses, and that not every kind of layer supports."""
    if case.args.gpu and case.args.gpu != HERE_WORD:
        yield "gpu"
    if case.plan.tensor_parallel_size > 1:
        yield "ranks"
    if case.plan.kv_replicas > 1:
        yield "copies"
    if case.args.num_prefill_workers:
        yield "prefill workers"


def _layers(shape: ModelShape) -> tuple[LayerKind, ...]:
    states = (shape.state.layer_layout(shape.item_bytes),) if shape.state else ()
    return (*shape.kv_layout(shape.dtype).layers[:1], *states)


def _model_type(name_or_path: str | None) -> str | None:
    path = Path(name_or_path or "")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("model_type") if isinstance(found, dict) else None
