"""Tiny random models for tests of vLLM's model code, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastdecode import LLM, SamplingParams
from helpers import latent_zoo, model_zoo

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1024, "dtype": "float32"}
SETTINGS |= {"s_threads": 1, "r_threads": 1, "kv_cache_memory": "64MiB", "block_size": 16, "model_impl": "vllm"}


class Zoo:
    """Tiny random models in folders, with what transformers generates for eight prompts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[Path, list[list[int]]]] = {}

    def __getitem__(self, name: str) -> tuple[Path, list[list[int]]]:
        if name not in self._found:
            tied = {"tie_word_embeddings": name == "gemma2"}  # The published model ties its embeddings.
            kinds = latent_zoo if name in latent_zoo.CONFIGS else model_zoo
            model = kinds.build_model(name, **{"max_position_embeddings": 2048} | tied)
            path = self._folder / name
            model.save_pretrained(path)
            self._found[name] = path, model_zoo.generate(model, prompts()).tokens
        return self._found[name]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(model_zoo.VOCABULARY, (each,), generator=generator).tolist() for each in latent_zoo.LENGTHS]


def generate(llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": list(text)} for text in texts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def job_of_ranks(folder: Path, way: dict[str, Any]) -> dict[str, Any]:
    settings = {each: value for each, value in SETTINGS.items() if each != "skip_tokenizer_init"}
    return {"folder": str(folder), "prompts": prompts(), "params": {"max_tokens": 64}, "settings": settings | way}
