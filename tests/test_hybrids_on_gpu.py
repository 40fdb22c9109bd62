"""Hybrids whose S-part runs on a stand-in for a GPU: states stay on R-workers, and rows cross as on a real one.

The stand-in's copies are late, its buffers hold NaN until they land, and decodes replay recorded graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doubles.fake_gpu import FakeGpu, staging_of
from helpers.engine_checks import assert_nothing_held
from helpers.fake_recorders import fake_recorders
from helpers.tiny_hybrids import random_prompts, save_with_texts

from fastdecode import LLM, SamplingParams
from fastdecode.sworker.run import s_worker

HYBRIDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid",
    "bamba", "falcon_h1", "zamba2", "jamba", "zamba", "minimax", "recurrent_gemma", "lfm2", "lfm2_moe",
)  # fmt: skip
EVERY_TIME = ("qwen3_next", "falcon_h1", "zamba", "recurrent_gemma")
"""One model type of each kind of recurrence; Zamba makes several calls per layer.
test_staging.py has a convolution alone.
"""

ROUTED = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "kimi_linear",
    "granitemoehybrid",
    "jamba",
    "minimax",
    "lfm2_moe",
    "nemotron_h",
)
"""Models with experts, which are called for the tokens that chose them, so that decodes run eagerly."""

PROMPTS = random_prompts((40, 1, 23, 2))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captured", "model_type"),
    [
        pytest.param(
            captured, each, marks=[pytest.mark.thorough] * (each not in (EVERY_TIME if captured else EVERY_TIME[:1])),
            id=f"{'graphs' if captured else 'eager'}-{each}",
        )
        for captured in (True, False)
        for each in HYBRIDS
    ],
)  # fmt: skip
def test_tokens_are_those_of_generate(
    model_type: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = save_with_texts(tmp_path, model_type, PROMPTS, 10)
    gpu = FakeGpu(default_polls=2)
    monkeypatch.setattr(s_worker, "make_staging", lambda backend, device: staging_of(gpu, backend))
    recorders = fake_recorders(monkeypatch) if captured else []
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory": "16MiB"}
    settings |= {"device": "cpu", "s_threads": 1, "r_threads": 1, "max_num_seqs": 16, "num_mini_batches": 2}
    with LLM(str(tmp_path), **settings) as llm:
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_nothing_held(llm.engine)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert gpu.log.count("copy up") == gpu.log.count("copy down") > 0
    if captured and model_type not in ROUTED:
        assert len(recorders[0].replays()) == 2 and all(min(each) > 6 for each in recorders[0].replays())
