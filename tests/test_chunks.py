"""Llama 4's chunks give the tokens of transformers' ``generate``, wherever rows lie and however they came there."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo, prefill_workers, r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.prefill_workers import Watched

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.core.placing import UNLIMITED, AskedPlacing

CHUNK = 128
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1024, "s_threads": 1}
SETTINGS |= {"r_threads": 1, "kv_cache_memory": "32MiB", "block_size": 16}
BOTH = {"kv_replicas": 2, "kv_shard_tokens": 512}


def build_model(chunk: int = CHUNK) -> Any:
    return model_zoo.build_model("llama4_text", max_position_embeddings=1024, attention_chunk_size=chunk)


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama4")
    model.save_pretrained(place)
    return place


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(model_zoo.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generated(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def disagreements(model: Any, texts: list[list[int]], tokens: list[list[int]]) -> list[int]:
    return [model_zoo.disagreements(model, *pair) for pair in zip(texts, tokens, strict=True)]


@pytest.mark.slow
def test_ranges_copies_drafts_and_prefixes_match_generate(model: Any, folder: Path) -> None:
    """Outputs begin new chunks, and prompts continue cached ones, in parts of a step's budget."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    more = {"r_workers": "inproc:3", "num_mini_batches": 2, "max_num_batched_tokens": 200, "max_num_seqs": 8}
    texts = prompts(700, CHUNK - 5, 505)
    with LLM(str(folder), **SETTINGS, **BOTH, **more, speculative_config=drafts) as llm:
        layers = llm.engine.s_model.layout.layers
        assert [(layer.window, layer.chunked) for layer in layers] == [(CHUNK, True)] * 3 + [(0, False)]
        tokens = generated(llm, texts)
        assert disagreements(model, texts, tokens) == [0] * len(texts)
        texts = [text + new + [7] for text, new in zip(texts, tokens, strict=True)]
        again = generated(llm, texts)
        assert disagreements(model, texts, again) == [0] * len(texts)
        always_draft(llm.engine, Clairvoyant(dict(zip(map(tuple, texts), again, strict=True)), error=0.3))
        assert generated(llm, texts) == again
        statistics = llm.engine.scheduler.statistics
        assert statistics.prefix_hit_tokens > 0 and statistics.drafts.num_accepted_tokens > 0
        assert_nothing_held(llm.engine)


@pytest.mark.slow
def test_prefill_workers_and_losses_match_generate(model: Any, folder: Path) -> None:
    texts = prompts(700, 300)
    with (
        prefill_workers.threads(folder, 2, max_model_len=1024) as addresses,
        LLM(str(folder), **SETTINGS, **BOTH, r_workers="spawn:3", prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        tokens = [list(each[0]) for each in there.run(texts, lambda _: GREEDY, {4: kill})]
        assert there.computed and disagreements(model, texts, tokens) == [0] * len(texts)


def test_ranges_are_whole_chunks() -> None:
    """Ranges are whole chunks, or none is chosen: a range of 512 tokens would begin within a chunk of 8,192."""
    longest, num_blocks, asked = 35_000, [300] * 4, AskedPlacing()
    with pytest.raises(ConfigError, match="kv_shard_tokens must be a multiple of the 8192 tokens of the model's"):
        AskedPlacing(512).chosen(longest, num_blocks, 32, None, 8192)
    chosen = [asked.chosen(longest, num_blocks, 32, None, chunk).segment_tokens for chunk in (1, 1024, 2048, 1000)]
    assert chosen == [1024, 1024, UNLIMITED, UNLIMITED]
    fits = [asked.fits_pool(longest, num_blocks, 32, chunk) for chunk in (1, 1024, 2048, 1000)]
    assert fits == [True, True, False, False]
