"""The requests of ``fastdecode simulate``: random, recorded in a trace, or with a paper's distribution of lengths."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.bounds import check_simulated_memory
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape
from fastdecode.perfmodel.lab.measure.dataset import WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.simulate import SimulatedWorkload
from fastdecode.perfmodel.lab.simulate.workload import SARATHI, drawn_workload, read_trace, traced_workload

DATASETS = ("random", "trace", *SARATHI)
UNBOUNDED_TOKENS = 1 << 40
"""Cached tokens assumed to fit if the memory is unknown."""

VOCABULARY = 32000
"""Vocabulary of random prompts without a model; it does not affect lengths."""


def read_workload(args: argparse.Namespace) -> tuple[SimulatedWorkload, float]:
    """Return the requests and their rate. A trace has its own rate, unless ``--request-rate`` gives another.

    A ConfigError names the bad flag.
    """
    spec = _spec(args)
    if spec.dataset_name in SARATHI:
        check_simulated_memory(spec.num_prompts, SARATHI[spec.dataset_name].max_total)
        return drawn_workload(SARATHI[spec.dataset_name], spec.num_prompts, spec.seed), spec.request_rate
    if spec.dataset_name == "trace":
        path = Path(str(spec.dataset_path))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read dataset {path}: {error}") from None
        lines = read_trace(text, str(path))[: args.num_prompts]
        check_simulated_memory(len(lines), sum(line.prompt_len for line in lines) / max(len(lines), 1))
        traced = traced_workload(lines)
        return traced, traced.own_rate if args.request_rate is None else spec.request_rate
    vocabulary = named_shape(args.model).vocab_size if args.model else VOCABULARY
    longest_prompt = spec.random_prefix_len + spec.random_input_len * (1 + spec.random_range_ratio)
    check_simulated_memory(spec.num_prompts, longest_prompt)
    at_one = WorkloadSpec(**vars(spec) | {"request_rate": 1.0})
    items = make_workload(at_one, vocabulary, UNBOUNDED_TOKENS, None)
    prompts, outputs = [item.prompt_token_ids for item in items], [item.output_len for item in items]
    arrivals = np.array([item.arrival_seconds for item in items])
    return SimulatedWorkload(prompts, outputs, arrivals), spec.request_rate


def _spec(args: argparse.Namespace) -> WorkloadSpec:
    """Return the workload flags, checked as ``bench throughput`` checks them."""
    given = {name: getattr(args, name) for name in WorkloadSpec.__dataclass_fields__}
    if args.dataset_path and args.dataset_name != "trace":
        raise ConfigError(f"dataset_path: dataset {args.dataset_name!r} reads no file; it is for --dataset-name trace")
    if args.dataset_name in SARATHI:
        given["dataset_path"] = "built in"
    if args.request_rate is None:
        given["request_rate"] = math.inf
    if args.num_prompts is None:
        given["num_prompts"] = 512 if args.dataset_name in SARATHI else WorkloadSpec().num_prompts
    return WorkloadSpec(**given)
