"""Parts that only some settings need, by name. A process imports such a part once its settings ask for the part."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PARTS = {
    "journal copies": "cluster.pool.journal_copies",
    "MPI job": "cluster.links.mpi_job",
    "MPI pool": "cluster.pool.mpi",
    "prefill workers": "cluster.prefill.connect",
    "Ray pool": "cluster.ray.ray_backend",
    "spawned pool": "cluster.pool.spawn",
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
    "timed steps": "engine.compose.timed_steps",
}
"""Modules under ``fastdecode``. Whoever asks for a part must be allowed to import its module (tests/test_floors.py)."""


def part(name: str) -> Any:
    """Import the module of the part ``name`` and return it."""
    return import_module(f"fastdecode.{PARTS[name]}")
