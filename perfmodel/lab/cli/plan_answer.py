"""The answer of ``fastdecode plan``: the plan, the same GPU without R-workers, and which of them to choose."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.engine_says import check_runs, engine_cannot
from fastdecode.perfmodel.lab.cli.variants import examine
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase, with_enough_gpus
from fastdecode.perfmodel.lab.gpu_only import GpuOnly
from fastdecode.perfmodel.lab.verdict import Verdict, judge
from fastdecode.perfmodel.service import Service
from fastdecode.perfmodel.sizing import Plan, Prices


@dataclass(frozen=True)
class PlanAnswer:
    """A plan compared with the GPU alone (without R-workers).

    ``found``: figures of optional features, such as prefill workers, by ``Variant.name``. ``unlimited``: the plan
    without latency limits; None if the limits cost no throughput.
    """

    case: PlanCase
    found: dict[str, Any]
    alone: GpuOnly | None
    verdict: Verdict
    unlimited: Plan | None = None

    @property
    def service(self) -> Service:
        """Latency, throughput and price of the plan. Prefill workers, if any, determine the time to first token."""
        plan, prefill = self.case.plan, self.found.get("prefill")
        first = plan.ttft_seconds if prefill is None else prefill.ttft_seconds or math.inf
        price = self.prices.per_million_tokens(plan.num_hosts, plan.output_tokens_per_second)
        return replace(plan.service, ttft_seconds=first, price_per_million_tokens=price)

    @property
    def prices(self) -> Prices:
        """The prices in the flags. Without ``--gpu-price``: list prices, except for a host with ``--cpu-price``."""
        given, listed = self.case.planner.prices, self.case.inputs.list_prices
        if given.gpu_per_hour is not None:
            return given
        host = given.cpu_host_per_hour
        return listed if host is None else replace(listed, cpu_host_per_hour=host)

    @property
    def uses_list_prices(self) -> bool:
        """True if no price was given and there is a list price of the GPU."""
        return self.case.planner.prices.gpu_per_hour is None and self.prices.gpu_per_hour is not None

    @property
    def alone_service(self) -> Service | None:
        """Latency, throughput and price of the GPU alone; None if it was not compared, or cannot run a sequence."""
        if self.alone is None:
            return None
        return self.alone.service(self.prices.per_million_tokens(0, self.alone.output_tokens_per_second))

    @property
    def fewest_alone(self) -> tuple[int, Service] | None:
        """The fewest compared GPUs that can run a sequence without R-workers, and their service with an infinite TTFT.
        None if the plan's own GPUs can run a sequence.
        """
        if self.alone_service or self.case.inputs.one_host:
            return None
        services = ((row.tensor_parallel_size, row.alone(self.prices)) for row in self.found.get("tensor_parallel", ()))
        return next(((number, service) for number, service in services if service), None)


def answer_of(args: argparse.Namespace) -> PlanAnswer:
    """Plan as the flags ask, and compare with the GPU alone. Raise PlanError if there is no plan."""
    check_runs(args.model)
    args = with_enough_gpus(args)
    case, found = examine(PlanCase.of(args))
    limit = math.inf if args.latency_limit is None else args.latency_limit
    server = case.inputs.server
    alone = server.best(limit, case.limits) if server else None
    verdict = judge(case.plan, alone, case.planner.prices, case.limits)
    if reason := engine_cannot(case):
        on_paper = f"On paper: {verdict.sentence}"
        verdict = Verdict(False, f"Do not plan on this: no engine runs it today ({reason}). {on_paper}")
    return PlanAnswer(case, found, alone, verdict, _unlimited(args, case))


def _unlimited(args: argparse.Namespace, case: PlanCase) -> Plan | None:
    """Return the plan without latency limits, if it gives over 1 % more tokens per second."""
    if args.mini_batch_size is not None or args.latency_limit is not None:
        return None
    try:
        plan = PlanCase.of(argparse.Namespace(**vars(args) | {"tpot": math.inf, "ttft": None})).plan
    except PlanError:
        return None
    return plan if plan.output_tokens_per_second > 1.01 * case.plan.output_tokens_per_second else None


def plan_figures(answer: PlanAnswer) -> dict[str, Any]:
    """Return the object of ``--output-json`` without the figures in ``PlanAnswer.found``; unknown figures are null."""
    case, alone = answer.case, answer.alone
    unknown = dict.fromkeys(("max_batch_size", "output_tokens_per_second", "step_seconds", "limited_by"))
    gpu_only = {**asdict(alone), **service_figures(answer.alone_service)} if alone else unknown
    rate = alone.output_tokens_per_second if alone else 0.0
    gpu_only["price_per_million_tokens"] = case.planner.prices.per_million_tokens(0, rate)
    limits = {"tpot_seconds": case.limits.tpot_seconds, "ttft_seconds": case.limits.ttft_seconds}
    return {
        **asdict(case.plan),
        **service_figures(answer.service),
        "gpu_only": gpu_only,
        "use_fastdecode": answer.verdict.use_fastdecode,
        "verdict": answer.verdict.sentence,
        "limits": {name: None if math.isinf(seconds) else seconds for name, seconds in limits.items()},
        "keeps_limits": case.keeps_limits,
        "list_price_per_million_tokens": {
            "fastdecode": answer.service.price_per_million_tokens if answer.uses_list_prices else None,
            "gpu_only": answer.alone_service.price_per_million_tokens
            if answer.uses_list_prices and answer.alone_service
            else None,
        },
        "without_limits": service_figures(answer.unlimited.service if answer.unlimited else None),
        "kv_cache_dtype": case.inputs.kv_cache_dtype,
        "latent_absorption": "r" if case.args.latent_absorption == "r" else "s",
        "state_on": "s" if case.planner.states else "r",
        "workload": asdict(case.planner.workload),
        "assumptions": list(case.inputs.assumptions),
    }


def service_figures(service: Service | None) -> dict[str, Any]:
    """Return the latency and throughput of ``service`` as a JSON object; {} for None."""
    if service is None:
        return {}
    first = service.ttft_seconds
    return {
        "users": service.users,
        "output_tokens_per_second": service.tokens_per_second,
        "tokens_per_second_per_user": service.tokens_per_second_per_user,
        "tpot_seconds": service.tpot_seconds,
        "ttft_seconds": None if math.isinf(first) else first,
    }
