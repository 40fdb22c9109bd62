"""Which R-worker a new sequence goes to: what it would cost there, in one unit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastdecode.scheduler.load_forecast import LoadForecast, Prompt


def placement_costs(
    forecast: LoadForecast,
    prompt: Prompt,
    speeds: np.ndarray,
    capacities: np.ndarray,
    hit_tokens: Mapping[int, int],
    row_kv_tokens: float,
) -> np.ndarray:
    """What ``prompt`` costs on each R-worker, as KV tokens that one of mean speed would attend more in each step.

    The load that is coming counts, not the one that is here: what a placement does to an R-worker shows a whole output
    later. So an R-worker costs the time of those steps in which the newcomer will be there, each weighted by what the
    newcomer attends in it: placed where that is least, newcomers keep the sum of squares of all R-workers' times, and
    with it the busiest one's time, as low as one choice can.

    ``speeds``: float64 [num_workers], in any unit. ``capacities``: int64 [num_workers], tokens that their blocks hold;
    what the forecast lacks of them would be preempted and computed again. ``hit_tokens``: of the prompt, by R-worker,
    what need not be computed there. Computing a row takes the S-worker as long as attending ``row_kv_tokens`` takes an
    R-worker of mean speed; both are spread over the newcomer's steps. Returns float64 [num_workers].
    """
    relative = speeds / max(float(speeds.mean()), 1e-300)
    meeting = forecast.met_by(prompt)
    costs = meeting.means / np.maximum(relative, 1e-300)
    per_step = row_kv_tokens / max(prompt.decode_steps, 1)
    if meeting.most > capacities[capacities > 0].min(initial=np.iinfo(np.int64).max):
        costs += np.maximum(meeting.peaks - capacities, 0) * per_step
    for worker, tokens in hit_tokens.items():
        costs[worker] -= tokens * per_step
    return costs
