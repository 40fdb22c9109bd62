"""The features of planning; each is a ``Variant``."""

from __future__ import annotations

from typing import Any

from fastdecode.perfmodel.lab.cli.variants.copies import CopyVariant
from fastdecode.perfmodel.lab.cli.variants.prefill_workers import PrefillVariant
from fastdecode.perfmodel.lab.cli.variants.ranges import RangeVariant
from fastdecode.perfmodel.lab.cli.variants.rank_counts import RankVariant
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import DraftVariant
from fastdecode.perfmodel.lab.cli.variants.states import StateVariant
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase, Variant

VARIANTS: tuple[Variant[Any], ...] = (
    StateVariant(),
    RangeVariant(),
    CopyVariant(),
    PrefillVariant(),
    DraftVariant(),
    RankVariant(),
)
"""All variants, in the order in which they change the planner and print their lines."""


def examine(case: PlanCase) -> tuple[PlanCase, dict[str, Any]]:
    """Plan ``case`` again with the cost of all features; return the new case, and each feature's figures by name."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        figures = variant.figures(case)
        if figures is not None:
            found[variant.name] = figures
            case = case.with_planner(variant.planner(case, figures))
    return case, found
