"""Drafts by the model's first layers and by a draft model: the drafts are right, and the tokens unchanged."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo, r_workers
from helpers.drafting import always_draft
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.metrics import StepRecord
from fastdecode.drafting.draft_model import DraftCache, DraftModelDrafter
from fastdecode.drafting.early_exit import EarlyExitDrafter
from fastdecode.engine.engine import LLMEngine
from fastdecode.scheduler.drafts import DraftCounts

NAME = "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
SAMPLINGS = {
    "greedy": GREEDY,
    "random": SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=16, detokenize=False, logprobs=2),
    "several": SamplingParams(temperature=0.5, top_k=20, n=3, seed=4, max_tokens=12, detokenize=False),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a model of the zoo once and returns its folder.

    ``num_layers`` keeps only the first layers.
    """
    root = tmp_path_factory.mktemp("drafters")

    @cache
    def saved(name: str, num_layers: int | None = None) -> str:
        changes = {} if num_layers is None else {"num_hidden_layers": num_layers}
        place = root / f"{name}-{num_layers}"
        model_zoo.build_model(name, **changes).save_pretrained(place)
        return str(place)

    return saved


def early_exit(num_drafts: int, num_layers: int = 1) -> dict[str, Any]:
    return {"method": "early_exit", "num_layers": num_layers, "num_speculative_tokens": num_drafts}


def draft_model(num_drafts: int, model: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num_drafts}


def make_llm(model: str, speculative: dict[str, Any] | None = None, **settings: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "r_threads": 1, "block_size": 16}
    llm = LLM(model, **{**defaults, "kv_cache_memory": "64MiB", "speculative_config": speculative or {}, **settings})
    if speculative:
        always_draft(llm.engine)
    return llm


def drafter_of(engine: LLMEngine) -> EarlyExitDrafter | DraftModelDrafter:
    assert engine.speculation and isinstance(engine.speculation.drafter, EarlyExitDrafter | DraftModelDrafter)
    return engine.speculation.drafter


def assert_idle(engine: LLMEngine) -> None:
    """Assert that no R-worker holds a block."""
    assert_nothing_held(engine)
    if engine.speculation:
        drafter = drafter_of(engine)
        assert r_workers.pool_of(engine).blocks_used == 0
        if isinstance(drafter, DraftModelDrafter):
            backend = drafter.s_worker.backend
            assert isinstance(backend, PoolBackend) and backend.blocks_used == 0
            assert len(drafter.cache) == 0 and not drafter.cache.controls


def run(
    model: str,
    prompts: list[list[int]],
    params: SamplingParams = GREEDY,
    speculative: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[list[dict[str, Any]]], DraftCounts]:
    """Return all outputs, and the counts of drafts."""
    with make_llm(model, speculative, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert_idle(llm.engine)
        counts = llm.engine.scheduler.statistics.drafts
    return [[each.to_dict() for each in output.outputs] for output in outputs], counts


def tokens_of(outputs: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [list(output[0]["token_ids"]) for output in outputs]


def expected(name: str, count: int = 16) -> list[list[int]]:
    return [list(tokens[:count]) for tokens in model_zoo.reference(name).tokens]


ALIKE = ("llama-mha", "qwen2", "qwen3", "qwen3_moe", "mistral", "phi3", "falcon", "falcon-rw", "mixtral")
"""Models whose layers are called as another architecture's are."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (i % 2 or name in ALIKE))
        for i, name in enumerate(model_zoo.ARCHITECTURES)
    ],
)
def test_the_first_layer_drafts_as_a_model_of_one_layer(name: str, folder: Any) -> None:
    """On every architecture both methods make the same drafts, and change no token."""
    number = model_zoo.ARCHITECTURES.index(name)
    settings = {"num_mini_batches": 1 + number % 3, "r_workers": f"inproc:{1 + number // 3 % 3}"}
    prompts, num_drafts = model_zoo.prompts(name)[1::2], 1 + number % 4
    params, wanted = replace(GREEDY, max_tokens=8), expected(name, 8)[1::2]
    mine, counts = run(folder(name), prompts, params, early_exit(num_drafts), **settings)
    assert tokens_of(mine) == wanted
    theirs, same = run(folder(name), prompts, params, draft_model(num_drafts, folder(name, 1)), **settings)
    assert tokens_of(theirs) == wanted
    assert counts == same and counts.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_drafts", "sampling"), [(8, "greedy"), (1, "random"), (8, "several")])
def test_a_draft_model_like_the_target_is_always_right(num_drafts: int, sampling: str, folder: Any) -> None:
    """The draft model draws its tokens with the same random numbers, so it is right at any temperature."""
    params, prompts = SAMPLINGS[sampling], model_zoo.prompts(NAME)
    wanted, _ = run(folder(NAME), prompts, params)
    outputs, counts = run(folder(NAME), prompts, params, draft_model(num_drafts, folder(NAME)), num_mini_batches=2)
    assert outputs == wanted
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model whose layers after the first add nothing, and return its folder."""
    model = model_zoo.build_model(NAME)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    place = tmp_path_factory.mktemp("shallow")
    model.save_pretrained(place)
    return str(place)


@pytest.mark.parametrize(
    "sampling", ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("random", "several"))]
)
def test_first_layers_that_say_all_are_always_right(sampling: str, shallow: str) -> None:
    params, prompts = SAMPLINGS[sampling], model_zoo.prompts(NAME)
    wanted, _ = run(shallow, prompts, params)
    settings = {} if sampling == "several" else {"r_workers": "inproc:2", "num_mini_batches": 3}
    outputs, counts = run(shallow, prompts, params, early_exit(3), **settings)
    assert outputs == wanted
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


def test_first_layers_draft_over_ranges(shallow: str) -> None:
    """The first layers attend closed ranges too, and one sequence comes to a border while it decodes."""
    rng = random.Random(0)
    prompts = [[rng.randrange(500) for _ in range(length)] for length in (1100, 700, 500, 20)]
    settings = {"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 4096}}
    wanted, _ = run(shallow, prompts, GREEDY, **settings)
    spread = {"kv_shard_tokens": 512, "r_workers": "inproc:3", "kv_replicas": 2, "num_mini_batches": 2}
    outputs, counts = run(shallow, prompts, GREEDY, early_exit(3), **spread, **settings)
    assert outputs == wanted
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_first_layers_of_two_ranks(shallow: str) -> None:
    """Every rank computes its part of the first layers."""
    prompts = model_zoo.prompts(NAME)
    wanted, _ = run(shallow, prompts, GREEDY)
    settings = {"tensor_parallel_size": 2, "r_workers": "spawn:2", "num_mini_batches": 2}
    outputs, counts = run(shallow, prompts, GREEDY, early_exit(3), **settings)
    assert outputs == wanted
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 0


SHORT_OF_ROOM: dict[str, dict[str, Any]] = {
    "small budget": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "preemption": {"kv_cache_memory": "384KiB", "max_model_len": 272, "schedule": "stall-free"},
    "wide spread": {"r_workers": "inproc:3", "num_mini_batches": 2, "schedule": "prefill-first"},
    "rounded": {"kv_cache_dtype": "bfloat16"},
}


TWICE = (
    ("small budget", "early_exit"), ("preemption", "early_exit"), ("wide spread", "draft_model"),
    ("rounded", "early_exit"), ("small budget", "draft_model"),
)  # fmt: skip
"""Variations that are as short of room with the other method, or as preemption, which every run of the tests has."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variation", "method"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] * (pair in TWICE))
        for pair in itertools.product(SHORT_OF_ROOM, ["early_exit", "draft_model"])
    ],
)
def test_same_tokens_however_little_room_there_is(variation: str, method: str, folder: Any) -> None:
    """Sequences are preempted, draft prompts come in parts, and some sequences leave the draft cache."""
    settings, params = SHORT_OF_ROOM[variation], replace(GREEDY, max_tokens=40)
    prompts = model_zoo.prompts(NAME) + [[*model_zoo.prompts(NAME)[0][:64], 7, number] for number in range(4)]
    speculative = early_exit(4, 2) if method == "early_exit" else draft_model(4, folder(NAME))
    with make_llm(folder(NAME), speculative, **settings) as llm:
        tokens = finish(llm.engine, prompts, params=params)
        statistics = llm.engine.scheduler.statistics
        assert_idle(llm.engine)
    same_cache = {name: settings[name] for name in settings if name == "kv_cache_dtype"}
    assert tokens == tokens_of(run(folder(NAME), prompts, params, **same_cache)[0])
    assert statistics.drafts.num_accepted_tokens > 0
    assert (statistics.preemptions > 0) == (variation == "preemption")
    assert statistics.prefix_hit_tokens > 0 or variation == "rounded"


@pytest.mark.parametrize("num_blocks", [15, *(pytest.param(blocks, marks=pytest.mark.thorough) for blocks in (24, 40))])
def test_a_draft_cache_that_is_too_small(num_blocks: int, folder: Any) -> None:
    """Some sequences go without drafts, and the drafts of the others are right."""
    prompts = model_zoo.prompts(NAME)
    with make_llm(folder(NAME), draft_model(4, folder(NAME)), max_num_batched_tokens=64, max_num_seqs=8) as llm:
        drafter = drafter_of(llm.engine)
        assert isinstance(drafter, DraftModelDrafter) and isinstance(drafter.s_worker.backend, PoolBackend)
        backend, drafter.cache = drafter.s_worker.backend, DraftCache(num_blocks, 16)
        used = []
        llm.engine.on_step = lambda record: used.append(backend.blocks_used)
        assert finish(llm.engine, prompts) == expected(NAME)
        counts = llm.engine.scheduler.statistics.drafts
        assert_idle(llm.engine)
    assert num_blocks - 3 <= max(used) <= num_blocks
    assert 0 < counts.num_accepted_tokens == counts.num_draft_tokens < 8 * 13


@pytest.fixture(params=["early_exit", "draft_model"])
def speculative(request: pytest.FixtureRequest, folder: Any) -> dict[str, Any]:
    return early_exit(3, 2) if request.param == "early_exit" else draft_model(3, folder(NAME, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculative", ["early_exit", pytest.param("draft_model", marks=pytest.mark.thorough)], indirect=True
)
def test_listening_r_workers(speculative: dict[str, Any], folder: Any) -> None:
    with r_workers.listening() as (_, first), r_workers.listening() as (_, second):
        settings = {"r_workers": f"{first},{second}", "kv_cache_memory": None, "r_threads": None}
        outputs, counts = run(folder(NAME), model_zoo.prompts(NAME), GREEDY, speculative, **settings)
    assert tokens_of(outputs) == expected(NAME)
    assert counts.num_draft_tokens > 0


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs ``action`` when a drafter begins its ``number``-th pass, within an open step."""

    def interrupt(engine: LLMEngine, number: int, action: Any) -> list[int]:
        worker, calls = drafter_of(engine).s_worker, []
        original = worker.run

        def run(*arguments: Any) -> Any:
            calls.append(len(calls))
            if len(calls) == number:
                action()
            return original(*arguments)

        monkeypatch.setattr(worker, "run", run)
        return calls

    yield interrupt


def finish(
    engine: LLMEngine, prompts: list[list[int]], patient: bool = False, params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Return the tokens of all prompts; ``patient`` goes on after failed steps."""
    tokens = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        except ArithmeticError:
            assert patient
            patient = False
    return [tokens[number] for number in range(len(prompts))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculative", "number"),
    [
        ("early_exit", 8),
        pytest.param("draft_model", 1, marks=pytest.mark.thorough),
        pytest.param("early_exit", 1, marks=pytest.mark.thorough),
        pytest.param("draft_model", 8, marks=pytest.mark.thorough),
    ],
    indirect=["speculative"],
)
def test_an_r_worker_killed_while_drafts_are_made(
    number: int, speculative: dict[str, Any], folder: Any, interrupted: Any
) -> None:
    with make_llm(folder(NAME), speculative, r_workers="spawn:2", num_mini_batches=2) as llm:
        records: list[StepRecord] = []
        llm.engine.on_step = records.append
        victim = r_workers.spawned_pids(llm)[number % 2]
        calls = interrupted(llm.engine, number, lambda: os.kill(victim, signal.SIGKILL))
        assert finish(llm.engine, model_zoo.prompts(NAME)) == expected(NAME)
        assert len(calls) > number and sum(record.lost_workers for record in records) == 1
        assert_idle(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, pytest.param(9, marks=pytest.mark.thorough)])
def test_drafting_that_fails_half_way(number: int, speculative: dict[str, Any], folder: Any, interrupted: Any) -> None:
    def fail() -> None:
        raise ArithmeticError("a pass failed")

    with make_llm(folder(NAME), speculative, r_workers="inproc:2", num_mini_batches=2) as llm:
        calls = interrupted(llm.engine, number, fail)
        assert finish(llm.engine, model_zoo.prompts(NAME), patient=True) == expected(NAME)
        assert len(calls) > number
        assert_idle(llm.engine)


def test_time_spent_drafting_is_in_the_breakdown(speculative: dict[str, Any], folder: Any) -> None:
    with make_llm(folder(NAME), speculative) as llm:
        records: list[StepRecord] = []
        llm.engine.on_step = records.append
        llm.engine.add_request("a", model_zoo.prompts(NAME)[0], GREEDY)
        drafted = 0
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            record, speculation = records[-1], llm.engine.speculation
            assert speculation and record.s_seconds > speculation.s_seconds >= 0
            assert record.wall_seconds == pytest.approx(record.s_seconds + record.wait_seconds + record.host_seconds)
            drafted += speculation.s_seconds > 0
        assert drafted > 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_layers": 3}, "num_layers must be from 1 to 2 for this model, which has 3 layers, not 3"),
        ({"model": "/no/such/folder"}, "model '/no/such/folder': cannot load .*: no such folder"),
        ({"model": "another vocabulary"}, "has a vocabulary of 300 tokens, .* one of 512; they must be the same"),
        ({"model": "too short"}, "max_model_len 300 is more than the model's own 128 tokens"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    changes: dict[str, Any], complaint: str, folder: Any, tmp_path: Path
) -> None:
    made = {"another vocabulary": {"vocab_size": 300}, "too short": {"max_position_embeddings": 128}}
    if (settings := made.get(changes.get("model", ""))) is not None:
        model_zoo.build_model(NAME, **settings).save_pretrained(tmp_path)
        changes = {"model": str(tmp_path)}
    method = "early_exit" if "num_layers" in changes else "draft_model"
    with pytest.raises(FastDecodeError, match=f"speculative_config: .*{complaint}"):
        make_llm(folder(NAME), {"method": method, "num_speculative_tokens": 2, **changes})


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The tokenizer is the demo model's with two tokens exchanged."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer than the target model"):
        LLM(speculative_config=draft_model(2, str(tmp_path)), kv_cache_memory="64MiB", s_threads=1, r_threads=1)
