"""The verdict on a plan: FastDecode or the GPU alone, with total throughput and each user's time per token."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.perfmodel.lab.gpu_only import GpuOnly
from fastdecode.perfmodel.service import NO_LIMITS, Service, ServiceLimits
from fastdecode.perfmodel.sizing import Plan, Prices


@dataclass(frozen=True)
class Verdict:
    """A verdict. ``use_fastdecode``: None if the GPU alone was not compared. ``sentence``: the verdict in words."""

    use_fastdecode: bool | None
    sentence: str


def judge(plan: Plan, alone: GpuOnly | None, prices: Prices, limits: ServiceLimits = NO_LIMITS) -> Verdict:
    """Judge within ``limits`` by throughput, and by the price per token if prices are known.

    The sentence always names each user's time per token.
    """
    service = plan.service
    if alone is None:
        return Verdict(None, f"FastDecode: {_whole(service)}. The GPU alone was not compared: name it with --gpu.")
    beside = _alone(alone, limits)
    if not limits.kept_by(service.tpot_seconds, service.ttft_seconds):
        return Verdict(
            False,
            f"Do not use FastDecode here: it cannot keep to {limits}. Its fastest plan: {_whole(service)}; {beside}.",
        )
    if alone.max_batch_size == 0:
        return Verdict(True, f"FastDecode: {_whole(service)}; {beside}.")
    return _compared(service, alone, prices, beside)


def _compared(service: Service, alone: GpuOnly, prices: Prices, beside: str) -> Verdict:
    ratio = service.tokens_per_second / alone.output_tokens_per_second
    times = f"{digits(ratio, 2)} x the tokens per second of the GPU alone, {_each(service)}; {beside}"
    if ratio <= 1:
        return Verdict(False, f"Do not use FastDecode here: it gives {times}.")
    price = service.price_per_million_tokens
    alone_price = prices.per_million_tokens(0, alone.output_tokens_per_second)
    if price is not None and alone_price is not None:
        times += f"; {price:.3g} against {alone_price:.3g} per million tokens"
        if price >= alone_price:
            slower = alone.step_seconds is not None and service.tpot_seconds > alone.step_seconds
            what = "total throughput" if slower else "speed"
            return Verdict(
                False, f"Do not use FastDecode here, unless {what} matters more than price: it gives {times}."
            )
    # A ratio of throughputs below this may be an error of figures that were measured on other machines
    margin = 1.2
    if ratio < margin:
        return Verdict(
            False,
            f"Do not use FastDecode here on these figures alone, the gain is within their error: it gives {times}.",
        )
    return Verdict(True, f"FastDecode gives {times}.")


def _alone(alone: GpuOnly, limits: ServiceLimits) -> str:
    service = alone.service()
    if service:
        return f"the GPU alone serves {users(service.users)} at {milliseconds(service.tpot_seconds)} per token"
    if alone.limited_by == "memory":
        return "the GPU alone cannot run one such sequence (its memory is too small)"
    lone = (
        "" if alone.lone_step_seconds is None else f": one user waits {milliseconds(alone.lone_step_seconds)} per token"
    )
    return (
        f"the GPU alone cannot keep to {limits if alone.limited_by == 'time per token' else 'the latency limit'}{lone}"
    )


def _each(service: Service) -> str:
    of_each = "each of " if service.users > 1 else ""
    return f"at {milliseconds(service.tpot_seconds)} per token for {of_each}{users(service.users)}"


def _whole(service: Service) -> str:
    return f"{digits(service.tokens_per_second)} tokens/s in all, {_each(service)}"


def users(number: int) -> str:
    """Return a number of users in words."""
    return f"{number:,} user" + ("" if number == 1 else "s")


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with three significant digits, or rounded to whole ones from 100 ms on."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def digits(value: float, count: int = 4) -> str:
    """Return ``value`` with ``count`` significant digits. A value of at least 1 has no exponent."""
    return f"{float(f'{value:.{count}g}'):,.15g}"
