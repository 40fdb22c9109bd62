"""Decoding with draft tokens against decoding without: python benchmarks/speculation.py edit summary mha s-bound random

One engine, drafts allowed for some decode steps and forbidden for as many, A B A B, so that what the machine does
meanwhile it does to both; S-worker and R-worker have a core each. Printed are tokens per second with drafts over
without (median of the rounds and their range), the mean accepted length a of all verifications and over all sequences,
how S and R time grew, and the ideal (1 + a) / max(S growth, R growth).

edit, summary: the chat model (``make model``), which is to rewrite a piece of Python's standard library, or to sum up a
piece of its manual; bfloat16, grouped heads. mha: edit with every KV head written out for each query head, which gives
the same texts from a cache three times as large. s-bound: edit with short prompts, where R-workers wait. random:
random weights and prompts at temperature 1, R-bound, where no text repeats. Marks: edit, summary and mha 1.4 where
R time is at least twice S time, and 0.8 of the ideal; s-bound 0.98; random 0.97.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import llama_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord
from fastdecode.protocols import DraftPolicy
from fastdecode.sampling_params import SamplingParams

MODEL = Path.home() / ".cache/fastdecode/SmolLM2-135M-Instruct"
LEAST_SOURCE_BYTES = 40_000


@dataclass(frozen=True)
class Case:
    """What one comparison runs; ``model``: "chat", "mha" or "random"."""

    model: str
    task: str
    context_len: int
    num_sequences: int
    temperature: float = 0.0
    drafts: int = 4


CASES = {
    "edit": Case("chat", "edit", 4096, 64),
    "summary": Case("chat", "summary", 4096, 64),
    "mha": Case("mha", "edit", 2048, 64),
    "s-bound": Case("chat", "edit", 160, 64),
    "random": Case("random", "random", 2048, 48, temperature=1.0),
}


class Switched:
    """A ``DraftPolicy`` that can be silenced: it goes on to learn, and drafts nothing."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy, self.on = policy, True

    def choose(self, acceptance: np.ndarray, most: np.ndarray, num_tokens: int, kv_loads: np.ndarray) -> np.ndarray:
        chosen = self.policy.choose(acceptance, most, num_tokens, kv_loads)
        return chosen if self.on else np.zeros_like(chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--context-len", type=int, help="instead of the case's own")
    parser.add_argument("--sequences", type=int, help="instead of the case's own")
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens (4)")
    parser.add_argument("--lookup", default="4,1", help="prompt_lookup_max,prompt_lookup_min")
    parser.add_argument("--rounds", type=int, default=5, help="of steps with drafts and without")
    parser.add_argument("--steps", type=int, default=12, help="of each in a round")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    for name in args.cases or CASES:
        run(name, CASES[name], args)


def run(name: str, case: Case, args: argparse.Namespace) -> None:
    """One comparison."""
    context_len, count = args.context_len or case.context_len, args.sequences or case.num_sequences
    with tempfile.TemporaryDirectory() as folder:
        model, settings = _model(case.model, Path(folder))
        prompts = _prompts(case, context_len, count)
        most, least = map(int, args.lookup.split(","))
        speculative = {"method": "ngram", "num_speculative_tokens": args.drafts or case.drafts}
        config = EngineConfig(
            model=str(model),
            max_num_seqs=count,
            max_num_batched_tokens=2048,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_cache_memory="14GiB",
            enable_prefix_caching=False,
            schedule="stall-free",
            r_workers="spawn:1",
            s_cores="0",
            r_cores="1",
            num_mini_batches=2,
            speculative_config={**speculative, "prompt_lookup_max": most, "prompt_lookup_min": least},
            **settings,
        )
        engine = LLMEngine(config)
        try:
            _compare(name, engine, prompts, case, args)
        finally:
            engine.close()


def _compare(name: str, engine: LLMEngine, prompts: list[list[int]], case: Case, args: argparse.Namespace) -> None:
    policy = Switched(engine.scheduler.drafts.policy)
    engine.scheduler.drafts.policy = policy
    records: list[StepRecord] = []
    engine.on_step = records.append
    policy.on = False
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=case.temperature, seed=number, max_tokens=2048, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(number), prompt, params)
    while not records or not records[-1].is_decode or records[-1].num_output_tokens < len(prompts):
        engine.step()
    policy.on = True
    for _ in range(4 * args.steps):  # what is measured is how it goes once slopes and acceptance are known
        engine.step()
    before = engine.scheduler.statistics.drafts
    phases: dict[bool, list[list[StepRecord]]] = {True: [], False: []}
    for turn in range(2 * args.rounds):
        policy.on = turn % 2 == 0
        records.clear()
        for _ in range(args.steps):
            engine.step()
        phases[policy.on].append(list(records))
    _print(name, engine, phases, engine.scheduler.statistics.drafts.since(before), len(prompts))


def _print(name: str, engine: LLMEngine, phases: dict[bool, list[list[StepRecord]]], drafts: Any, count: int) -> None:
    rate = {on: [_sum(part, "num_output_tokens") / _sum(part, "wall_seconds") for part in phases[on]] for on in phases}
    ratios = [a / b for a, b in zip(rate[True], rate[False], strict=True)]
    s, r, host, wall = (
        {on: statistics.median(each(step) for part in phases[on] for step in part) for on in phases}
        for each in (
            lambda step: step.s_seconds,
            lambda step: max(step.r_seconds),
            lambda step: step.host_seconds,
            lambda step: step.wall_seconds,
        )
    )
    steps = [step for part in phases[True] for step in part]
    accepted = sum(step.num_output_tokens for step in steps) / (count * len(steps)) - 1
    ideal = (1 + accepted) / max(s[True] / s[False], r[True] / r[False])
    better = statistics.median(ratios)
    print(
        f"{name}: {better:.3f} ({min(ratios):.3f}-{max(ratios):.3f}) x {statistics.median(rate[False]):.0f} tokens/s; "
        f"a {drafts.num_accepted_tokens / max(1, drafts.num_drafts):.2f} of each verification "
        f"({drafts.num_accepted_tokens / max(1, drafts.num_draft_tokens):.0%} of drafts), {accepted:.2f} over all; "
        f"rows {statistics.mean(step.num_tokens for step in steps):.0f} for {count}\n"
        f"  without: S {1e3 * s[False]:.1f}, R {1e3 * r[False]:.1f} ms ({r[False] / s[False]:.2f}), host "
        f"{1e3 * host[False]:.1f}, step {1e3 * wall[False]:.1f}; with: S {1e3 * s[True]:.1f}, R {1e3 * r[True]:.1f}, "
        f"host {1e3 * host[True]:.1f}, step {1e3 * wall[True]:.1f}; "
        f"ideal {ideal:.2f}, reached {better / ideal:.2f} of it",
        flush=True,
    )


def _sum(steps: list[StepRecord], name: str) -> float:
    return sum(getattr(step, name) for step in steps)


def _model(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if kind == "random":
        random = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        return Path(llama_folder(1024, 8, vocab=32000, group=1)), random
    return (MODEL if kind == "chat" else _written_out(folder)), {"skip_tokenizer_init": True}


def _written_out(folder: Path) -> Path:
    """The chat model with a KV head for each query head: the same function of its inputs."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    state = model.state_dict()
    for key in [key for key in state if "k_proj" in key or "v_proj" in key]:
        heads = state[key].view(config.num_key_value_heads, -1, config.hidden_size)
        state[key] = heads.repeat_interleave(group, dim=0).reshape(-1, config.hidden_size)
    config.num_key_value_heads = config.num_attention_heads
    other = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    other.load_state_dict(state)
    other.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def _prompts(case: Case, context_len: int, count: int) -> list[list[int]]:
    """Token ids, about ``context_len`` each."""
    if case.task == "random":
        rng = np.random.default_rng(0)
        return rng.integers(3, 30000, (count, context_len)).tolist()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ask = {
        "edit": "Rewrite this Python code with the name self replaced by this, and change nothing else.\n\n```python\n",
        "summary": "Sum up this part of a manual, and quote the sentences that matter.\n\n",
    }[case.task]
    texts = _manual(count) if case.task == "summary" else _code(count)
    frame = len(_chat(tokenizer, ask))
    pieces = [tokenizer.decode(tokenizer.encode(text)[: context_len - frame]) for text in texts]
    return [_chat(tokenizer, ask + piece) for piece in pieces]


def _chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def _code(count: int) -> list[str]:
    """Pieces of the standard library's large modules, each from another line on."""
    files = sorted(Path(inspect.__file__).parent.glob("*.py"))
    texts = [each.read_text() for each in files if each.stat().st_size > LEAST_SOURCE_BYTES]
    places = [(texts[i % len(texts)], i // len(texts)) for i in range(count)]
    return [text[text.index("\n", min(20000 * part + 3000, len(text) // 2)) + 1 :] for text, part in places]


def _manual(count: int) -> list[str]:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())
    return [text[place:] for place in np.linspace(0, len(text) - 20000, count).astype(int)]


if __name__ == "__main__":
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    main()
