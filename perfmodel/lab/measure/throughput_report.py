"""The figures of a throughput run, with the names of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import StepRecord
from fastdecode.scheduler import SchedulerStatistics


@dataclass
class ThroughputRun:
    """All results of a run. ``elapsed_seconds``: from its start to the last token."""

    elapsed_seconds: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    statistics: SchedulerStatistics = field(default_factory=SchedulerStatistics)
    kv_load_limit: int | None = None


def throughput_report(run: ThroughputRun, separate_cores: bool) -> dict[str, Any]:
    """Return the results for the report; the caller adds ``config`` and ``machine``."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in run.outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in run.outputs)
    seconds = run.elapsed_seconds
    decode = [step for step in run.steps if step.is_decode]
    overlapped = [step for step in decode if step.overlapped]
    with_prompt = [step for step in run.steps if not step.is_decode]
    loads = [step.kv_load for step in run.steps]
    return {
        "elapsed_time": seconds,
        "num_requests": len(run.outputs),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": _rate(len(run.outputs), seconds),
        "tokens_per_second": _rate(prompt_tokens + output_tokens, seconds),
        "output_tokens_per_second": _rate(output_tokens, seconds),
        "prefill": {
            "seconds": sum(step.wall_seconds for step in with_prompt),
            "tokens": sum(step.num_prompt_tokens for step in with_prompt),
        },
        "decode": decode_figures(
            [step.wall_seconds for step in overlapped], sum(step.num_output_tokens for step in overlapped)
        ),
        "breakdown": breakdown(decode, separate_cores),
        **latencies(run.outputs),
        "kv_load": {
            "peak_tokens": max(loads, default=0),
            "mean_tokens": float(np.mean(loads)) if loads else 0.0,
            "limit_tokens": run.kv_load_limit,
        },
        "prefix_cache": {"queries": run.statistics.prefix_queries, "hit_tokens": run.statistics.prefix_hit_tokens},
        "preemptions": run.statistics.preemptions,
        "speculative": run.statistics.drafts.figures(),
        "steady": steady_figures(run.steps, _rate(output_tokens, len(run.outputs)), run.kv_load_limit),
        "lost_workers": sum(step.lost_workers for step in run.steps),
        "joined_workers": _joined_workers(run.steps),
        "two_copies_share": _twice_share(run.steps),
    }


def decode_figures(walls: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return rates and times of steps without prompt tokens, which took ``walls`` seconds and gave ``tokens``."""
    return {
        "steps": len(walls),
        "tokens": tokens,
        "seconds": sum(walls),
        "tokens_per_second": _rate(tokens, sum(walls)),
        "step_seconds_p01": _percentile(walls, 1),
        "step_seconds_p50": _percentile(walls, 50),
        "step_seconds_p99": _percentile(walls, 99),
        "step_seconds_max": max(walls, default=0.0),
    }


def breakdown(steps: Sequence[StepRecord], separate_cores: bool) -> dict[str, Any]:
    """Return the parts of the decode steps' time: s + wait + host = wall.

    r and transfer are the times of the busiest R-worker and of its link. ``overlap_efficiency`` = max(s, r) / wall,
    only if S and R share no core. ``overlap_gain`` = median step time without overlap / with overlap, only if both were
    run.
    """
    overlapped = [step for step in steps if step.overlapped]
    alone = [step for step in steps if not step.overlapped]
    r_seconds = _by_worker([step.r_seconds for step in overlapped])
    busiest = int(np.argmax(r_seconds))
    figures = {name: sum(getattr(step, name) for step in overlapped) for name in _STATES}
    wall = figures["wall_seconds"]
    return {
        **figures,
        "r_seconds": float(r_seconds[busiest]),
        "r_seconds_mean": float(np.mean(r_seconds)),
        "transfer_seconds": float(_by_worker([step.transfer_seconds for step in overlapped])[busiest]),
        "overlap_efficiency": _rate(max(figures["s_seconds"], float(r_seconds[busiest])), wall)
        if separate_cores
        else None,
        "overlap_gain": _rate(_median_wall(alone), _median_wall(overlapped)) if alone else None,
        "r_read_gb_per_s": _rate(sum(step.kv_bytes_read for step in overlapped), float(r_seconds.sum())) / 1e9,
    }


def steady_figures(
    steps: Sequence[StepRecord], mean_output_len: float, kv_load_limit: int | None
) -> dict[str, float | int | None]:
    """Return figures of the steady part of a run.

    It begins n steps after the first request starts, where n is the mean output length, and ends when the last one
    starts.

    ``imbalance``: the busiest R-worker's time divided by the mean time of present R-workers, averaged over steps.
    ``imbalance_max``: the same ratio in the most uneven step. All figures are zero without a steady part, for example
    if all requests started at once.
    """
    starts = [index for index, step in enumerate(steps) if step.num_starts]
    first, last = (starts[0] + round(mean_output_len), starts[-1]) if starts else (0, -1)
    steady = steps[first : last + 1]
    seconds = sum(step.wall_seconds for step in steady)
    busy = [(step.r_seconds, max(step.pool.num_workers, sum(map(bool, step.r_seconds)))) for step in steady]
    uneven = [max(each) * there / sum(each) for each, there in busy if sum(each) > 0]
    return {
        "seconds": seconds,
        "tokens_per_second": _rate(sum(step.num_output_tokens for step in steady), seconds),
        "tpot_seconds": _rate(seconds, len(steady)),
        "mean_kv_tokens": float(np.mean([step.kv_load for step in steady])) if steady else 0.0,
        "limit_kv_tokens": kv_load_limit,
        "imbalance": float(np.mean(uneven)) if uneven else 0.0,
        "imbalance_max": max(uneven, default=0.0),
    }


def latencies(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return time to first token, time between tokens, and time per output token (TPOT) of each request."""
    first = [out.metrics.token_seconds[0] - out.metrics.arrival_seconds for out in outputs if out.metrics.token_seconds]
    each = [_mean_gap(out.metrics.token_seconds) for out in outputs if len(out.metrics.token_seconds) > 1]
    between = [gap for out in outputs for gap in np.diff(out.metrics.token_seconds).tolist()]
    return {
        "ttft_seconds": {"p50": _percentile(first, 50), "p99": _percentile(first, 99)},
        "tbt_seconds": {"p50": _percentile(between, 50), "p99": _percentile(between, 99)},
        "tpot_seconds": {"mean": float(np.mean(each)) if each else 0.0, "p99": _percentile(each, 99)},
    }


def _mean_gap(token_seconds: Sequence[float]) -> float:
    """Return a request's mean seconds per output token after the first. ``token_seconds``: when tokens came."""
    return (token_seconds[-1] - token_seconds[0]) / (len(token_seconds) - 1)


def summary_lines(report: dict[str, Any]) -> Iterable[str]:
    """Yield the report as text; the last line is vLLM's."""
    decode, parts = report["decode"], report.get("breakdown")
    if decode["steps"]:
        yield (
            f"Decode: {decode['tokens_per_second']:.1f} tokens/s over {decode['steps']} steps without prompts, "
            f"step p50 {decode['step_seconds_p50'] * 1e3:.2f} ms, p99 {decode['step_seconds_p99'] * 1e3:.2f} ms"
        )
    if parts and parts["wall_seconds"]:
        share = {name: parts[name] / parts["wall_seconds"] for name in (*_STATES[:3], "r_seconds", "transfer_seconds")}
        yield (
            f"Of decode time: S {share['s_seconds']:.0%}, waiting for R {share['wait_seconds']:.0%}, "
            f"host {share['host_seconds']:.1%}   (R-worker busy {share['r_seconds']:.0%}, "
            f"transfer {share['transfer_seconds']:.1%}, KV read at {parts['r_read_gb_per_s']:.1f} GB/s)"
        )
    if parts and parts["overlap_gain"]:
        yield f"Overlap gain: {parts['overlap_gain']:.2f} x the speed of the same steps one mini-batch after the other"
    if report["prefill"]["tokens"]:
        prefill = report["prefill"]
        yield f"Prefill: {prefill['tokens']} prompt tokens in {prefill['seconds']:.2f} s of steps with prompts"
    # Uneven micro-batches exceed the limit by less than this factor; a higher peak was the scheduler's choice
    ripple = 1.1
    if (load := report.get("kv_load")) and load["peak_tokens"]:
        limit = f", limit {load['limit_tokens']}" if load["limit_tokens"] else ""
        if limit and load["peak_tokens"] > ripple * load["limit_tokens"]:
            limit += " (R time equals S time there), exceeded: starts are only spread where the run ends sooner by it"
        yield f"KV load: mean {load['mean_tokens']:.0f}, peak {load['peak_tokens']} tokens per step{limit}"
    yield from _steady_lines(report)
    if (drafts := report.get("speculative")) and drafts["drafts"]:
        yield (
            f"Drafts: {drafts['accepted_tokens']} of {drafts['drafted_tokens']} tokens accepted "
            f"({drafts['acceptance_rate']:.0%}), {drafts['mean_accepted_length']:.2f} of each verification"
        )
    if (joined := report.get("joined_workers")) or report.get("lost_workers"):
        yield f"R-workers: {joined} joined and {report['lost_workers']} were lost during the run"
    if (copied := report.get("two_copies_share")) is not None:
        yield f"Copies: {copied:.1%} of the sequences had two, over all steps"
    if (cache := report.get("prefix_cache")) and (cache["queries"] or report["preemptions"]):
        yield (
            f"Prefix cache: {cache['hit_tokens']} prompt tokens found for {cache['queries']} requests; "
            f"{report['preemptions']} preemptions"
        )
    yield (
        f"Throughput: {report['requests_per_second']:.2f} requests/s, "
        f"{report['tokens_per_second']:.2f} total tokens/s, {report['output_tokens_per_second']:.2f} output tokens/s"
    )


def _steady_lines(report: dict[str, Any]) -> Iterable[str]:
    """Yield lines on the run's steady part, and, if the whole run was slower or faster, the reason."""
    steady = report.get("steady")
    if not steady or not steady["seconds"]:
        return
    yield (
        f"Steady: {steady['tokens_per_second']:.1f} output tokens/s, {steady['tpot_seconds'] * 1e3:.3g} ms per token, "
        f"beside prompts, a mean output length after "
        f"the first start to the last one, {steady['seconds']:.4g} s; mean KV load "
        f"{steady['mean_kv_tokens']:.0f}, busiest over mean R-worker {steady['imbalance']:.3f} "
        f"(at most {steady['imbalance_max']:.3f})"
    )
    overall = report["output_tokens_per_second"]
    # Relative difference up to which the steady rate and the whole run's rate count as equal
    agree = 0.03
    if abs(overall / steady["tokens_per_second"] - 1.0) > agree:
        part = _rate(steady["seconds"], report["elapsed_time"])
        yield (
            f"Throughput is {overall / steady['tokens_per_second']:.0%} of Steady: it counts the whole run, in "
            f"which seats fill at the start and empty at the end; {part:.0%} of the time was steady"
        )


_STATES = ("s_seconds", "wait_seconds", "host_seconds", "wall_seconds")


def _by_worker(steps: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Return each R-worker's sum over steps, float64 [num_workers]. It is 0 for steps before the R-worker joined."""
    columns = list(zip_longest(*steps, fillvalue=0.0))
    return np.array(columns).sum(axis=1) if columns else np.zeros(1)


def _joined_workers(steps: Sequence[StepRecord]) -> int:
    """Return how many R-workers joined after the first step, new ones and replacements of lost ones."""
    return sum(max(0, now.pool.num_workers - last.pool.num_workers + now.lost_workers) for last, now in pairwise(steps))


def _twice_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the fraction of all steps' sequences that two R-workers held; None if there never was such a sequence."""
    once, twice = sum(step.pool.once for step in steps), sum(step.pool.twice for step in steps)
    return twice / (once + twice) if twice else None


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _median_wall(steps: Sequence[StepRecord]) -> float:
    return _percentile([step.wall_seconds for step in steps], 50)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def full_model_decode(
    step_seconds: float, tokens_per_step: float, num_layers_run: int, num_layers: int
) -> dict[str, float | int]:
    """Return decode figures of ``num_layers`` layers from a run with ``num_layers_run``.

    All times are multiplied by ``num_layers / num_layers_run``, even those of head and host, so the result is a lower
    bound on speed. The figures are seconds, and tokens per second.
    """
    full_step_seconds = step_seconds * num_layers / num_layers_run
    return {
        "num_hidden_layers": num_layers,
        "num_hidden_layers_run": num_layers_run,
        "decode_step_seconds": full_step_seconds,
        "decode_tokens_per_second": tokens_per_step / full_step_seconds if full_step_seconds else 0.0,
    }
