"""Prefill workers in plans and simulations: flags, speed, how many a plan needs, and the first token."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import parse_link
from fastdecode.perfmodel.lab.cli.machine_flags import BARE_FLAGS, DEFAULT_LINK
from fastdecode.perfmodel.lab.cli.named_machine import one_gpu
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape, profiled_shape
from fastdecode.perfmodel.lab.cli.variants.variant import Line, PlanCase, Variant
from fastdecode.perfmodel.partition import NO_TABLE, Forecast, PartitionTable, closed_form
from fastdecode.perfmodel.prefill_rates import gpu_prefill_model, measured_prefill_model
from fastdecode.perfmodel.prefill_times import PrefillLink, PrefillTimes
from fastdecode.perfmodel.profile_json import load_profile

AUTOMATIC = -1
"""The number of prefill workers that stands for as many as keep up."""

MOST_BUSY = 0.8
"""Most busy share of the prefill workers in a plan. Beyond it, prompts wait longer than they take."""


def add_prefill_flags(group: Any, automatic: bool) -> None:
    """Add the flags of prefill workers. ``automatic``: allow "auto" as their number."""
    group.add_argument(
        "--num-prefill-workers", type=_auto_count if automatic else _count, metavar="N",
        help="number of workers that compute prompts (none)" + ("; auto: as many as keep up" * automatic),
    )  # fmt: skip
    group.add_argument("--prefill-gpu", metavar="NAME", help="GPU of each prefill worker (the S-worker's)")
    group.add_argument(
        "--prefill-link", metavar="RATE", help=f"bandwidth between prefill workers, such as 300GB ({DEFAULT_LINK})"
    )


def prefill_forecast(args: argparse.Namespace) -> Forecast | None:
    """Return an object that predicts the times of prefill workers; None without prefill workers.

    Raise ConfigError or ProfileError if their speed is unknown.
    """
    if args.num_prefill_workers is None:
        for name in ("prefill_gpu", "prefill_link"):
            if getattr(args, name):
                raise ConfigError(f"{name} describes prefill workers: it needs --num-prefill-workers beside it")
        return None
    if any(getattr(args, name) is not None for name in BARE_FLAGS):
        raise ConfigError("num_prefill_workers: bare numbers do not say how fast prefill workers are; name the machine")
    if args.profile and not args.prefill_gpu:
        return _measured(args)
    shape, link = named_shape(args.model), parse_link(args.prefill_link or args.link or DEFAULT_LINK)
    gpu = one_gpu(args.prefill_gpu or args.gpu).times(args.tensor_parallel_size)
    return Forecast(gpu_prefill_model(shape, gpu, PrefillLink(link), args.kv_cache_dtype), NO_TABLE)


def _measured(args: argparse.Namespace) -> Forecast:
    if args.prefill_link:
        raise ConfigError("prefill_link: the profile says how fast the links of its prefill workers are")
    profile = load_profile(args.profile)
    count, shape = max(args.num_prefill_workers, 1), profiled_shape(args, profile)
    model = measured_prefill_model(profile, count, shape, args.kv_cache_dtype)
    return Forecast(model, PartitionTable(profile.partitions))


def _count(text: str) -> int | None:
    """Parse the number of prefill workers; return None for 0."""
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise argparse.ArgumentTypeError(f"must be a whole number of prefill workers, not {text!r}")
    return int(text) or None


def _auto_count(text: str) -> int | None:
    return AUTOMATIC if text == "auto" else _count(text)


@dataclass(frozen=True)
class PrefillPlan:
    """The prefill workers of a plan, with each prompt on one of them by default.

    ``busy``: the fraction of time that workers compute, at the plan's throughput. ``ttft_seconds``: time to first token
    at that load; None if there are too few workers. ``ttft_alone_seconds``, ``ttft_chain_seconds``: of a prompt that
    finds all workers free, on one worker, and on the fastest chain, which cuts it into ``parts``. ``tbt_seconds``: time
    between tokens. ``tbt_without_seconds``: time between tokens if the S-worker computed the prompts too.
    """

    num_prefill_workers: int
    prompt_len: int
    prompts_per_second: float
    busy: float
    ttft_seconds: float | None
    ttft_alone_seconds: float
    ttft_chain_seconds: float
    parts: tuple[int, ...]
    tbt_seconds: float
    tbt_without_seconds: float


class PrefillVariant(Variant[PrefillPlan]):
    """Prefill workers that compute the prompts (``--num-prefill-workers``)."""

    name = "prefill"

    def figures(self, case: PlanCase) -> PrefillPlan | None:
        """Plan the requested workers, or the fewest that compute at most a fraction ``MOST_BUSY`` of the time."""
        forecast = prefill_forecast(case.args)
        if forecast is None:
            return None
        workload = case.planner.workload
        if workload.prompt_len <= workload.shared_prefix_len:
            raise ConfigError("num_prefill_workers: there are no prompts to compute; give --prompt-len")
        asked = case.args.num_prefill_workers
        return _plan(case, forecast.model, None if asked == AUTOMATIC else asked)

    def lines(self, case: PlanCase, figures: PrefillPlan) -> Iterator[Line]:
        """Yield the workers' load, the time to first token, and the time between tokens."""
        prompts = f"{figures.prompts_per_second:.3g} prompts/s of {figures.prompt_len} tokens"
        yield "prefill workers", f"{figures.num_prefill_workers}: {prompts} keep them {figures.busy:.0%} busy"
        waits = "grows without end: too few" if figures.ttft_seconds is None else f"{figures.ttft_seconds:.3g} s"
        chain = f"{figures.ttft_chain_seconds:.3g} s on a chain of {len(figures.parts)}"
        yield "first token", f"{waits} at that load; {figures.ttft_alone_seconds:.3g} s on one free worker, {chain}"
        tbt, without = figures.tbt_seconds * 1e3, figures.tbt_without_seconds * 1e3
        yield "between tokens", f"{tbt:.3g} ms ({without:.3g} ms where the S-worker computes the prompts)"


def _plan(case: PlanCase, model: PrefillTimes, num_workers: int | None) -> PrefillPlan:
    """Plan the prefill workers. Prompts arrive at random, and queue as in Sakasegawa's approximation of M/D/n.

    The engine notices a computed prompt between two steps, which adds half a step.
    """
    planner, plan = case.planner, case.plan
    workload, tbt_seconds = planner.workload, plan.step_seconds
    local = replace(planner, workload=replace(workload, remote_prompts=False))
    prompt_len = max(round(workload.prompt_len - workload.shared_prefix_len), 1)
    alone = model.alone_seconds(prompt_len)
    rate = plan.output_tokens_per_second / workload.output_len
    count = num_workers or max(1, math.ceil(rate * alone / MOST_BUSY - 1e-9))
    chains = [closed_form(model, prompt_len, size) for size in range(1, min(count, prompt_len) + 1)]
    parts = min(chains, key=lambda parts: model.chain_seconds(parts)[-1])
    busy, noticed = rate * alone / count, tbt_seconds / 2
    wait = alone / 2 * busy ** (math.sqrt(2 * (count + 1)) - 1) / (count * (1 - busy)) if busy < 1 else None
    return PrefillPlan(
        num_prefill_workers=count,
        prompt_len=prompt_len,
        prompts_per_second=rate,
        busy=busy,
        ttft_seconds=None if wait is None else wait + alone + noticed,
        ttft_alone_seconds=alone + noticed,
        ttft_chain_seconds=model.chain_seconds(parts)[-1] + noticed,
        parts=parts,
        tbt_seconds=tbt_seconds,
        tbt_without_seconds=local.candidate(plan.mini_batch_size, plan.num_r_workers).step_seconds,
    )
