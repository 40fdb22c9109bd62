"""Decoding with draft tokens against decoding without: python benchmarks/speculation.py edit summary mha s-bound random

One engine, drafts allowed for some decode steps and forbidden for as many, A B A B, so that what the machine does
meanwhile it does to both; S-worker and R-worker have a core each. Printed are tokens per second with drafts over
without (median of the rounds and their range), the mean accepted length a of all verifications and over all sequences,
how S and R time grew, and the ideal (1 + a) / max(S growth, R growth).

edit, summary: the chat model (``make model``), which is to rewrite a piece of Python's standard library, or to sum up a
piece of its manual; bfloat16, grouped heads. mha: edit with every KV head written out for each query head, which gives
the same texts from a cache three times as large. s-bound: edit with short prompts, where R-workers wait. random:
random weights and caches at temperature 1, R-bound, where no text repeats. Marks: edit, summary and mha 1.4 where
R time is at least twice S time, and 0.8 of the ideal; s-bound 0.98; random 0.97.

Only ``--distinct`` prompts are computed (8). The other sequences get copies of their keys and values in blocks of their
own, so that what is read is what as many prompts would have R-workers read.
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

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.metrics import StepRecord
from fastdecode.core.protocols import DraftPolicy
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.engine import LLMEngine
from fastdecode.sworker import SWorker
from fastdecode.sworker.random_prompts import RandomPrompts
from fastdecode.sworker.sampling import SampledToken

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
    "edit": Case("chat", "edit", 4800, 64),
    "summary": Case("chat", "summary", 4800, 64),
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
    parser.add_argument("--distinct", type=int, default=8, help="prompts that are computed")
    args = parser.parse_args()
    for name in args.cases or CASES:
        run(name, CASES[name], args)


def run(name: str, case: Case, args: argparse.Namespace) -> None:
    """One comparison."""
    context_len, count = args.context_len or case.context_len, args.sequences or case.num_sequences
    with tempfile.TemporaryDirectory() as folder:
        model, settings = _model(case.model, Path(folder))
        prompts = _prompts(case, context_len, min(count, args.distinct))
        most, least = map(int, args.lookup.split(","))
        speculative = {"method": "ngram", "num_speculative_tokens": args.drafts or case.drafts}
        config = EngineConfig(
            model=str(model),
            max_num_seqs=count,
            max_num_batched_tokens=2048,
            kv_cache_memory="14GiB",
            enable_prefix_caching=False,
            schedule="prefill-first",
            prefill_scratch="4GiB",
            r_workers="spawn:1",
            s_cores="0",
            r_cores="1",
            num_mini_batches=2,
            speculative_config={**speculative, "prompt_lookup_max": most, "prompt_lookup_min": least},
            **settings,
        )
        engine = LLMEngine(config)
        try:
            policy = Switched(engine.scheduler.drafts.policy)
            engine.scheduler.drafts.policy = policy
            policy.on = False
            _fill(engine, prompts, count, case)
            _compare(name, engine, policy, count, args)
        finally:
            engine.close()


@dataclass(frozen=True)
class Prompt:
    """Keys and values of each layer, [tokens, heads, dim] each, and the token that follows."""

    layers: list[tuple[np.ndarray, np.ndarray]]
    next_token: int


class Filled(RandomPrompts):
    """Sends what was computed of ``prompts`` in place of what the model computes, by the sequences' numbers in turn."""

    prompts: list[Prompt]

    def run(self, step: ScheduledStep, sampling: Any, *more: Any) -> dict[int, list[SampledToken]]:
        return {i: [SampledToken(self._of(i).next_token)] for i in super().run(step, sampling, *more)}

    def _fill(self, index: int, mini_batch: MiniBatch, rng: np.random.Generator) -> None:
        spans = [(self._of(i), slice(start, start + count)) for i, _, start, count, *_ in mini_batch.chunks.tolist()]
        for number, layer in enumerate(self.layout.layers):
            k, v = (np.concatenate([each.layers[number][which][rows] for each, rows in spans]) for which in (0, 1))
            q = np.zeros((0, layer.num_heads, layer.key_head_dim), k.dtype)
            self.backend.submit(index, number, q, k, v)
            self.backend.collect(index)

    def _of(self, sequence_id: int) -> Prompt:
        return self.prompts[sequence_id % len(self.prompts)]


def _fill(engine: LLMEngine, tokens: list[list[int]], count: int, case: Case) -> None:
    """``count`` sequences that are about to decode."""
    known = [_compute(engine, each) for each in tokens] if case.model != "random" else []

    def make_s_worker(*parts: Any) -> SWorker:
        worker = Filled(*parts) if known else RandomPrompts(*parts)
        worker.prompts = known
        return worker

    for number in range(count):
        params = SamplingParams(temperature=case.temperature, seed=number, max_tokens=2048, ignore_eos=True)
        engine.add_request(str(number), tokens[number % len(tokens)], params)
    with engine.world.computed_by(make_s_worker):
        while len(engine.scheduler.snapshot().decoding) < count:
            engine.step()


def _compute(engine: LLMEngine, tokens: list[int]) -> Prompt:
    engine.add_request("one", tokens, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    (sequence,) = engine.scheduler.store.residents.decoding.values()
    rows, layers = engine.backend.export(0, sequence.sequence_id).view(np.uint16), []
    for layer in engine.s_model.layout.layers:
        size = len(tokens) * layer.kv_elements_per_token
        heads = rows[:size].reshape(len(tokens), 2 * layer.num_kv_heads, layer.key_head_dim)
        layers.append((heads[:, : layer.num_kv_heads], heads[:, layer.num_kv_heads :]))
        rows = rows[size:]
    engine.abort_request("one")
    return Prompt(layers, outputs[0].outputs[0].token_ids[0])


def _compare(name: str, engine: LLMEngine, policy: Switched, count: int, args: argparse.Namespace) -> None:
    records: list[StepRecord] = []
    engine.on_step = records.append
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
    _print(name, phases, engine.scheduler.statistics.drafts.since(before), count)


def _print(name: str, phases: dict[bool, list[list[StepRecord]]], drafts: Any, count: int) -> None:
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
