"""Do prompts stall decodes? python benchmarks/stall_free.py

Sequences decode while long prompts arrive (Sarathi-Serve, sections 3 and 5.2): ``prefill-first`` computes a prompt
whole while all decodes wait, ``stall-free`` in chunks beside the decodes, within a budget of 256 tokens a step. The
time between tokens is that of the sequences that decode from the start. A B A B.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
from models import llama_folder

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.measure.dataset import WorkItem
from fastdecode.measure.throughput import run_throughput, warm_up
from fastdecode.metrics import StepRecord

BUDGETS = {"prefill-first": 2048, "stall-free": 256}


@dataclass(frozen=True)
class Figures:
    """Times between tokens in seconds; ``met_prompt``: part of the gaps during which prompt tokens were computed."""

    tbt_p50: float
    tbt_p99: float
    met_prompt: float
    tokens_per_second: float


def main() -> None:
    """Print both schedules' figures and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoding", type=int, default=32, help="sequences that decode (32)")
    parser.add_argument("--output-len", type=int, default=300, help="their tokens (300)")
    parser.add_argument("--prompts", type=int, default=20, help="long prompts that arrive meanwhile (20)")
    parser.add_argument("--prompt-len", type=int, default=2000, help="(2000)")
    parser.add_argument("--every", type=float, default=1.2, metavar="SECONDS", help="between their arrivals (1.2)")
    parser.add_argument("--hidden", type=int, default=512, help="(512)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    args = parser.parse_args()
    folder = llama_folder(args.hidden, args.layers)
    found: dict[str, list[Figures]] = {schedule: [] for schedule in BUDGETS}
    for _ in range(args.rounds):
        for schedule, figures in found.items():
            figures.append(_measure(schedule, folder, args))
            print(f"{schedule}: {figures[-1]}", flush=True)
    for name in ("tbt_p99", "tokens_per_second"):
        pairs = zip(found["prefill-first"], found["stall-free"], strict=True)
        ratios = [getattr(b, name) / getattr(a, name) for a, b in pairs]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name}: stall-free / prefill-first {statistics.median(ratios):.3f} ({spread})")


def _measure(schedule: str, folder: str, args: argparse.Namespace) -> Figures:
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=64,
        schedule=schedule,
        max_num_batched_tokens=BUDGETS[schedule],
    )
    engine = LLMEngine(config)
    decoding = [WorkItem([1 + i] * 16, args.output_len) for i in range(args.decoding)]
    arriving = [WorkItem([100 + i] * args.prompt_len, 16, 0.5 + i * args.every) for i in range(args.prompts)]
    try:
        warm_up(engine, [arriving[0], decoding[0]])
        run = run_throughput(engine, [*decoding, *arriving])
    finally:
        engine.close()
    outputs = [output for output in run.outputs if len(output.prompt_token_ids) == 16]
    gaps = np.concatenate([np.diff(output.metrics.token_seconds) for output in outputs])
    tokens = sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in run.outputs)
    return Figures(
        float(np.percentile(gaps, 50)),
        float(np.percentile(gaps, 99)),
        _met_prompt(run.steps, args.decoding),
        tokens / run.elapsed_seconds,
    )


def _met_prompt(steps: list[StepRecord], num_decoding: int) -> float:
    """Part of the gaps between two tokens of all ``num_decoding`` sequences that saw prompt tokens computed."""
    gaps, met, prompt = 0, 0, False
    for step in steps:
        prompt = prompt or not step.is_decode
        if step.num_output_tokens >= num_decoding:
            gaps, met, prompt = gaps + 1, met + prompt, False
    return met / gaps


if __name__ == "__main__":
    main()
