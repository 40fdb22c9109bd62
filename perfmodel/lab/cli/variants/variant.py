"""One command line of ``fastdecode plan``, and the interface of a feature that it may ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Generic, TypeVar

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.machine_inputs import PlanInputs, read_inputs
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.measurements import HERE
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.sizing import Plan

Line = tuple[str, str]
"""A line of the printed plan: its name and its text."""

Figures = TypeVar("Figures")


@dataclass(frozen=True)
class PlanCase:
    """The flags of a command line, the machine and workload that they describe, and the plan for these."""

    args: argparse.Namespace
    inputs: PlanInputs
    plan: Plan

    @staticmethod
    def of(args: argparse.Namespace) -> PlanCase:
        """Read the flags and plan; ConfigError or ProfileError for bad flags, PlanError where no plan can be."""
        cases: list[PlanCase] = []
        errors: list[PlanError] = []
        for each in _alternatives(args):
            try:
                cases.append(PlanCase._as_asked(each))
            except PlanError as error:
                errors.append(error)
        if not cases:
            raise errors[0]
        return max(cases, key=lambda case: case.worth)

    @staticmethod
    def _as_asked(args: argparse.Namespace) -> PlanCase:
        inputs = read_inputs(args)
        return PlanCase(args, inputs, inputs.planner.plan(_mini_batch_size(args, inputs.planner)))

    @property
    def worth(self) -> float:
        """By which this case is compared with one of other flags: output tokens for a unit of money, where prices are
        known, else per second."""
        price = self.plan.price_per_million_tokens
        return 1.0 / price if price else self.plan.output_tokens_per_second

    @property
    def planner(self) -> Planner:
        """The planner that made the plan."""
        return self.inputs.planner

    def with_planner(self, planner: Planner) -> PlanCase:
        """Return this case as ``planner`` plans it, for the same mini-batch size."""
        if planner is self.planner:
            return self
        return PlanCase(self.args, replace(self.inputs, planner=planner), planner.plan(self.plan.mini_batch_size))


class Variant(Generic[Figures]):
    """A feature of planning. ``name`` is the key of its figures in the JSON of a plan.

    ``figures`` alone is needed: the dataclass, or the tuple of them, that the other methods take.
    """

    name: str

    def figures(self, case: PlanCase) -> Figures | None:
        """Return what the feature needs and gives; None where it was not asked for."""
        raise NotImplementedError

    def planner(self, case: PlanCase, figures: Figures) -> Planner:
        """Return the planner with what the feature costs: the case's own unless the feature changes it."""
        return case.planner

    def lines(self, case: PlanCase, figures: Figures) -> Iterator[Line]:
        """Yield the lines that stand below the plan's figures."""
        return iter(())

    def table(self, case: PlanCase, figures: Figures) -> Iterator[str]:
        """Yield the lines of a table below the candidates."""
        return iter(())

    def s_flags(self, case: PlanCase, figures: Figures) -> Mapping[str, object]:
        """Return the S-worker's flags, with values, that turn the feature on: ``--emit`` writes them."""
        return {}


def as_json(figures: Any) -> Any:
    """Return the figures of a variant as a JSON object, or as an array of them."""
    return asdict(figures) if is_dataclass(figures) and not isinstance(figures, type) else [asdict(f) for f in figures]


def _alternatives(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The flags with each of the sides that may multiply K and V of latents, or keep states."""
    for each in _absorptions(args):
        is_open = args.state_on == "auto"
        yield argparse.Namespace(**vars(each) | ({"state_on": "r"} if is_open else {}))
        if is_open and _knows_states_here(args):
            yield argparse.Namespace(**vars(each) | {"state_on": "s"})


def _knows_states_here(args: argparse.Namespace) -> bool:
    """Whether what is named, or measured, has the time of states that the S-worker keeps."""
    if args.profile:
        return any(point.kind == "state" and point.r_worker == HERE for point in load_profile(args.profile).r_part)
    return bool(args.model and args.gpu and args.cpu and named_shape(args.model).state)


def _absorptions(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The flags with each of the sides that may multiply K and V of latents, the S-worker first."""
    is_open = args.latent_absorption == "auto"
    yield argparse.Namespace(**vars(args) | ({"latent_absorption": "s"} if is_open else {}))
    if is_open and _knows_both(args):  # asked once the flags have proven right
        yield argparse.Namespace(**vars(args) | {"latent_absorption": "r"})


def _knows_both(args: argparse.Namespace) -> bool:
    """Whether what is named, or measured, has the times of either side."""
    if args.profile:
        return any(point.kind == "absorbing" for point in load_profile(args.profile).r_part)
    return bool(args.model and args.gpu and args.cpu and named_shape(args.model).latent)


def _mini_batch_size(args: argparse.Namespace, planner: Planner) -> int:
    """As asked; else the largest within the latency limit; else at the knee of E(B)."""
    if args.mini_batch_size is not None:
        return int(args.mini_batch_size)
    if args.latency_limit is not None:
        return planner.largest_mini_batch(args.latency_limit)
    return planner.knee_mini_batch()
