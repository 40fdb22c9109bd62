"""Attention sources are the weights of transformers' own attention, wherever keys lie.

Rows beside them are unchanged.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import latent_zoo, model_zoo, r_workers, sparse_zoo, tiny_hybrids
from helpers.attention_oracle import attentions, block_weights, told_weights
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, RequestOutput, SamplingParams
from fastdecode.core.errors import ConfigError, RequestError

CLOSE = 1e-4
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False, logprobs=2)
ALL = replace(PLAIN, attention_sources=1024)
TINY = {"device": "cpu", "skip_tokenizer_init": True, "s_threads": 1, "r_threads": 1, "kv_cache_memory": "16MiB"}

CASES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "llama-gqa": ({"r_workers": "inproc:2"}, [0, 1, 2], [0, 1, 2]),
    "gemma2": ({"r_workers": "spawn:2", "kv_replicas": 2}, [1, 3], [0, 1, 2, 3]),
    "gpt_oss": ({"r_workers": "inproc:1"}, [1, 3], [0, 1]),
    "llama4_text": ({"prefill_scratch": "64MiB"}, [3], [0, 3]),
    "mpt": ({}, [0, 1, 2], [1]),
    "falcon": ({"r_workers": "spawn:1"}, [0, 1, 2], [2]),
    "deepseek_v3": ({"latent_absorption": "r"}, [0, 1, 2], [0]),
    "deepseek_v2": ({"latent_absorption": "s", "r_workers": "inproc:2"}, [0, 1, 2], [0]),
    "deepseek_v32": ({"r_workers": "spawn:1"}, [0, 1, 2], [2]),
    "minimax_m3": ({"r_workers": "inproc:2", "block_size": 16}, [0, 1, 2], [1]),
    "qwen3_next": ({"r_workers": "inproc:2", "state_on": "s"}, [0], [0]),
}
"""Settings, the layers that attend everything, and further layers by their number among those that attend."""


def model_of(name: str) -> tuple[Any, list[int]]:
    """Return a random model, and a prompt of two splits where it takes that many tokens."""
    if name in model_zoo.RECIPES:
        return model_zoo.build_model(name), model_zoo.prompts(name)[0]
    if name in latent_zoo.CONFIGS:
        return latent_zoo.build_model(name), latent_zoo.prompts()[0]
    if name in sparse_zoo.CONFIGS:
        return sparse_zoo.build_model(name), sparse_zoo.prompts()[0]
    return tiny_hybrids.built(name), tiny_hybrids.random_prompts((150,))[0]


def run(llm: LLM, prompts: Sequence[list[int]], *params: SamplingParams) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], list(params), use_tqdm=False)
    assert_nothing_held(llm.engine)
    return outputs


def assert_equal(model: Any, output: RequestOutput, layers: Sequence[int], block: int = 16) -> None:
    """Assert that every token's sources are transformers' weights of the row before it."""
    completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
    found = attentions(model, [*output.prompt_token_ids, *completion.token_ids])
    assert len(completion.attention_sources) == len(completion.token_ids)
    for position, sources in enumerate(completion.attention_sources, num_prompt - 1):
        wanted = block_weights([found[layer] for layer in layers], position, block)
        told = told_weights(sources, position + 1, block)
        assert np.abs(told - wanted).max() < CLOSE, (position, np.abs(told - wanted).max())


FAST = ("llama-gqa",)
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_sources_are_the_weights_of_transformers(name: str, tmp_path: Path) -> None:
    """One request asks for all layers that attend everything, one for named layers, and one for none."""
    settings, everything, named = CASES[name]
    model, prompt = model_of(name)
    model.save_pretrained(tmp_path)
    other = replace(ALL, attention_source_layers=named, attention_source_block=24)
    with LLM(str(tmp_path), **{**TINY, "max_model_len": len(prompt) + 16, **settings}) as llm:
        plain = run(llm, [prompt] * 3, PLAIN, PLAIN, PLAIN)
        asked = run(llm, [prompt] * 3, ALL, other, PLAIN)
    assert [each.outputs[0].logprobs for each in asked] == [each.outputs[0].logprobs for each in plain], "to the bit"
    assert_equal(model, asked[0], everything)
    assert_equal(model, asked[1], named, 24)
    assert asked[2].outputs[0].attention_sources is None


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Save a tiny Llama that takes long texts; return it and its folder."""
    folder = tmp_path_factory.mktemp("llama")
    model = model_zoo.build_model("llama-gqa", max_position_embeddings=4096)
    model.save_pretrained(folder)
    return model, folder


def long_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(500) for _ in range(length)]


WAYS: dict[str, dict[str, Any]] = {
    "ranges": {"r_workers": "inproc:3", "kv_shard_tokens": 512},
    "ranges of processes": {"r_workers": "spawn:2", "kv_shard_tokens": 512, "kv_replicas": 2},
    "scratch": {"prefill_scratch": "64MiB", "max_num_batched_tokens": 256},
    "ranks": {"tensor_parallel_size": 2, "r_workers": "inproc:2", "kv_shard_tokens": 512},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
MORE = ("ranges", "ranges of processes")
"""Ways whose ranges the way "ranks" has, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "ranks",
        "scratch",
        "drafts",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in MORE),
    ],
)
def test_sources_do_not_depend_on_the_way(way: str, llama: tuple[Any, Path]) -> None:
    """Ranges, copies, prompts on the S-worker, and drafts (some accepted) give the same sources."""
    model, folder = llama
    prompts = [long_prompt(1300), long_prompt(1021)]
    params = replace(ALL, max_tokens=8)
    with LLM(str(folder), **{**TINY, "max_model_len": 2048, **WAYS[way]}) as llm:
        if way == "drafts":
            plain = [list(each.outputs[0].token_ids) for each in run(llm, prompts, params, params)]
            always_draft(llm.engine, Clairvoyant(dict(zip(map(tuple, prompts), plain, strict=True)), error=0.3))
        outputs = run(llm, prompts, params, params)
    for output in outputs:
        assert_equal(model, output, [0, 1, 2])


@pytest.mark.slow
def test_a_request_goes_on_with_sources_after_preemption_and_hits(llama: tuple[Any, Path]) -> None:
    """There is room for little more than one of three requests; later prompts begin with cached ones."""
    model, folder = llama
    prompts = [long_prompt(300), long_prompt(301), long_prompt(302)]
    params = replace(ALL, max_tokens=40)
    with LLM(str(folder), **{**TINY, "max_model_len": 1024, "kv_cache_memory": "1MiB"}) as llm:
        outputs = run(llm, prompts, params, params, params)
        again = run(llm, [[*prompts[0], 7]], replace(ALL, max_tokens=2))
    for output in [*outputs, *again]:
        assert_equal(model, output, [0, 1, 2])


@pytest.mark.slow
def test_sources_over_tcp(llama: tuple[Any, Path]) -> None:
    """Two R-workers that listen hold a sequence in ranges."""
    model, folder = llama
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(r_workers.listening())[1] for _ in range(2)]
        hosts = ",".join(addresses)
        settings = {"device": "cpu", "skip_tokenizer_init": True, "s_threads": 1, "max_model_len": 2048}
        settings |= {"r_workers": hosts, "kv_shard_tokens": 512}
        llm = stack.enter_context(LLM(str(folder), **settings))
        (output,) = run(llm, [long_prompt(1300)], replace(ALL, max_tokens=4))
    assert_equal(model, output, [0, 1, 2])


@pytest.mark.slow
def test_an_r_worker_may_be_lost_while_it_is_asked(llama: tuple[Any, Path]) -> None:
    """The lost sequence's tokens are computed again, with their sources."""
    model, folder = llama
    prompts, params = [long_prompt(100 + number) for number in range(4)], replace(ALL, max_tokens=8)
    with LLM(str(folder), **{**TINY, "max_model_len": 512, "r_workers": "spawn:2"}) as llm:
        plain = run(llm, prompts, *[replace(PLAIN, max_tokens=8)] * 4)
        pids, weigh, count = r_workers.spawned_pids(llm), llm.engine.backend.weigh, 0

        def weigh_while_one_dies(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                os.kill(pids[0], signal.SIGKILL)
            return weigh(*args)

        llm.engine.backend.weigh = weigh_while_one_dies
        outputs = run(llm, prompts, *[params] * 4)
    assert count > 8, "steps were computed again"
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    for output in outputs:
        assert_equal(model, output, [0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kv_shard_tokens": 512, "max_model_len": 1024}])
def test_no_r_worker_is_lost_where_the_model_gives_nan(settings: dict[str, Any], tmp_path: Path) -> None:
    """A request with NaN logits gets an error; the other request gets its attention sources."""
    model = model_zoo.build_model("llama-gqa", max_position_embeddings=1024)
    model.model.embed_tokens.weight.data[99] = float("nan")
    model.save_pretrained(tmp_path)
    sound = [each % 90 + 1 for each in range(540 if settings else 40)]
    with LLM(str(tmp_path), **TINY, **settings, r_workers="spawn:2") as llm:
        failed, other = (each.outputs[0] for each in run(llm, [[*sound[:-5], 99, 5], sound], ALL, ALL))
        assert (failed.stop_reason, other.finish_reason) == ("the model gave no finite logits", "length")
        assert llm.engine.membership.changes.lost == 0
        assert all(other.attention_sources) and len(other.attention_sources) == PLAIN.max_tokens


def test_what_cannot_be_told_is_refused(llama: tuple[Any, Path]) -> None:
    _, folder = llama
    with LLM(str(folder), **TINY, max_model_len=256) as llm, pytest.raises(RequestError, match="from 0 to 2, got 3"):
        run(llm, [[1, 2]], replace(ALL, attention_source_layers=[3]))
    for name, value in (("attention_sources", 0), ("attention_source_block", 0), ("attention_source_layers", [])):
        with pytest.raises(ConfigError, match=name):
            replace(ALL, **{name: value})
