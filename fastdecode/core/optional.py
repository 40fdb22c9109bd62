"""Modules that only some settings need, by name. A process imports such a module when its settings need it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PARTS = {
    "aligned functions": "sworker.adapters.elementwise",
    "audit": "cluster.pool.auditing",
    "faults": "cluster.r_worker.faults",
    "calibration": "sworker.products.calibration",
    "CUDA graphs": "sworker.run.cuda_graphs",
    "CUDA staging": "sworker.run.cuda_staging",
    "handovers": "cluster.pool.handing_over",
    "GGUF": "sworker.model.gguf",
    "GGUF tokenizer": "sworker.files.gguf_tokenizer",
    "GPU rows": "sworker.model.gpu_rows",
    "integer products": "sworker.products.products",
    "kept states": "scheduler.prefix.states",
    "kept weights": "sworker.model.kept",
    "KV port": "cluster.r_worker.kv_port",
    "LoRA": "sworker.model.lora",
    "model shape": "sworker.model.shape",
    "own attention": "sworker.adapters.own_attention",
    "own positions": "sworker.adapters.own_positions",
    "sharding": "sworker.model.sharding",
    "vLLM's code": "sworker.model.vllm_code",
    "journal copies": "cluster.pool.journal_copies",
    "MPI job": "cluster.links.mpi_job",
    "MPI serving": "cluster.r_worker.serve_job",
    "MPI pool": "cluster.pool.mpi",
    "remote prefills": "prefills.remote_prefills",
    "prefill workers": "cluster.prefill.connect",
    "park door": "cluster.r_worker.parking.door",
    "park directory": "cluster.r_worker.parking.directory",
    "parking": "cluster.r_worker.parking.parker",
    "Ray pool": "cluster.ray.ray_backend",
    "spawned pool": "cluster.pool.spawn",
    "request tracer": "server.tracing",
    "speculation": "drafting.speculation",
    "state pairs": "cluster.pool.state_pairs",
    "TCP pool": "cluster.pool.tcp",
    "drafters": "drafting.drafters",
    "draft policy": "scheduler.policy.draft_policy",
    "journal": "journal.kept_journal",
    "prefill policy": "prefills.policy",
    "profile": "perfmodel.profile_json",
    "pulse": "journal.pulse",
    "rank place": "tensor_parallel.rank_place",
    "ranks": "tensor_parallel.ranks",
    "standby": "server.standby",
    "timed steps": "engine.compose.timed_steps",
}
"""Modules under ``fastdecode``. A module that asks for a part must be allowed to import it (tests/test_floors.py)."""


def optional(name: str) -> Any:
    """Import and return the module that this file lists as ``name``, such as "GGUF"."""
    return import_module(f"fastdecode.{PARTS[name]}")
