"""From the flags of ``plan`` and ``simulate`` to a model of speculative decoding."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fastdecode.cli.flags import json_object
from fastdecode.cli.machine_inputs import PlanInputs, named_shape
from fastdecode.core.errors import ConfigError
from fastdecode.drafting.config import SpeculativeConfig
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.speculation import LOOKUP_SECONDS, DraftCost, Drafting, row_share
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart, SPart
from fastdecode.perfmodel.tensor_parallel import RankSPart, rank_shape


def add_speculation_flags(group: Any) -> None:
    """Drafts as ``--speculative-config`` describes them, and how many of them are accepted."""
    group.add_argument(
        "--speculative-config", type=json_object, default={}, metavar="JSON",
        help='as the engine takes it, such as {"method": "ngram", "num_speculative_tokens": 4} (none)',
    )  # fmt: skip
    group.add_argument(
        "--acceptance-rate", type=float, metavar="A",
        help="probability that a draft token is accepted where those before it were",
    )  # fmt: skip


def read_drafting(args: argparse.Namespace, inputs: PlanInputs | None) -> Drafting | None:
    """None where nothing is drafted; ``inputs``: of the S-worker and its R-workers, None for a GPU alone.

    ConfigError names the flag that is missing or cannot stand beside another.
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
    """None where bare numbers say nothing of it."""
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
    """Of the draft model on the S-worker: by its sizes on a named GPU, else the measured times by the weights."""
    if isinstance(s_part, RankSPart):
        rank = _draft_s_part(args, s_part.rank, shape, draft)
        return RankSPart(rank, draft, s_part.group)
    if isinstance(s_part, GpuSPart):
        return replace(s_part, shape=rank_shape(draft, args.tensor_parallel_size))
    if not isinstance(s_part, MeasuredSPart):
        raise ConfigError("speculative_config: nothing says how fast the S-worker would compute a draft_model")
    layers = draft.active_layer_parameters / shape.active_layer_parameters
    return s_part.times(layers, draft.head_parameters / shape.head_parameters)
