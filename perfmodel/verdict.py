"""Whether FastDecode is worth its R-workers here: a plan beside the GPU alone."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.perfmodel.gpu_only import GpuOnly
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.planner import Prices

MARGIN = 1.2
"""Ratios of throughput below this are within the error of figures that nobody measured on the machine at hand."""


@dataclass(frozen=True)
class Verdict:
    """``use_fastdecode`` is None where nothing is known of the GPU alone; ``sentence`` says it in words."""

    use_fastdecode: bool | None
    sentence: str


def judge(plan: Plan, alone: GpuOnly | None, prices: Prices) -> Verdict:
    """By throughput, and by the price of a token where prices are known."""
    if alone is None:
        return Verdict(None, "The GPU alone was not compared: name it with --gpu.")
    rate, alone_rate = plan.output_tokens_per_second, alone.output_tokens_per_second
    if alone.max_batch_size == 0:
        return Verdict(True, f"The GPU alone cannot run one such sequence (its {alone.limited_by} is too small).")
    beside = f"{rate:.0f} tokens/s against {alone_rate:.0f} of the GPU alone with a batch of {alone.max_batch_size}"
    if rate <= alone_rate:
        return Verdict(False, f"Do not use FastDecode here: {beside}.")
    price, alone_price = plan.price_per_million_tokens, prices.per_million_tokens(0, alone_rate)
    if price is not None and alone_price is not None:
        beside += f"; {price:.3g} against {alone_price:.3g} per million tokens"
        if price >= alone_price:
            return Verdict(False, f"Do not use FastDecode here, unless for speed at any price: {beside}.")
    if rate < MARGIN * alone_rate:
        return Verdict(
            False, f"Do not use FastDecode here on these figures alone, the gain is within their error: {beside}."
        )
    return Verdict(True, f"FastDecode gives {rate / alone_rate:.1f} times the throughput: {beside}.")
