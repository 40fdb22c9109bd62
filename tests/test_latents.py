"""Multi-head latent attention over latent rows gives the tokens of transformers' ``generate``, however it is run."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import latent_zoo, model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.latent_zoo import SETTINGS, prompts
from helpers.prefill_workers import Watched

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.sworker.adapters.latents import LatentRows, use_latent_rows

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
BOTH = {"kv_replicas": 2, "kv_shard_tokens": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny DeepSeek-V3 and return its folder."""
    place = tmp_path_factory.mktemp("deepseek_v3")
    latent_zoo.build_model("deepseek_v3").save_pretrained(place)
    return place


def generated(llm: LLM, texts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the token ids of every text, and check that nothing stays behind."""
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


DTYPES = [("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "int4")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [DTYPES[0], *(pytest.param(*each, marks=pytest.mark.thorough) for each in DTYPES[1:])]
)
def test_tokens_stay_among_others_at_prefill_workers_in_two_places_and_after_kill_9(
    folder: Path, dtype: str, kv_dtype: str
) -> None:
    """Ranges with two copies, one of which is lost, give the tokens of one R-worker with each text alone."""
    texts, params = prompts((700, 30, 505, 620)), replace(GREEDY, max_tokens=12)
    settings = SETTINGS | {"dtype": dtype, "kv_cache_dtype": kv_dtype, "kv_shard_tokens": 512}
    with LLM(str(folder), **settings) as llm:
        wanted = [generated(llm, [text], params)[0] for text in texts]
        assert generated(llm, texts, params) == wanted
    with (
        prefill_workers.threads(folder, 2, dtype=dtype, max_model_len=1024) as addresses,
        LLM(str(folder), **settings | BOTH, r_workers="spawn:3", prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        assert [each[0] for each in there.run(texts, lambda _: params, {4: kill})] == wanted
        assert there.computed
        assert_nothing_held(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [pytest.param({}, marks=pytest.mark.thorough), BOTH], ids=["whole", "ranges"])
def test_tokens_stay_among_others_and_after_kill_9_where_r_workers_absorb(folder: Path, ranges: dict[str, int]) -> None:
    """In bfloat16, R-workers that absorb give the tokens of one R-worker with each text alone."""
    texts, params = prompts((700, 30, 505, 620)), replace(GREEDY, max_tokens=12)
    settings = SETTINGS | {"dtype": "bfloat16", "latent_absorption": "r", "max_num_batched_tokens": 300}
    settings |= {"max_num_seqs": 16, "kv_shard_tokens": ranges.get("kv_shard_tokens")}
    with LLM(str(folder), **settings) as llm:
        wanted = [generated(llm, [text], params)[0] for text in texts]
        assert generated(llm, texts, params) == wanted
    with LLM(str(folder), **settings | ranges, r_workers="spawn:3") as llm:
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        assert [each[0] for each in Watched(llm).run(texts, lambda _: params, {4: kill})] == wanted
        assert_nothing_held(llm.engine)


def test_r_workers_absorb_latents_alone(tmp_path: Path) -> None:
    model_zoo.build_model("llama-gqa").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="latent_absorption: r needs latent attention"):
        LLM(str(tmp_path), **SETTINGS | {"max_model_len": 256, "latent_absorption": "r"})


@pytest.mark.parametrize(("kv_dtype", "row_bytes", "least"), [("int8", 32 + 4 + 16, 0.9), ("int4", 16 + 4 + 16, 0.5)])
def test_quantized_latents_are_near_the_models_own(folder: Path, kv_dtype: str, row_bytes: int, least: float) -> None:
    """Most tokens are those that the model itself prefers after the same text."""
    model, texts = latent_zoo.build_model("deepseek_v3"), prompts((130, 40, 3, 17))
    with LLM(str(folder), **SETTINGS, kv_cache_dtype=kv_dtype) as llm:
        assert llm.engine.s_model.layout.kv_bytes_per_token == 3 * row_bytes
        tokens = generated(llm, texts)
    wrong = sum(model_zoo.disagreements(model, *pair) for pair in zip(texts, tokens, strict=True))
    print(kv_dtype, wrong)
    assert wrong < (1 - least) * 4 * 24


def test_what_expands_otherwise_stays_expanded() -> None:
    """The values of one module are not those of ``kv_b_proj``, and another one's projection has a bias."""
    for change in ("values", "bias"):
        model = latent_zoo.build_model("minicpm3")
        attention = model.model.layers[1].self_attn
        own = attention.expand_kv
        if change == "values":
            attention.expand_kv = lambda kv_nope, k_rot, own=own: (own(kv_nope, k_rot)[0], 2 * own(kv_nope, k_rot)[1])
        else:
            attention.kv_b_proj.bias = torch.nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
        use_latent_rows(model)
        assert not any(isinstance(module, LatentRows) for module in model.modules())
