"""The plan for one command line, and the interface of planning's optional features (copies, ranges, drafts, …)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Generic, TypeVar

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.batch_search import BatchSearch
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
from fastdecode.perfmodel.lab.cli.named_machine import one_gpu_or_cpu
from fastdecode.perfmodel.lab.cli.planner_inputs import PlanInputs
from fastdecode.perfmodel.lab.cli.shape_inputs import asked_shape, named_shape
from fastdecode.perfmodel.lab.gpu_only import fewest_gpus
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.measurements import HERE
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.service import DEFAULT_TPOT_SECONDS, NO_LIMITS, ServiceLimits
from fastdecode.perfmodel.sizing import Plan

USUAL_MINI_BATCHES = 2
"""The paper's number of mini-batches, kept unless another gives clearly more."""

BY_LIMITS = "limits"
"""The reason of a plan's number of R-workers if users' times, not the S-worker's speed, determine it."""


Line = tuple[str, str]
"""A line of the printed plan: name and text."""

Figures = TypeVar("Figures")


@dataclass(frozen=True)
class PlanCase:
    """The flags of a command line, its machine and workload, and the plan for them."""

    args: argparse.Namespace
    inputs: PlanInputs
    plan: Plan
    limits: ServiceLimits = NO_LIMITS

    @staticmethod
    def of(args: argparse.Namespace) -> PlanCase:
        """Read the flags and plan. Raise ConfigError or ProfileError for bad flags, PlanError if there is no plan.

        Among several plans, those within the limits win, and among these the one with the highest ``worth``.
        """
        args = with_enough_gpus(args)
        cases: list[PlanCase] = []
        errors: list[PlanError] = []
        for each in _alternatives(args):
            try:
                cases.append(PlanCase._as_asked(each))
            except PlanError as error:
                errors.append(error)
        if not cases:
            raise errors[0]
        best = max(cases, key=PlanCase._merit)
        asked = argparse.Namespace(**vars(best.args) | {"num_mini_batches": args.num_mini_batches})
        return replace(best, args=asked)  # a feature may plan again, with another number

    @staticmethod
    def _as_asked(args: argparse.Namespace) -> PlanCase:
        inputs, limits = read_inputs(args), service_limits(args)
        case = PlanCase._planned(args, inputs, limits)
        if limits == NO_LIMITS or inputs.planner.num_r_workers or args.mini_batch_size is not None:
            return case
        return case._with_more_r_workers()._with_fewest_r_workers()

    @staticmethod
    def _planned(args: argparse.Namespace, inputs: PlanInputs, limits: ServiceLimits) -> PlanCase:
        size = _mini_batch_size(args, BatchSearch(inputs.planner), limits)
        return PlanCase(args, inputs, inputs.planner.plan(size), limits)

    def _with_more_r_workers(self) -> PlanCase:
        """Double the R-workers as long as :func:`_helps` says so.
        With enough R-workers to keep up, attention takes as long as the S-part. More R-workers shorten it, so that a
        larger batch meets the latency limits.
        """
        best = self
        while True:
            count = 2 * best.plan.num_r_workers
            inputs = replace(self.inputs, planner=replace(self.planner, num_r_workers=count))
            try:
                more = PlanCase._planned(self.args, inputs, self.limits)
            except PlanError:
                return best
            if not _helps(more, best):
                return best
            best = replace(more, plan=replace(more.plan, r_workers_set_by=BY_LIMITS))

    def _with_fewest_r_workers(self) -> PlanCase:
        """Return the plan with the fewest R-workers that serve the same users within the limits at the same speed.
        Doubling may have added too many, and R-workers without a sequence make each step slower.
        """
        plan, planner = self.plan, self.planner
        # Fraction of the plan's tokens per second that fewer R-workers must reach
        as_fast = 0.99
        least = max(planner.memory_r_workers(plan.in_flight), planner.placing.copies, plan.num_r_workers // 2)
        for count in range(least, plan.num_r_workers):
            row = planner.candidate(plan.mini_batch_size, count)
            first = planner.first_token_seconds(plan.in_flight, count)
            keeps = self.limits.kept_by(row.step_seconds, first) or not self.keeps_limits
            if keeps and row.output_tokens_per_second >= as_fast * plan.output_tokens_per_second:
                fewer = replace(planner, num_r_workers=count)
                found = replace(fewer.plan(plan.mini_batch_size), r_workers_set_by=BY_LIMITS)
                return PlanCase(self.args, replace(self.inputs, planner=fewer), found, self.limits)
        return self

    @property
    def keeps_limits(self) -> bool:
        """True if the plan's time per token and time to first token are within the limits."""
        return self.limits.kept_by(self.plan.step_seconds, self.plan.ttft_seconds)

    def _merit(self) -> tuple[bool, float]:
        """Return a sort key of plans: those within the latency limits by ``worth``, below them the others by speed.

        Plans with two mini-batches get a bonus, so that another number must be clearly better.
        """
        if not self.keeps_limits:
            return False, 1.0 / self.plan.step_seconds
        # Factor by which another number of mini-batches than two must raise ``worth``
        usual_bonus = 1.05
        return True, self.worth * (usual_bonus if self.plan.num_mini_batches == USUAL_MINI_BATCHES else 1.0)

    @property
    def worth(self) -> float:
        """The measure for comparing cases: output tokens per unit of money, or per second without prices."""
        price = self.plan.price_per_million_tokens
        return 1.0 / price if price else self.plan.output_tokens_per_second

    @property
    def planner(self) -> Planner:
        """The planner of the plan."""
        return self.inputs.planner

    def with_planner(self, planner: Planner) -> PlanCase:
        """Return this case planned by ``planner``, with the same mini-batch size."""
        if planner is self.planner:
            return self
        plan = planner.plan(self.plan.mini_batch_size)
        if self.plan.r_workers_set_by == BY_LIMITS:
            plan = replace(plan, r_workers_set_by=BY_LIMITS)
        return PlanCase(self.args, replace(self.inputs, planner=planner), plan, self.limits)


def _helps(more: PlanCase, best: PlanCase) -> bool:
    """Return whether ``more``, with twice the R-workers of ``best``, is clearly better.
    If ``best`` exceeds the latency limits, steps must be shorter. Otherwise tokens per money must rise (``worth``).
    """
    # Factor by which twice the R-workers must shorten steps that exceed the limits
    step_doubling = 1.1
    if not best.keeps_limits:
        return more.keeps_limits or more.plan.step_seconds * step_doubling < best.plan.step_seconds
    # Factor by which twice the R-workers must raise ``worth`` within the limits
    worth_doubling = 1.25
    return more.keeps_limits and more.worth > worth_doubling * best.worth


class Variant(Generic[Figures]):
    """An optional feature of a plan, such as speculative decoding. ``name``: the key of its figures in the plan's JSON.

    Subclasses must have ``figures``, which returns a dataclass or a tuple of dataclasses. Other methods take that
    result.
    """

    name: str

    def figures(self, case: PlanCase) -> Figures | None:
        """Compute what the feature costs and gains in ``case``; return None if the flags do not ask for it."""
        raise NotImplementedError

    def planner(self, case: PlanCase, figures: Figures) -> Planner:
        """Return ``case.planner`` with the cost of the feature; by default there is none."""
        return case.planner

    def lines(self, case: PlanCase, figures: Figures) -> Iterator[Line]:
        """Yield the feature's lines for the printed plan."""
        return iter(())

    def table(self, case: PlanCase, figures: Figures) -> Iterator[str]:
        """Yield the lines of a table, printed below the plan's candidate numbers of R-workers."""
        return iter(())

    def s_flags(self, case: PlanCase, figures: Figures) -> Mapping[str, object]:
        """Return the S-worker's flags, with values, that turn the feature on, for ``--emit``."""
        return {}


def as_json(figures: Any) -> Any:
    """Return a variant's figures as a JSON object, or as an array of them."""
    return asdict(figures) if is_dataclass(figures) and not isinstance(figures, type) else [asdict(f) for f in figures]


def with_enough_gpus(args: argparse.Namespace) -> argparse.Namespace:
    """Return the flags with the fewest GPUs, a power of two, that hold the weights, if no number was given."""
    if args.tensor_parallel_size is not None:
        return args
    number = 1
    if args.model and args.gpu and not args.profile:
        shape, gpu = asked_shape(args), one_gpu_or_cpu(args.gpu, bool(args.quantization))
        number = fewest_gpus(shape, gpu) or 1
        if number > 1:  # ranks keep unpacked weights, which need more memory
            number = fewest_gpus(replace(shape, weight_bits=0.0), gpu) or 1
    return argparse.Namespace(**vars(args) | {"tensor_parallel_size": number})


def service_limits(args: argparse.Namespace) -> ServiceLimits:
    """Return the limits in the flags: 100 ms per token unless another flag sets the number of sequences."""
    sized = args.mini_batch_size is not None or args.latency_limit is not None
    tpot = math.inf if sized else DEFAULT_TPOT_SECONDS
    if args.tpot is not None:
        tpot = args.tpot / 1e3
    return ServiceLimits(tpot, math.inf if args.ttft is None else args.ttft)


def _alternatives(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the flags for every combination that a plan may choose.

    It may choose the number of mini-batches, and whether S-worker or R-workers absorb latents and keep states."""
    for number in mini_batch_counts(args):
        counted = argparse.Namespace(**vars(args) | {"num_mini_batches": number})
        for each in _absorptions(counted):
            is_open = args.state_on == "auto"
            yield argparse.Namespace(**vars(each) | ({"state_on": "r"} if is_open else {}))
            if is_open and _knows_states_here(args):
                yield argparse.Namespace(**vars(each) | {"state_on": "s"})


def mini_batch_counts(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the numbers of mini-batches to compare: only the requested one, or two, one and three.

    If flags fix the batch size or drop the time limit per token, return only two, as in the paper.
    """
    if args.num_mini_batches is not None:
        return (args.num_mini_batches,)
    sized = args.mini_batch_size is not None or args.latency_limit is not None or args.tpot == math.inf
    return (USUAL_MINI_BATCHES,) if sized else (USUAL_MINI_BATCHES, 1, 3)


def _knows_states_here(args: argparse.Namespace) -> bool:
    """Return whether the flags give the time that recurrent states take on the S-worker."""
    if args.profile:
        return any(point.kind == "state" and point.r_worker == HERE for point in load_profile(args.profile).r_part)
    return bool(args.model and args.gpu and args.cpu and named_shape(args.model).state)


def _absorptions(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the flags with latent absorption on the S-worker, then on R-workers if their time for it is known."""
    is_open = args.latent_absorption == "auto"
    yield argparse.Namespace(**vars(args) | ({"latent_absorption": "s"} if is_open else {}))
    if is_open and _knows_both(args):
        yield argparse.Namespace(**vars(args) | {"latent_absorption": "r"})


def _knows_both(args: argparse.Namespace) -> bool:
    """Return whether the flags give the time that latent absorption takes on R-workers."""
    if args.profile:
        return any(point.kind == "absorbing" for point in load_profile(args.profile).r_part)
    return bool(args.model and args.gpu and args.cpu and named_shape(args.model).latent)


def _mini_batch_size(args: argparse.Namespace, search: BatchSearch, limits: ServiceLimits) -> int:
    """Return the requested mini-batch; else the largest within the limits, or the smallest if none is.

    The size never exceeds ``BatchSearch.knee``, beyond which throughput hardly rises.
    """
    if args.mini_batch_size is not None:
        return int(args.mini_batch_size)
    most = None if args.latency_limit is None else search.largest_mini_batch(args.latency_limit)
    if limits == NO_LIMITS:
        return most or search.knee()
    within = search.within(limits) or search.smallest()
    return min(within, most or within)
