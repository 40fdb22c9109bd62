"""Every feature whose S-part may run on a GPU, by the GPU's stand-in: the tokens are those of a model on the CPU.

Copies are late, buffers hold NaN until they land, decodes replay recorded graphs, and prompts attend by torch. The
engine takes its model for one on a GPU.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.fake_gpu import FakeGpu, staging_of
from helpers import latent_zoo, model_zoo, r_workers, sparse_zoo, tiny_hybrids
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.fake_recorders import Unreplaced, fake_recorders
from helpers.packed_checkpoints import FORMATS, saved

from fastdecode import LLM, SamplingParams
from fastdecode.engine.compose import build
from fastdecode.sworker.model import transformers_code
from fastdecode.sworker.model.smodel import SModel
from fastdecode.sworker.run import s_worker

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
BASE: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory": "24MiB", "device": "cpu"}
BASE |= {"s_threads": 1, "r_threads": 1, "max_num_seqs": 16, "num_mini_batches": 2, "block_size": 16}
PROMPTS = [*tiny_hybrids.random_prompts((60, 1, 33, 7)), [5, 6, 7, 8] * 6]
"""The last repeats itself, so that n-gram drafts are found."""

MODELS = {
    "windows": lambda: model_zoo.build_model("gemma2"),
    "sinks": lambda: model_zoo.build_model("gpt_oss"),
    "biases": lambda: model_zoo.build_model("bloom"),
    "latents": lambda: latent_zoo.build_model("deepseek_v3"),
    "index": lambda: sparse_zoo.build_model("glm_moe_dsa"),
    "states": lambda: tiny_hybrids.built("qwen3_next"),
    "dense": lambda: model_zoo.build_model("llama-gqa"),
}
DRAFTS = {"num_speculative_tokens": 2}
ALONE = {"enable_prefix_caching": False}
"""For caches that round: a prompt whose beginning is cached attends on R-workers, which also round its queries."""
BY_TORCH = {"prefill_scratch": "4MiB"}
"""Lets torch attend prompts on the CPU too, where R-workers would round queries."""

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("windows", {}),
    "sinks": ("sinks", {}),
    "biases": ("biases", {}),
    "latents": ("latents", {}),
    "latents absorbed by R-workers": ("latents", {"latent_absorption": "r"}),
    "index": ("index", {}),
    "eager": ("dense", {"enforce_eager": True}),
    "one mini-batch": ("dense", {"num_mini_batches": 1}),
    "chunks": ("dense", {"max_num_batched_tokens": 24}),
    "n-gram drafts": ("dense", {"speculative_config": {"method": "ngram", **DRAFTS}}),
    "early-exit drafts": ("dense", {"speculative_config": {"method": "early_exit", "num_layers": 1, **DRAFTS}}),
    "drafts of a model": ("dense", {"speculative_config": {"method": "draft_model", "model": "dense", **DRAFTS}}),
    "drafts over states": ("states", {"speculative_config": {"method": "ngram", **DRAFTS}}),
    "int8 cache": ("dense", {"kv_cache_dtype": "int8", **ALONE, **BY_TORCH}),
    "int4 cache": ("dense", {"kv_cache_dtype": "int4", **ALONE, **BY_TORCH}),
    "int8, prompts by R-workers": ("dense", {"kv_cache_dtype": "int8", "prefill_scratch": "1"}),
    "int4, prompts by R-workers": ("dense", {"kv_cache_dtype": "int4", "prefill_scratch": "1"}),
    "int8 cache of latents": ("latents", {"kv_cache_dtype": "int8", **ALONE}),
    "ranges": ("latents", {"r_workers": "inproc:2", "kv_shard_tokens": 512, "max_model_len": 1024}),
    "two copies": ("dense", {"r_workers": "inproc:2", "kv_replicas": 2}),
    "states here": ("states", {"state_on": "s"}),
    "preemption": ("dense", {"kv_cache_memory": "blocks", "max_model_len": 96, "schedule": "stall-free"}),
    "ranks": ("dense", {"tensor_parallel_size": 2, "dtype": "float32"}),
    "prefill workers": ("dense", {"prefill_workers": "spawn:1"}),
    "processes": ("dense", {"r_workers": "spawn:2"}),
}
EVERY_TIME = ("latents", "sinks", "n-gram drafts", "ranks", "int8 cache", "states here", "preemption", "chunks")
NAMES = [each if each in EVERY_TIME else pytest.param(each, marks=pytest.mark.thorough) for each in FEATURES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a model once and returns its folder."""
    root = tmp_path_factory.mktemp("features")

    @cache
    def save(name: str) -> str:
        MODELS[name]().save_pretrained(root / name)
        return str(root / name)

    return save


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpu]:
    """The stand-ins of the S-workers made from now on, whose models the engine takes for models on a GPU."""
    made: list[FakeGpu] = []

    def staging(backend: Any, device: torch.device) -> Any:
        made.append(FakeGpu(default_polls=2))
        return staging_of(made[-1], backend)

    monkeypatch.setattr(s_worker, "make_staging", staging)
    monkeypatch.setattr(SModel, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(SModel, "device_name", property(lambda self: "a stand-in"))
    monkeypatch.setattr(SModel, "free_memory_bytes", lambda self: 1 << 30)
    return made


def started(folder: Any, model: str, settings: dict[str, Any]) -> LLM:
    more = dict(settings)
    if drafts := more.get("speculative_config"):
        more["speculative_config"] = drafts | ({"model": folder(drafts["model"])} if "model" in drafts else {})
    llm = LLM(folder(model), **BASE | more)
    if drafts:
        always_draft(llm.engine)
    return llm


def texts(llm: LLM, kill_after: int = 0, more: tuple[int, ...] = ()) -> list[list[int]]:
    """Greedy tokens after each prompt, twice, so that prefixes are found; a busy R-worker may be killed meanwhile."""
    tokens: dict[int, list[int]] = {}
    for number, prompt in enumerate([*PROMPTS, *PROMPTS, *tiny_hybrids.random_prompts(more)]):
        llm.engine.add_request(str(number), prompt, GREEDY)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        if kill_after and sum(map(len, tokens.values())) >= kill_after:
            kill_after = 0
            busiest = int(llm.engine.scheduler.store.workers.num_sequences.argmax())
            os.kill(r_workers.spawned_pids(llm)[busiest], signal.SIGKILL)
    assert_nothing_held(llm.engine)
    return [tokens[number] for number in sorted(tokens)]


WANTED = ("kv_cache_dtype", "dtype", "latent_absorption", "enable_prefix_caching", "max_model_len", "prefill_scratch")
"""Settings that decide about tokens, which the engine on the CPU is given too."""


def check(
    name: str, folder: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, kill: int = 0
) -> Any:
    """Compare the tokens of a feature on the stand-in with those on the CPU; return the stand-in's engine's counts."""
    model, settings = FEATURES[name]
    monkeypatch.setattr(build, "PromptCache", lambda backend: None)  # torch attends prompts, as on a GPU
    for each in ("PackedLinears", "FusedRows"):  # a cache that rounds would show how these round
        monkeypatch.setattr(transformers_code, each, Unreplaced)
    more = (620,) if name == "ranges" else ()
    with started(folder, model, {each: value for each, value in settings.items() if each in WANTED}) as plain:
        wanted = texts(plain, 0, more)
        block_bytes = 16 * plain.engine.s_model.layout.kv_bytes_per_token
    if settings.get("kv_cache_memory") == "blocks":
        settings = settings | {"kv_cache_memory": 8 * block_bytes}
    assert len({token for each in wanted for token in each}) > 8
    gpus = request.getfixturevalue("gpus")
    recorders = fake_recorders(monkeypatch)
    with started(folder, model, settings) as llm:
        if settings.get("speculative_config", {}).get("method") == "ngram":  # random texts repeat nothing
            told = dict(zip(map(tuple, PROMPTS), wanted[: len(PROMPTS)], strict=True))
            always_draft(llm.engine, Clairvoyant(told, error=0.3))
        found = texts(llm, kill, more)
        first = 8 if "cache" in name else None  # a cache that rounds turns a last bit into another number
        assert [each[:first] for each in found] == [each[:first] for each in wanted]
        statistics = llm.engine.scheduler.statistics
    assert gpus[0].log.count("copy up") == gpus[0].log.count("copy down") > 0
    return statistics, recorders


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_cpus(
    name: str, folder: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """An engine whose prompts attend on a GPU, over a cache that rounds, says so."""
    statistics, _ = check(name, folder, monkeypatch, request)
    assert caplog.text.count("R-workers also round queries") == ("cache" in name)
    assert (statistics.preemptions > 0) == (name == "preemption")
    if "drafts" in name:
        assert statistics.drafts.num_draft_tokens > 0


def test_a_killed_r_worker_changes_no_token(
    folder: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The step in which it dies is abandoned, with copies and graphs under way."""
    check("processes", folder, monkeypatch, request, kill=40)


def test_packed_experts_and_sampling(tmp_path: Path, gpus: list[FakeGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 experts stay packed; random tokens with log-probabilities are the same as of the unpacked checkpoint."""
    fake_recorders(monkeypatch)
    _, packed = saved("mxfp4", tmp_path, "", FORMATS["mxfp4"])
    params = SamplingParams(
        temperature=0.8, top_p=0.9, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1, detokenize=False
    )
    found = []
    for settings in ({}, {"quantization": "mxfp4"}):
        with LLM(str(packed), **BASE | settings) as llm:
            outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
        found.append([(list(each.outputs[0].token_ids), len(each.prompt_logprobs or ())) for each in outputs])
    assert found[0] == found[1] and gpus[0].log.count("copy up") > 0
