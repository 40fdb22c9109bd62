"""Prefix caching and preemption change no token, by real models, real R-workers, and references that can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held

from fastdecode import LLM, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
NAME = "llama-gqa"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 300, "s_threads": 1, "block_size": 16}
    return LLM(str(folder), **{**defaults, "kv_cache_memory": "64MiB", **settings})


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected() -> list[list[int]]:
    return [list(tokens[:NUM_TOKENS]) for tokens in model_zoo.reference(NAME).tokens]


def memory_for(llm_folder: Path, num_blocks: int) -> int:
    """Return the bytes of a cache of so many blocks of 16 tokens."""
    with make_llm(llm_folder) as llm:
        return num_blocks * 16 * llm.engine.s_model.layout.kv_bytes_per_token


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"r_workers": "inproc:3", "num_mini_batches": 2},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8, "schedule": "fcfs"},
        {"schedule": "prefill-first"},
        {"schedule": "stall-free", "kv_cache_dtype": "float32", "block_size": 32},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_prompts_again_are_found_and_give_the_same_tokens(folder: Path, settings: dict[str, Any]) -> None:
    """All prompts come twice, and then the longer ones cut to three quarters, which end inside what is kept."""
    prompts = model_zoo.prompts(NAME)
    with make_llm(folder, **settings) as llm:
        first, second = run(llm, prompts), run(llm, prompts)
        assert first == second == expected()
        hits = llm.engine.scheduler.statistics.prefix_hit_tokens
        block_size = llm.engine.config.block_size
        found = sum((len(prompt) - 1) // block_size * block_size for prompt in prompts)
        if llm.engine.config.enable_prefix_caching:
            assert 0.9 * found <= hits <= found
        else:
            assert hits == 0
        assert_nothing_held(llm.engine)


def test_what_was_generated_is_found_too(folder: Path) -> None:
    """In a conversation the second prompt is the first with its output and something new."""
    prompt, tokens = model_zoo.prompts(NAME)[0], expected()[0]
    follow_up = [*prompt, *tokens, 5, 6, 7]
    with make_llm(folder) as fresh:
        wanted = run(fresh, [follow_up])
    with make_llm(folder) as llm:
        run(llm, [prompt])
        assert run(llm, [follow_up]) == wanted
        whole = (len(prompt) + NUM_TOKENS - 1) // 16 * 16  # The last token's keys were never computed.
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == whole
        llm.engine.reset_prefix_cache()
        assert run(llm, [follow_up]) == wanted
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == whole


def test_requests_wait_for_a_prefix_that_is_being_computed(folder: Path) -> None:
    """Eight requests with one long beginning compute it once, in several chunks, and fork it seven times."""
    prefix = [i * 7 % 500 for i in range(160)]
    prompts = [[*prefix, 3 + i, 9, 11 * i] for i in range(8)]
    with make_llm(folder, enable_prefix_caching=False) as plain:
        wanted = run(plain, prompts)
    assert len({tuple(tokens) for tokens in wanted}) > 1
    with make_llm(folder, max_num_batched_tokens=64, max_num_seqs=16) as llm:
        computed: list[int] = []
        llm.engine.on_step = lambda record: computed.append(record.num_tokens)
        assert run(llm, prompts) == wanted
        assert sum(computed) == len(prompts[0]) + 7 * 3 + 8 * (NUM_TOKENS - 1)
        assert_nothing_held(llm.engine)


def test_an_aborted_leader_lets_its_followers_go(folder: Path) -> None:
    prompt = [i * 3 % 500 for i in range(100)]
    with make_llm(folder, enable_prefix_caching=False) as plain:
        wanted = run(plain, [prompt])[0]
    with make_llm(folder, max_num_batched_tokens=32, max_num_seqs=16) as llm:
        for name in "ab":
            llm.engine.add_request(name, prompt, GREEDY)
        llm.engine.step()
        llm.engine.abort_request("a")
        finished = {}
        while llm.engine.has_unfinished_requests():
            finished |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.engine.step()}
        assert finished == {"b": wanted}
        assert_nothing_held(llm.engine)


SMALL_STEPS = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_mini_batches": 2}


@pytest.mark.parametrize(
    ("caching", "settings"), [(True, {}), pytest.param(False, SMALL_STEPS, marks=pytest.mark.thorough)], ids=str
)
def test_preempted_sequences_get_the_tokens_they_would_have_had(
    folder: Path, caching: bool, settings: dict[str, Any]
) -> None:
    """The cache holds little more than one longest sequence of eight, so the youngest are computed again often."""
    prompts, wanted = model_zoo.prompts(NAME), [list(tokens) for tokens in model_zoo.reference(NAME).tokens]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    longest = max(len(prompt) for prompt in prompts) + 64
    memory = memory_for(folder, -(-longest // 16) + 2)
    defaults = {"kv_cache_memory": memory, "max_model_len": longest, "enable_prefix_caching": caching}
    with make_llm(folder, **{**defaults, **settings}) as llm:
        assert run(llm, prompts, params) == wanted
        assert llm.engine.scheduler.statistics.preemptions >= 3
        assert_nothing_held(llm.engine)


def test_a_retained_prefix_gives_way_to_whoever_needs_the_room(folder: Path) -> None:
    """Many prompts use a small cache: old prefixes are evicted, nothing fails, and recent ones are hits."""
    memory = memory_for(folder, 20)
    prompts = [[(i * 31 + j * 7) % 500 for j in range(100)] for i in range(12)]
    with make_llm(folder, kv_cache_memory=memory, max_model_len=200, max_num_seqs=2) as llm:
        first = run(llm, prompts)
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == 0
        assert run(llm, prompts[-1:]) == first[-1:]
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == 96
        assert run(llm, prompts[:1]) == first[:1]
        assert llm.engine.scheduler.statistics.prefix_hit_tokens == 96
        assert_nothing_held(llm.engine)


def test_samples_of_one_prompt_survive_preemption(folder: Path) -> None:
    """Four seeded samples with too little room have the same texts as with plenty."""
    prompt = model_zoo.prompts(NAME)[0]
    params = SamplingParams(temperature=1.0, n=4, seed=7, max_tokens=60, ignore_eos=True, detokenize=False)

    def texts(llm: LLM) -> list[tuple[int, ...]]:
        return [out.token_ids for out in llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs]

    with make_llm(folder) as roomy:
        wanted = texts(roomy)
    blocks = -(-(len(prompt) + 60) // 16) + 4
    with make_llm(folder, kv_cache_memory=memory_for(folder, blocks), max_model_len=len(prompt) + 60) as llm:
        assert texts(llm) == wanted
        assert llm.engine.scheduler.statistics.preemptions >= 1
        assert_nothing_held(llm.engine)
