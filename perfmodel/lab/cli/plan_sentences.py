"""The sentences of ``fastdecode plan``: needs, price, GPU servers without R-workers, and throughput lost to limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fastdecode.perfmodel.lab.cli.plan_answer import PlanAnswer
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase
from fastdecode.perfmodel.lab.gpu_only import fewest_gpus
from fastdecode.perfmodel.lab.verdict import digits, milliseconds, users
from fastdecode.perfmodel.service import Service
from fastdecode.perfmodel.sizing import Plan


def sentences(answer: PlanAnswer) -> Iterator[str]:
    """Yield sentences about what the plan needs, and what the limits cost."""
    plan = answer.case.plan
    gpus = answer.case.inputs.gpu_name
    needs = f"{f'{gpus} and ' if gpus else ''}{_hosts(plan, answer.case.inputs.host_name)}"
    yield f"FastDecode needs {needs}{_fewer_alone(answer)}{_as_many(answer)}.{_larger_server(answer)}"
    yield _cost(answer)
    unlimited = answer.unlimited
    if unlimited:
        rate = unlimited.output_tokens_per_second
        yield (
            f"The limit of {asked_limits(answer.case)} costs throughput: without it FastDecode gives {digits(rate)} "
            f"tokens/s, at {milliseconds(unlimited.step_seconds)} per token for each of {users(unlimited.in_flight)}, "
            f"with {_hosts(unlimited, '')} (--tpot inf)."
        )


def asked_limits(case: PlanCase) -> str:
    """Return in words the limits on time per token and time to first token, and whether they are the default."""
    default = case.args.tpot is None and math.isfinite(case.limits.tpot_seconds)
    return f"{case.limits}{' (the default of --tpot)' if default else ''}"


def _fewer_alone(answer: PlanAnswer) -> str:
    """Say how many GPUs hold the quantized weights, if the S-worker needs more GPUs because it dequantizes them."""
    server, shape = answer.case.inputs.server, answer.case.inputs.shape
    if not server or not shape or not server.shape.weight_bits or shape.weight_bits:
        return ""
    fewest = fewest_gpus(server.shape, server.gpu, server.group)
    if not fewest or fewest >= answer.case.plan.tensor_parallel_size:
        return ""
    weights = f"{answer.case.args.weights} weights" if answer.case.args.weights else "the weights"
    holds = f"{fewest} such GPUs alone hold" if fewest > 1 else "1 such GPU alone holds"
    return f" (its S-worker unpacks {weights}; {holds} them packed)"


def _as_many(answer: PlanAnswer) -> str:
    """Say how many GPU servers without R-workers match the plan's tokens per second, and how many its number of users.

    If one such server cannot run a sequence, say how many GPUs can.
    """
    alone, gpu = answer.alone_service, answer.case.inputs.gpu_name
    if not gpu or answer.case.inputs.one_host:
        return ""
    if not alone:
        fewest = answer.fewest_alone
        return f"; {fewest[0]} GPUs alone serve {_alone_users(fewest[1])}" if fewest else ""
    servers = math.ceil(answer.service.tokens_per_second / alone.tokens_per_second)
    if servers < 2:
        return ""
    for_users = math.ceil(answer.service.users / alone.users)
    each = f"at {milliseconds(alone.tpot_seconds)} per token for {users(servers * alone.users)}"
    more = f", and {for_users:,} serve as many users" if for_users > servers else ""
    return f"; {servers:,} servers of {gpu} alone give as many tokens per second, {each}{more}"


def _larger_server(answer: PlanAnswer) -> str:
    """Name a GPU server without R-workers but with more GPUs that is as fast as the plan, if one was computed."""
    alone, rate = answer.alone_service, answer.service.tokens_per_second
    if not alone or answer.case.inputs.one_host or alone.tokens_per_second >= rate:
        return ""
    for row in answer.found.get("tensor_parallel", ()):
        service = row.alone(answer.prices)
        if service and service.tokens_per_second >= rate:
            return f" One server of {row.tensor_parallel_size} GPUs alone serves {_alone_users(service)}."
    return ""


def _alone_users(service: Service) -> str:
    return (
        f"{users(service.users)} at {milliseconds(service.tpot_seconds)} per token, "
        f"{digits(service.tokens_per_second)} tokens/s in all"
    )


def _cost(answer: PlanAnswer) -> str:
    own = answer.service.price_per_million_tokens
    fewest = answer.fewest_alone
    number, alone = fewest or (0, answer.alone_service)
    other = alone.price_per_million_tokens if alone else None
    if own is None and other is None:
        return "Prices are not known: --gpu-price and --cpu-price take those of an hour of a GPU and of a host."
    words = {"with FastDecode": own, f"with {f'{number} GPUs' if fewest else 'the GPU'} alone": other}
    unit, by = (" USD", ", by list prices") if answer.uses_list_prices else ("", "")
    costs = [f"{price:.3g}{unit} {way}" for way, price in words.items() if price is not None]
    if own and other:
        by += f": {digits(own / other, 2)} x the price" if own > other else f": {own / other:.2g} of the price"
    host = answer.case.inputs.host_name or "hosts"
    if answer.case.inputs.one_host and own is not None and not answer.case.planner.prices.cpu_host_per_hour:
        by += "; the host that holds the GPU is not priced"
    unknown = "" if own is not None else f"; the price of {host} is not known (--cpu-price)"
    return f"A million output tokens cost {' and '.join(costs)}{by}{unknown}{_owned(answer, unit)}."


def _owned(answer: PlanAnswer, unit: str) -> str:
    """Return the price with hosts that cost nothing because the user owns them; "" if ``--cpu-price`` is given."""
    prices, service = answer.prices, answer.service
    given = answer.case.planner.prices.cpu_host_per_hour
    if answer.case.inputs.one_host or given is not None or prices.gpu_per_hour is None:
        return ""
    owned = replace(prices, cpu_host_per_hour=0.0).per_million_tokens(0, service.tokens_per_second)
    return f"; with hosts that you own (--cpu-price 0): {owned:.3g}{unit} with FastDecode" if owned else ""


def _hosts(plan: Plan, name: str) -> str:
    hosts = f"{plan.num_hosts} host{'s' * (plan.num_hosts != 1)}{f' ({name})' if name else ''}"
    return f"{hosts} with {plan.total_r_workers} R-worker{'s' * (plan.total_r_workers != 1)}"
