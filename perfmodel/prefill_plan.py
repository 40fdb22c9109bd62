"""How many prefill workers a plan wants, and the time to the first token that comes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.perfmodel.partition import closed_form
from fastdecode.perfmodel.plan import Workload
from fastdecode.perfmodel.prefill import PrefillModel

MOST_BUSY = 0.8
"""Of prefill workers that a plan chooses: beyond it prompts wait longer than they take."""


@dataclass(frozen=True)
class PrefillPlan:
    """``busy``: of the workers' time at the plan's throughput, each prompt on one. ``ttft_seconds``: at that load;
    None where there are too few workers for it. ``ttft_alone_seconds`` and ``ttft_chain_seconds``: of a prompt that
    finds all workers free, on one and on the fastest chain, whose parts are ``parts``. ``tbt_seconds``: between tokens;
    ``tbt_without_seconds``: where the S-worker computed the prompts as well."""

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


def plan_prefill(
    model: PrefillModel,
    workload: Workload,
    output_tokens_per_second: float,
    tbt_seconds: float,
    tbt_without_seconds: float,
    num_workers: int | None = None,
) -> PrefillPlan:
    """``num_workers``: as many as are at most ``MOST_BUSY`` busy when None.

    Prompts that come at random wait for a free worker as in Sakasegawa's approximation of M/D/n. The engine sees that a
    prompt is done between two steps: half a step is added.
    """
    prompt_len = max(round(workload.prompt_len - workload.shared_prefix_len), 1)
    alone = model.alone_seconds(prompt_len)
    rate = output_tokens_per_second / workload.output_len
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
        tbt_without_seconds=tbt_without_seconds,
    )
