"""The plain transformers backend, reported with the same keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdecode.bench.report import decode_figures
from fastdecode.bench.workload import WorkloadSpec, make_workload
from fastdecode.config import EngineConfig
from fastdecode.machine import usable_cores
from fastdecode.metrics import StepRecord

if TYPE_CHECKING:
    from fastdecode.sworker.baseline import BatchTimes

NOT_MEASURED = ("breakdown", "ttft_seconds", "tbt_seconds", "kv_load", "prefix_cache", "preemptions", "lost_workers")
"""Keys of the report that static batches have no figure for: null."""


def run_baseline(
    config: EngineConfig, spec: WorkloadSpec, progress: Callable[[int], Any]
) -> tuple[dict[str, Any], bool]:
    """Run the workload in static batches of ``max_num_seqs`` through ``generate``; arrivals are not honoured.

    Returns the report, and whether Ctrl-C came: then it is of the batches that had ended.
    """
    from fastdecode.sworker import set_threads
    from fastdecode.sworker.baseline import TransformersBaseline
    from fastdecode.sworker.tokenizer import HFTokenizer

    set_threads(config.s_threads or len(usable_cores()))
    baseline = TransformersBaseline(config)
    encode = None if config.skip_tokenizer_init else HFTokenizer(config).encode
    items = make_workload(spec, baseline.vocab_size, config.max_model_len or baseline.max_model_len, encode)
    prompts, output_lens = [item.prompt_token_ids for item in items], [item.output_len for item in items]
    batches: list[BatchTimes] = []
    interrupted = False
    start = time.perf_counter()
    try:
        list(baseline.run(prompts[:2], [2, 2]))
        start = time.perf_counter()
        with progress(len(items)) as bar:
            for batch in baseline.run(prompts, output_lens):
                batches.append(batch)
                bar.update(batch.num_sequences)
    except KeyboardInterrupt:
        interrupted = True
    elapsed = time.perf_counter() - start
    return _report(batches, prompts, output_lens, elapsed), interrupted


def _report(
    batches: Sequence[BatchTimes], prompts: Sequence[list[int]], output_lens: Sequence[int], elapsed: float
) -> dict[str, Any]:
    """Of the requests in ``batches``, which come first."""
    count = sum(batch.num_sequences for batch in batches)
    steps = [_decode_step(seconds, batch.num_sequences) for batch in batches for seconds in batch.decode_step_seconds]
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
        "decode": decode_figures(steps),
        **dict.fromkeys(NOT_MEASURED),
    }


def _decode_step(seconds: float, num_sequences: int) -> StepRecord:
    return StepRecord(
        is_decode=True,
        overlapped=False,
        num_tokens=num_sequences,
        num_output_tokens=num_sequences,
        kv_loads=(0,),
        wall_seconds=seconds,
        s_seconds=seconds,
        wait_seconds=0.0,
        host_seconds=0.0,
        r_seconds=(0.0,),
        transfer_seconds=(0.0,),
        kv_bytes_read=0,
    )
