"""Multi-head latent attention over latent rows: the tokens of transformers' ``generate``, however it is run."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import latent_zoo, model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from helpers.prefill_workers import Watched

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import BackendError
from fastdecode.sworker.latents import LatentRows, use_latent_rows

NUM_TOKENS = 64 if SEES_ALL else 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1024, "s_threads": 1}
SETTINGS |= {"r_threads": 1, "kv_cache_memory": "16MiB", "block_size": 16}
LENGTHS = (620, 1, 40, 128, 3, 77, 17, 160)
BOTH = {"kv_replicas": 2, "kv_shard_tokens": 512}
RUN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_mini_batches": 1},
    "deepseek_v3": {"r_workers": "inproc:3", "kv_shard_tokens": 512, "num_mini_batches": 3},
    "kimi_k25": {"r_workers": "inproc:2", "kv_replicas": 2, "num_mini_batches": 2},
    "glm4_moe_lite": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "r_threads": 2},
    "mistral4": {"prefill_scratch": 1, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "longcat_flash": {"r_workers": "inproc:3", "num_mini_batches": 2} | BOTH,
    "minicpm3": {"r_workers": "spawn:2", "num_mini_batches": 2, "max_num_batched_tokens": 100, "max_num_seqs": 16},
    "youtu": {"prefill_scratch": "16MiB", "num_mini_batches": 2},
    "axk1": {"r_workers": "inproc:2", "block_size": 64, "num_mini_batches": 3},
}
"""Each architecture in another way, of those that must not matter."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny DeepSeek-V3."""
    place = tmp_path_factory.mktemp("deepseek_v3")
    latent_zoo.build_model("deepseek_v3").save_pretrained(place)
    return place


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(model_zoo.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generated(llm: LLM, texts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids of every text, and the check that nothing stays behind."""
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "name", [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow) for name in RUN]
)
def test_every_architecture_matches_generate(name: str, tmp_path: Path) -> None:
    model = latent_zoo.build_model(name)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SETTINGS | RUN[name]) as llm:
        layout = llm.engine.s_model.layout
        assert {(each.num_kv_heads, each.key_head_dim, each.stored_value_dim) for each in layout.layers} == {(1, 40, 0)}
        assert layout.kv_bytes_per_token == len(layout.layers) * 40 * 4
        tokens = generated(llm, prompts())
    assert sum(len(set(each)) > NUM_TOKENS / 3 for each in tokens) >= 7  # one may go round in circles
    assert [model_zoo.disagreements(model, *pair) for pair in zip(prompts(), tokens, strict=True)] == [0] * 8


@pytest.mark.slow
def test_16_bits_keep_their_tokens_at_prefill_workers_in_two_places_and_after_kill_9(folder: Path) -> None:
    """In bfloat16: those of one R-worker and each text by itself, in ranges with two copies, one of which is lost."""
    texts, params = (
        prompts((700, 30, 505, 620)),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False),
    )
    settings = SETTINGS | {"dtype": "bfloat16", "kv_shard_tokens": 512}
    with LLM(str(folder), **settings) as llm:
        wanted = [generated(llm, [text], params)[0] for text in texts]
        assert generated(llm, texts, params) == wanted
    with (
        prefill_workers.threads(folder, 2, dtype="bfloat16", max_model_len=1024) as addresses,
        LLM(str(folder), **settings | BOTH, r_workers="spawn:3", prefill_workers=addresses) as llm,
    ):
        there = Watched(llm, range(2))
        kill = partial(os.kill, r_workers.spawned_pids(llm)[1], signal.SIGKILL)
        assert [each[0] for each in there.run(texts, lambda _: params, {4: kill})] == wanted
        assert there.computed
        assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantized_caches_keep_keys_and_values_expanded(
    folder: Path, kv_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(folder), **SETTINGS, kv_cache_dtype=kv_dtype) as llm:
        layers = llm.engine.s_model.layout.layers
        assert {(each.num_kv_heads, each.key_head_dim, each.stored_value_dim) for each in layers} == {(4, 24, 12)}
        assert len(generated(llm, prompts((40,)))[0]) == NUM_TOKENS
    assert f"a cache of {kv_dtype} keeps the keys and values of every head" in caplog.text


@pytest.mark.slow
def test_prefill_workers_of_quantized_caches_keep_them_expanded_too(folder: Path) -> None:
    """Those that the engine starts are told the cache's dtype; others are refused by name where theirs differs."""
    texts, settings = prompts((40, 77)), SETTINGS | {"kv_cache_dtype": "int8"}
    with LLM(str(folder), **settings) as llm:
        wanted = generated(llm, texts)
    with LLM(str(folder), **settings, prefill_workers="spawn:1", prefill_threads=1) as llm:
        there = Watched(llm, range(1))
        assert [each[0] for each in there.run(texts, lambda _: GREEDY)] == wanted and there.computed
    with (
        prefill_workers.threads(folder, 1, max_model_len=1024) as addresses,
        pytest.raises(BackendError, match="or, where attention is over latents, another --kv-cache-dtype"),
    ):
        LLM(str(folder), **settings, prefill_workers=addresses)


def test_what_expands_otherwise_stays_expanded() -> None:
    """A module whose values are not those of ``kv_b_proj``, and one whose projection has a bias."""
    for change in ("values", "bias"):
        model = latent_zoo.build_model("minicpm3")
        attention = model.model.layers[1].self_attn
        own = attention.expand_kv
        if change == "values":
            attention.expand_kv = lambda kv_nope, k_rot, own=own: (own(kv_nope, k_rot)[0], 2 * own(kv_nope, k_rot)[1])
        else:
            attention.kv_b_proj.bias = torch.nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
        use_latent_rows(model, "auto")
        assert not any(isinstance(module, LatentRows) for module in model.modules())


@pytest.mark.slow
def test_ranks_have_their_heads_and_the_whole_latent(tmp_path: Path) -> None:
    """Each rank's R-workers keep all rows, which its heads attend to."""
    texts, model = prompts((620, 40, 3)), latent_zoo.build_model("glm4_moe_lite")
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SETTINGS, tensor_parallel_size=2, r_workers="inproc:2", num_mini_batches=2) as llm:
        layers = llm.engine.s_model.layout.layers
        assert {(each.num_heads, each.num_kv_heads, each.key_head_dim) for each in layers} == {(2, 1, 40)}
        tokens = generated(llm, texts)
    assert [model_zoo.disagreements(model, *pair) for pair in zip(texts, tokens, strict=True)] == [0] * 3
