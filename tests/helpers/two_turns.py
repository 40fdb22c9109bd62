"""Chats of two turns with tiny hybrids, and engines for them: how much of the first turn was read from disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams
from helpers.tiny_hybrids import built, generated, random_prompts

BLOCK = 16

Chats = Callable[[str], tuple[Path, list[list[int]], list[list[int]], list[list[int]]]]
"""A function of a model type: a tiny model's folder, prompts of first and second turns, and the second answers."""


def saved_chats(root: Path, lengths: Sequence[int], num_tokens: int) -> Chats:
    """Return chats of models saved under ``root``: first prompts of ``lengths``, answers of ``num_tokens`` tokens."""

    @cache
    def save(model_type: str) -> tuple[Path, list[list[int]], list[list[int]], list[list[int]]]:
        model = built(model_type, max_position_embeddings=1024)
        model.save_pretrained(root / model_type)
        first = random_prompts(lengths)
        answers = [generated(model, prompt, num_tokens) for prompt in first]
        second = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(first, answers, strict=True)]
        return root / model_type, first, second, [generated(model, prompt, num_tokens) for prompt in second]

    return save


def make_llm(folder: Path, **settings: Any) -> LLM:
    """Return an engine of the model in ``folder``, with small defaults for what ``settings`` leaves out."""
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 700, "s_threads": 1, "r_threads": 1}
    kept = {"dtype": "float32", "kv_cache_memory": "32MiB", "block_size": BLOCK}
    return LLM(str(folder), **{**defaults, **kept, **settings})


def run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the ``num_tokens`` tokens that ``llm`` generates greedily after each prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counts(llm: LLM) -> Any:
    """Return what the engine counts of parked prefixes."""
    return llm.engine.scheduler.store.parked.counts
