"""The side that keeps recurrent states in a plan, R-workers or the S-worker, and the effect of this choice."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.core.errors import FastDecodeError
from fastdecode.perfmodel.lab.cli.variants.variant import Line, PlanCase, Variant


@dataclass(frozen=True)
class StatesNeed:
    """Figures of a plan with states on R-workers or on the S-worker.
    ``link_bytes_per_token``: in all layers, both ways.
    """

    num_r_workers: int
    in_flight: int
    output_tokens_per_second: float
    bottleneck: str
    link_bytes_per_token: float
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class StatePlan:
    """States on R-workers and on the S-worker, compared. ``state_on``: the plan's side, "r" or "s".

    ``r``, ``s``: None if there is no such plan; ``lacks`` says why. ``s_worker_states``: states that fit the S-worker's
    memory; None if unknown, or if R-workers keep them.
    """

    state_on: str
    r: StatesNeed | None
    s: StatesNeed | None
    s_worker_states: int | None
    lacks: str | None = None


class StateVariant(Variant[StatePlan]):
    """The side that keeps states (``--state-on``)."""

    name = "states"

    def figures(self, case: PlanCase) -> StatePlan | None:
        """Return the plans with states on R-workers and on the S-worker; None for a model without recurrent layers."""
        if not case.planner.state_bytes_per_sequence:
            return None
        chosen = "s" if case.planner.states else "r"
        other = "r" if chosen == "s" else "s"
        cases, lacks = {chosen: case}, None
        try:
            cases[other] = PlanCase.of(argparse.Namespace(**vars(case.args) | _on(other)))
        except FastDecodeError as error:
            lacks = str(error)
        places = cases["s"].planner.states if "s" in cases else None
        known = places is not None and places.num_places < float("inf")
        needs = {side: _need(each) for side, each in cases.items()}
        return StatePlan(
            chosen, needs.get("r"), needs.get("s"), int(places.num_places) if places and known else None, lacks
        )

    def lines(self, case: PlanCase, figures: StatePlan) -> Iterator[Line]:
        """Yield which side keeps states, and the figures of the other side."""
        sides = {"r": ("on R-workers", figures.r), "s": ("with the S-worker", figures.s)}
        other = "r" if figures.state_on == "s" else "s"
        (own_name, own), (other_name, rest) = sides[figures.state_on], sides[other]
        yield "states", f"{own_name} (--state-on {figures.state_on}){_yield(own)}"
        yield (
            "",
            f"{other_name} ({other}): {figures.lacks}" if rest is None else f"{other_name} ({other}){_yield(rest)}",
        )
        if figures.r and figures.s:
            sent, left = figures.r.link_bytes_per_token / 1e6, figures.s.link_bytes_per_token / 1e6
            moved = 2e-6 * case.planner.state_bytes_per_sequence
            yield (
                "",
                f"(s: {left:.3g} MB of a token on the link, not {sent:.3g}; the S-worker moves {moved:.4g} MB for it)",
            )
        if case.args.gpu and not case.args.profile:
            yield "", "(what would be: an engine runs models with recurrent layers on a CPU alone so far)"

    def s_flags(self, case: PlanCase, figures: StatePlan) -> dict[str, object]:
        """Return ``--state-on s`` and the requested ``--state-memory`` if the S-worker keeps states; else no flags."""
        if figures.state_on == "r":
            return {}
        memory = case.args.state_memory
        return {"--state-on": "s"} | ({"--state-memory": memory} if memory else {})


def _on(side: str) -> dict[str, object]:
    return {"state_on": side} | ({"state_memory": None} if side == "r" else {})


def _need(case: PlanCase) -> StatesNeed:
    plan, planner = case.plan, case.planner
    return StatesNeed(
        plan.num_r_workers, plan.in_flight, plan.output_tokens_per_second, plan.bottleneck,
        planner.num_layers * planner.transport.row_bytes, plan.price_per_million_tokens,
    )  # fmt: skip


def _yield(need: StatesNeed | None) -> str:
    if need is None:
        return ""
    price = "" if need.price_per_million_tokens is None else f", {need.price_per_million_tokens:.3g} per million"
    workers = f"{need.num_r_workers} R-worker{'s' * (need.num_r_workers != 1)}"
    return (
        f": {need.output_tokens_per_second:.0f} tokens/s with {workers} and {need.in_flight} "
        f"sequences{price}; {need.bottleneck} binds"
    )
