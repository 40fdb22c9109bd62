"""The plain transformers backend, reported with the same keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastdecode.bench.report import decode_figures
from fastdecode.bench.workload import WorkloadSpec, make_workload
from fastdecode.config import EngineConfig
from fastdecode.machine import usable_cores
from fastdecode.metrics import StepRecord

NOT_MEASURED = ("breakdown", "ttft_seconds", "tbt_seconds", "kv_load", "prefix_cache", "preemptions", "lost_workers")
"""Keys of the report that static batches have no figure for: null."""


def run_baseline(config: EngineConfig, spec: WorkloadSpec, progress: Callable[[int], Any]) -> dict[str, Any]:
    """Run the workload in static batches of ``max_num_seqs`` through ``generate``; arrivals are not honoured."""
    from fastdecode.sworker import set_threads
    from fastdecode.sworker.baseline import TransformersBaseline
    from fastdecode.sworker.tokenizer import HFTokenizer

    set_threads(config.s_threads or len(usable_cores()))
    baseline = TransformersBaseline(config)
    encode = None if config.skip_tokenizer_init else HFTokenizer(config).encode
    items = make_workload(spec, baseline.vocab_size, config.max_model_len or baseline.max_model_len, encode)
    prompts, output_lens = [item.prompt_token_ids for item in items], [item.output_len for item in items]
    baseline.run(prompts[:2], [2, 2])
    start = time.perf_counter()
    with progress(len(items)) as bar:
        batches = baseline.run(prompts, output_lens, lambda count: bar.update(count) and None)
    elapsed = time.perf_counter() - start
    steps = [_decode_step(seconds, batch.num_sequences) for batch in batches for seconds in batch.decode_step_seconds]
    prompt_tokens, output_tokens = sum(map(len, prompts)), sum(output_lens)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(items),
        "total_num_tokens": prompt_tokens + output_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(items) / elapsed,
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
