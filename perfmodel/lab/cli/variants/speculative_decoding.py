"""Speculative decoding in plans and simulations: flags, costs, and how many fewer R-workers suffice."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastdecode.cli.flags import json_object
from fastdecode.core.errors import ConfigError
from fastdecode.drafting.speculative_config import SpeculativeConfig
from fastdecode.perfmodel.equations import largest, tokens_per_verification
from fastdecode.perfmodel.lab.cli.planner_inputs import PlanInputs
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape
from fastdecode.perfmodel.lab.cli.variants.variant import Line, PlanCase, Variant
from fastdecode.perfmodel.lab.draft_times import LOOKUP_SECONDS, DraftCost, Drafting, row_share
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.step_mix import StepMix
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.rank_costs import RankSPart, rank_shape
from fastdecode.perfmodel.sizing import Plan
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart, SPart


def add_speculation_flags(group: Any) -> None:
    """Add the flags of drafts: the method, and the acceptance."""
    group.add_argument(
        "--speculative-config", type=json_object, default={}, metavar="JSON",
        help='drafts, as for the engine, such as {"method": "ngram", "num_speculative_tokens": 4} '
            "(none)",
    )  # fmt: skip
    group.add_argument(
        "--acceptance-rate", type=float, metavar="A",
        help="probability that a draft token is accepted if all earlier ones were",
    )  # fmt: skip


def read_drafting(args: argparse.Namespace, inputs: PlanInputs | None) -> Drafting | None:
    """Return the drafts that the flags ask for; None without drafts.

    ``inputs``: the S-worker and its R-workers; None for a GPU alone.

    A ConfigError names a missing or conflicting flag.
    """
    config = SpeculativeConfig.of(args.speculative_config)
    if config is None:
        if args.acceptance_rate is not None:
            raise ConfigError("acceptance_rate describes draft tokens: it needs --speculative-config beside it")
        return None
    if args.acceptance_rate is None:
        raise ConfigError("speculative_config: give --acceptance-rate too, the probability that a draft is accepted")
    if inputs is None:
        raise ConfigError("speculative_config: num_r_workers is 0, and a GPU alone is simulated without drafts")
    shape = _target_shape(args)
    share = row_share(shape.group if shape else 1)
    return Drafting(config.num_speculative_tokens, args.acceptance_rate, _cost(args, inputs, config, shape), share)


def _target_shape(args: argparse.Namespace) -> ModelShape | None:
    """Return the target model's shape; None if only bare numbers are given."""
    if args.model:
        return named_shape(args.model)
    return load_profile(args.profile).shape if args.profile else None


def _cost(
    args: argparse.Namespace, inputs: PlanInputs, config: SpeculativeConfig, shape: ModelShape | None
) -> DraftCost:
    planner = inputs.planner
    if config.method == "ngram":
        return DraftCost(sequence_seconds=LOOKUP_SECONDS)
    if config.method == "early_exit":
        if config.num_layers >= planner.num_layers:
            raise ConfigError(
                f"speculative_config: num_layers ({config.num_layers}) must be below the model's {planner.num_layers}"
            )
        return DraftCost(0.0, config.num_layers, planner.s_part, planner.r_part)
    if shape is None:
        raise ConfigError("speculative_config: draft_model needs --model beside bare numbers, to compare their sizes")
    draft = named_shape(config.model)
    return DraftCost(0.0, draft.num_layers, _draft_s_part(args, planner.s_part, shape, draft))


def _draft_s_part(args: argparse.Namespace, s_part: SPart, shape: ModelShape, draft: ModelShape) -> SPart:
    """Return the draft model's S-part: from its sizes on a named GPU, else the S-part's measured times, scaled."""
    if isinstance(s_part, RankSPart):
        rank = _draft_s_part(args, s_part.rank, shape, draft)
        return RankSPart(rank, draft, s_part.group)
    if isinstance(s_part, GpuSPart):
        return replace(s_part, shape=rank_shape(draft, args.tensor_parallel_size))
    if not isinstance(s_part, MeasuredSPart):
        raise ConfigError("speculative_config: nothing says how fast the S-worker would compute a draft_model")
    layers = draft.active_layer_parameters / shape.active_layer_parameters
    return s_part.times(layers, draft.head_parameters / shape.head_parameters)


@dataclass(frozen=True)
class SpeculationPlan:
    """The effect of drafts on a plan: how many R-workers they save, or how much faster the plan's R-workers get.
    With ``num_draft_tokens`` per sequence and step, each verification yields ``tokens_per_verification``, and
    ``num_r_workers`` R-workers give ``output_tokens_per_second``. These are at least the plan's tokens per second, with
    ``saved_r_workers`` fewer R-workers. With all R-workers of the plan, ``gain_draft_tokens`` drafts multiply its
    tokens per second by ``gain``.
    """

    acceptance_rate: float
    num_draft_tokens: int
    tokens_per_verification: float
    num_r_workers: int
    saved_r_workers: int
    r_workers_set_by: str
    step_seconds: float
    output_tokens_per_second: float
    gain: float
    gain_draft_tokens: int


class DraftVariant(Variant[SpeculationPlan]):
    """Speculative decoding (``--speculative-config``)."""

    name = "speculation"

    def figures(self, case: PlanCase) -> SpeculationPlan | None:
        """Return the drafts that save most R-workers, and those that give most tokens per second."""
        drafting = read_drafting(case.args, case.inputs)
        return plan_speculation(case.planner, case.plan, drafting) if drafting else None

    def lines(self, case: PlanCase, figures: SpeculationPlan) -> Iterator[Line]:
        """Yield the drafts that save most R-workers, and those that give most tokens per second."""
        accepted = f"{figures.acceptance_rate:.0%} are accepted"
        if figures.num_draft_tokens:
            each = f"{figures.num_draft_tokens} of each sequence and step, of which {accepted}"
            yield "draft tokens", f"{each}: {figures.tokens_per_verification:.2f} tokens per verification"
            held = ", by their memory" if figures.r_workers_set_by == "memory" else ""
            fewer = f"{figures.saved_r_workers} fewer than without{held}"
            rate = f"{figures.output_tokens_per_second:.0f} output tokens/s"
            yield "with them", f"{figures.num_r_workers} R-worker(s), {fewer}, suffice for {rate}"
        else:
            yield "draft tokens", f"where {accepted}, they save no R-worker"
        own = f"all {case.plan.num_r_workers} R-worker(s)"
        if figures.gain_draft_tokens:
            yield (
                "or",
                f"{own}, for {figures.gain:.2f} x the tokens/s with {figures.gain_draft_tokens} of each sequence",
            )
        else:
            yield "", f"with {own} they add no tokens/s"

    def s_flags(self, case: PlanCase, figures: SpeculationPlan) -> dict[str, object]:
        """Return the flag of the requested drafts."""
        return {"--speculative-config": json.dumps(case.args.speculative_config)}


def plan_speculation(planner: Planner, plan: Plan, drafting: Drafting) -> SpeculationPlan:
    """Find the number of drafts with which the fewest R-workers give the plan's tokens per second; return its effect.
    A verification reads each cache once for all its rows. So the R-part per token falls nearly by the tokens per
    verification, while the S-part has 1 + k rows instead of one.
    """
    in_flight = plan.in_flight
    least = planner.memory_r_workers(in_flight)

    def rate(count: int, drafts: int) -> float:
        return _rate(planner, in_flight, drafting, drafts, count)

    wanted = rate(plan.num_r_workers, 0)

    def sufficing(drafts: int) -> int:
        return 1 + largest(lambda count: rate(count, drafts) < wanted * (1 - 1e-9), plan.num_r_workers - 1)

    def needed(drafts: int) -> int:
        return max(sufficing(drafts), least)

    choices = range(drafting.num_speculative_tokens + 1)
    drafts = min(choices, key=lambda each: (needed(each), -rate(needed(each), each), each))
    most = max(choices, key=lambda each: (rate(plan.num_r_workers, each), -each))
    count = needed(drafts)
    tokens = tokens_per_verification(drafts, drafting.acceptance_rate)
    return SpeculationPlan(
        acceptance_rate=drafting.acceptance_rate,
        num_draft_tokens=drafts,
        tokens_per_verification=tokens,
        num_r_workers=count,
        saved_r_workers=plan.num_r_workers - count,
        r_workers_set_by="memory" if least > sufficing(drafts) else "bandwidth",
        step_seconds=StepMix.of(planner.workload, in_flight).decoding * tokens / rate(count, drafts),
        output_tokens_per_second=rate(count, drafts),
        gain=rate(plan.num_r_workers, most) / rate(plan.num_r_workers, 0),
        gain_draft_tokens=most,
    )


def _rate(planner: Planner, in_flight: int, drafting: Drafting, drafts: int, num_r_workers: int) -> float:
    """Return the output tokens per second. Accepted drafts end sequences sooner, so each second has more prompts."""
    tokens = tokens_per_verification(drafts, drafting.acceptance_rate)
    model, seconds, decoding = planner.step_model(num_r_workers), 0.0, 0.0
    for share, plain in planner.steps(in_flight, num_r_workers):
        decoding, sampled = plain.sampled, plain.sampled * (1 + drafts)
        attended = plain.kv_tokens * (1 + drafting.row_share * drafts)
        rows = (plain.rows - decoding) * tokens + sampled
        seconds += share * model.seconds(planner.load(rows, sampled, attended, num_r_workers))
        if drafts:
            seconds += share * drafting.cost.seconds(round(decoding), drafts, plain.kv_tokens, num_r_workers)
    return decoding * tokens / seconds if math.isfinite(seconds) else 0.0
