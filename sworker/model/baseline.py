"""The plain transformers baseline for comparisons: static batches through ``generate``, with attention in torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.sworker.model import gguf, packing
from fastdecode.sworker.model.loader import load_hf_config, max_position_embeddings, resolve_dtype


@dataclass(frozen=True)
class BatchTimes:
    """Times of one static batch: seconds to its first logits, and between the logits of consecutive steps."""

    prefill_seconds: float
    decode_step_seconds: tuple[float, ...]
    num_sequences: int


class TransformersBaseline:
    """The engine's model with transformers' default (SDPA) attention and its own KV cache."""

    def __init__(self, config: EngineConfig) -> None:
        hf_config = load_hf_config(config)
        dtype = resolve_dtype(config.dtype, hf_config)
        self.vocab_size = int(hf_config.get_text_config().vocab_size)
        self.max_model_len = max_position_embeddings(hf_config)
        self.batch_size = config.max_num_seqs
        if config.load_format == "dummy":
            torch.manual_seed(config.seed)
            self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval()
        else:
            name, named = gguf.weights_source(config.model)
            model = AutoModelForCausalLM.from_pretrained(name, config=hf_config, dtype=dtype, **named)
            self.model = packing.unpacked(model).eval()

    def run(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> Iterator[BatchTimes]:
        """Run greedy static batches in order, each as long as its longest output; yield their times."""
        for start in range(0, len(prompts), self.batch_size):
            stop = start + self.batch_size
            yield self._run_batch(prompts[start:stop], max(output_lens[start:stop]))

    def _run_batch(self, prompts: Sequence[list[int]], output_len: int) -> BatchTimes:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stamps = _Stamps()
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
                logits_processor=[stamps.note],
            )
        moments = stamps.moments
        steps = tuple(after - before for before, after in pairwise(moments))
        return BatchTimes(moments[0] - started, steps, len(prompts))


class _Stamps:
    """A logits processor that records the time at which each step's logits are ready."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def note(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Record the time and return ``scores`` unchanged, as a logits processor."""
        self.moments.append(time.perf_counter())
        return scores
