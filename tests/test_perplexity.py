"""Perplexity through the R-workers' cache against transformers' own logits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engine_checks import assert_nothing_held
from transformers import AutoModelForCausalLM

from fastdecode.api.config import EngineConfig
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.cli.bench_perplexity import cut, measure_perplexity

pytestmark = pytest.mark.slow

TEXT = (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """Return an engine with the demo model and one R-worker."""
    return LLMEngine(EngineConfig(max_model_len=600, kv_cache_memory="64MiB", s_threads=1))


def test_windows_predict_every_token_once() -> None:
    """Neighbouring windows share one token."""
    assert cut(list(range(7)), 3) == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    assert cut(list(range(6)), 3) == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert cut([1], 3) == []


def test_scores_are_transformers_log_probabilities(engine: LLMEngine) -> None:
    """The text's scores equal one forward of the plain model, and nothing stays in the cache."""
    assert engine.s_model.tokenizer is not None
    ids = engine.s_model.tokenizer.encode(TEXT)[:500]
    model = AutoModelForCausalLM.from_pretrained(Path(DEMO_MODEL), dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    assert np.abs(engine.score(ids) - expected).max() < 1e-3
    assert engine.backend.blocks_used == 0


def test_an_idle_engine_scores_though_its_cache_is_full_of_prefixes() -> None:
    """All sixteen blocks hold retained prefixes."""
    config = EngineConfig(DEMO_MODEL, device="cpu", dtype="float32", max_model_len=256, kv_cache_memory="1MiB")
    engine = LLMEngine(config)
    try:
        for index in range(8):
            ids = [index + 1] * 200
            engine.add_request(str(index), {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, ignore_eos=True))
            while engine.has_unfinished_requests():
                engine.step()
        assert (
            engine.scheduler.snapshot().r_workers[0].free == engine.r_workers[0].num_blocks - engine.backend.blocks_used
        )
        assert engine.score([1] * 250).shape == (249,)
    finally:
        engine.close()


def test_perplexity_is_the_exponential_of_the_mean(engine: LLMEngine) -> None:
    """The perplexity is far below a uniform guess's, and agrees with its bits per byte."""
    found = measure_perplexity(engine, TEXT, 512)
    assert found.num_tokens == len(TEXT.encode())
    assert 1.5 < found.perplexity < 8
    assert found.bits_per_byte == pytest.approx(math.log2(found.perplexity), rel=0.01)


def test_a_busy_engine_does_not_score(engine: LLMEngine) -> None:
    """The error is clear, and the running request goes on."""
    engine.add_request("a", "def f():", SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="idle engine"):
        engine.score([1, 2, 3])
    while engine.has_unfinished_requests():
        engine.step()


def test_quantised_caches_stay_close_to_bfloat16() -> None:
    """int8 is within 0.5 % and int4 within 1 % of bfloat16, and both generate."""
    found = {}
    for kv_dtype in ("bfloat16", "int8", "int4"):
        settings = {"max_model_len": 1024, "kv_cache_memory": "64MiB", "s_threads": 1, "kv_cache_dtype": kv_dtype}
        quantised = LLMEngine(EngineConfig(**settings))
        found[kv_dtype] = measure_perplexity(quantised, TEXT, 1000).perplexity
        quantised.add_request("a", "def read_lines(self, path):", SamplingParams(max_tokens=20, temperature=0))
        outputs = [output for _ in range(60) for output in quantised.step() if output.finished]
        assert len(outputs) == 1 and len(outputs[0].outputs[0].token_ids) > 0
        assert_nothing_held(quantised)
        quantised.close()
    assert found["int8"] == pytest.approx(found["bfloat16"], rel=5e-3)
    assert found["int4"] == pytest.approx(found["bfloat16"], rel=1e-2)
