"""Offline throughput: a workload through an engine, or through plain transformers in static batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.lab.measure.dataset import WorkItem, WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun, decode_figures

if TYPE_CHECKING:
    from fastdecode.engine.engine import LLMEngine
    from fastdecode.sworker.model.baseline import BatchTimes


def run_throughput(
    engine: LLMEngine,
    items: Sequence[WorkItem],
    measure_overlap: bool = False,
    on_finished: Callable[[RequestOutput], object] = lambda output: None,
    run: ThroughputRun | None = None,
) -> ThroughputRun:
    """Run ``items`` greedily, exactly ``output_len`` tokens each, adding each at its arrival time.

    ``run``: a record to fill, so that an interrupted benchmark keeps the finished part.
    """
    run = run or ThroughputRun()
    engine.on_step = run.steps.append
    before = engine.scheduler.statistics
    engine.world.clock.restart()
    start = time.perf_counter()
    waiting = deque(sorted(enumerate(items), key=lambda pair: pair[1].arrival_seconds))
    # Steps before overlap is switched on or off when it is measured: on, off, on, off within one run
    overlap_block_steps = 4
    try:
        while waiting or engine.has_unfinished_requests():
            _add_arrived(engine, waiting, start)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][1].arrival_seconds - (time.perf_counter() - start)))
                engine.world.clock.restart()
                continue
            engine.world.overlap = not measure_overlap or len(run.steps) // overlap_block_steps % 2 == 0
            for output in engine.step():
                if output.finished:
                    run.outputs.append(output)
                    on_finished(output)
    finally:
        run.elapsed_seconds = time.perf_counter() - start
        run.statistics = engine.scheduler.statistics.since(before)
        run.kv_load_limit = engine.scheduler.load_limit.tokens
        engine.on_step, engine.world.overlap = None, True
    return run


def warm_up(engine: LLMEngine, items: Sequence[WorkItem]) -> None:
    """Run a few requests of the same shapes, so that first-use costs (libraries, page faults) are not measured."""
    run_throughput(engine, [WorkItem(item.prompt_token_ids, min(2, item.output_len)) for item in items[:2]])
    engine.reset_prefix_cache()


def _add_arrived(engine: LLMEngine, waiting: deque[tuple[int, WorkItem]], start_seconds: float) -> None:
    """Add the ``waiting`` requests whose arrival time has come to the engine. TTFT is measured from that time."""
    now_seconds = time.perf_counter() - start_seconds
    while waiting and waiting[0][1].arrival_seconds <= now_seconds:
        index, item = waiting.popleft()
        params = SamplingParams(
            temperature=0, max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True, detokenize=False
        )
        arrival = start_seconds + item.arrival_seconds
        engine.add_request(f"bench-{index}", {"prompt_token_ids": item.prompt_token_ids}, params, arrival)


NOT_MEASURED = (
    *("breakdown", "ttft_seconds", "tbt_seconds", "kv_load", "prefix_cache", "preemptions"),
    *("lost_workers", "joined_workers", "two_copies_share"),
)
"""Keys of the report that are null for static batches."""


def run_baseline(
    config: EngineConfig, spec: WorkloadSpec, progress: Callable[[int], Any]
) -> tuple[dict[str, Any], KeyboardInterrupt | None]:
    """Run the workload in static batches of ``max_num_seqs`` through ``generate``, ignoring arrival times.

    Return the report, and the Ctrl-C that ended the run, if any; the report then covers the finished batches.
    """
    from fastdecode.sworker import set_threads
    from fastdecode.sworker.model.baseline import TransformersBaseline
    from fastdecode.sworker.model.tokenizer import HFTokenizer

    set_threads(config.s_threads or len(usable_cores()))
    baseline = TransformersBaseline(config)
    encode = None if config.skip_tokenizer_init else HFTokenizer(config).encode
    items = make_workload(spec, baseline.vocab_size, config.max_model_len or baseline.max_model_len, encode)
    prompts, output_lens = [item.prompt_token_ids for item in items], [item.output_len for item in items]
    batches: list[BatchTimes] = []
    interrupted: KeyboardInterrupt | None = None
    start = time.perf_counter()
    try:
        list(baseline.run(prompts[:2], [2, 2]))
        start = time.perf_counter()
        with progress(len(items)) as bar:
            for batch in baseline.run(prompts, output_lens):
                batches.append(batch)
                bar.update(batch.num_sequences)
    except KeyboardInterrupt as stop:
        interrupted = stop
    elapsed = time.perf_counter() - start
    return _report(batches, prompts, output_lens, elapsed), interrupted


def _report(
    batches: Sequence[BatchTimes], prompts: Sequence[list[int]], output_lens: Sequence[int], elapsed: float
) -> dict[str, Any]:
    count = sum(batch.num_sequences for batch in batches)
    walls = [seconds for batch in batches for seconds in batch.decode_step_seconds]
    decoded = sum(batch.num_sequences * len(batch.decode_step_seconds) for batch in batches)
    prompt_tokens, output_tokens = sum(map(len, prompts[:count])), sum(output_lens[:count])
    return {
        "elapsed_time": elapsed,
        "num_requests": count,
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": count / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "prefill": {"seconds": sum(batch.prefill_seconds for batch in batches), "tokens": prompt_tokens},
        "decode": decode_figures(walls, decoded),
        **dict.fromkeys(NOT_MEASURED),
    }
