"""A job that continues while R-workers come and go, and checks every token at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams
from fastdecode.engine.engine import LLMEngine
from helpers import model_zoo

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
NAME = "llama-gqa"


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "r_threads": 1}
    where = {"kv_cache_memory": "64MiB", "r_workers": "spawn:1", "pool_listen": "127.0.0.1:0"}
    return LLM(str(folder), **{**defaults, **where, **settings})


class Job:
    """Runs 24 sequences at a time through one engine, step by step; ``finish`` checks every token."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.wanted: list[list[int]] = []
        self.add_round()

    def add_round(self) -> None:
        """Add 24 more sequences."""
        for number, prompt in enumerate(model_zoo.prompts(NAME) * 3, len(self.wanted)):
            self.engine.add_request(str(number), prompt, GREEDY)
        self.wanted += [list(tokens) for tokens in model_zoo.reference(NAME).tokens] * 3

    def step_until(self, condition: Callable[[], bool], pause_seconds: float = 0.0) -> None:
        """Run steps until ``condition`` is true; start another round whenever one has ended."""
        while not condition():
            if not self.engine.has_unfinished_requests():
                self.add_round()
            self.step()
            time.sleep(pause_seconds)

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
        assert [self.tokens[number] for number in range(len(self.wanted))] == self.wanted
