"""One rank of a test job that loads several models one after another, so that its processes start only once.

``python rank_job.py JOBS RESULTS`` with RANK, WORLD_SIZE and MASTER_ADDR set as torchrun sets them. JOBS: JSON, a list
of {"folder", "port", "prompts", "params", "settings"}; rank 0 writes a list of token ids, or of errors, to RESULTS.
A job's "kill_at" is the step after which rank 0 kills its first R-worker, "die_at" the one after which rank 0 is
killed itself.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import FastDecodeError


def killer(step: int, victim: psutil.Process) -> Callable[[Any], None]:
    """Return a function that kills ``victim`` when it is called the ``step``-th time."""
    calls = itertools.count(1)
    return lambda record: victim.kill() if next(calls) == step else None


def run(job: dict[str, Any]) -> Any:
    """Return the tokens of every completion of every prompt, with requested logprobs; or the error."""
    os.environ["MASTER_PORT"] = str(job["port"])
    size = int(os.environ["WORLD_SIZE"])
    try:
        with LLM(job["folder"], skip_tokenizer_init=True, tensor_parallel_size=size, **job["settings"]) as llm:
            params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False} | job["params"])
            prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
            if "kill_at" in job:
                children = psutil.Process().children()
                victim = next(each for each in children if "r-worker" in each.cmdline())
                llm.engine.on_step = killer(job["kill_at"], victim)
            if "die_at" in job:
                llm.engine.on_step = killer(job["die_at"], psutil.Process())
            outputs = llm.generate(prompts, params, use_tqdm=False)
            score = llm.engine.score(job["prompts"][0]).tolist() if len(job["prompts"][0]) > 1 else []
            retained = sum(worker.retained for worker in llm.engine.scheduler.snapshot().r_workers)
            held = llm.engine.backend.pool.blocks_used - retained
            tokens = [[list(completion.token_ids) for completion in output.outputs] for output in outputs]
            found = [output.outputs[0].logprobs for output in outputs]
            best = [[max(each.values(), key=lambda p: p.logprob).logprob for each in some or ()] for some in found]
            return {"tokens": tokens, "score": score, "logprobs": best, "held": held}
    except FastDecodeError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except SystemExit:  # a rank other than rank 0 has finished serving
        return None


if __name__ == "__main__":
    results = [run(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(results))
