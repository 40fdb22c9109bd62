"""Recurrent layers with sequences in ranges: each range keeps a state, and the next one begins from it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import random_prompts, saver

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.pool.backend import PoolParks
from fastdecode.core.errors import ConfigError
from fastdecode.core.types import Handover
from fastdecode.engine.compose.setup import check_ways, make_parking
from fastdecode.kinds import Dense, Recurrent
from fastdecode.kinds.layout import KVLayout

NUM_TOKENS = 24
RANGE = 512
PROMPTS = random_prompts((1100, 500, 30, 1024))
"""Prompts that fill two ranges and begin a third, that grow into a second range, that fit in one, and that end with a
range."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a tiny model of a type, with what transformers generates by it."""
    return saver(tmp_path_factory.mktemp("hybrids"), PROMPTS, NUM_TOKENS, max_position_embeddings=2048)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 1280, "s_threads": 1, "r_threads": 1}
    defaults |= {"dtype": "float32", "kv_cache_memory": "32MiB", "max_num_seqs": 8, "block_size": 16}
    defaults |= {"kv_shard_tokens": RANGE, "r_workers": "inproc:3"}
    if settings.get("state_on") == "s":
        settings.setdefault("state_memory", "512MiB")
    return LLM(str(folder), **{**defaults, **settings})


def generated(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_until_gone(llm: LLM, ending: str, after: int) -> list[list[int]]:
    """Return the outputs of all prompts; the busiest R-worker is killed or drained once there are ``after`` tokens.

    With ``after`` 0 this happens within the longest prompt, when some of its ranges are closed.
    """
    engine, tokens, gone = llm.engine, dict[int, list[int]](), False
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        is_far = any(each.num_closed for each in engine.scheduler.store.table.several())
        if not gone and is_far and sum(map(len, tokens.values())) >= after:
            gone = True
            busiest = int(engine.scheduler.store.workers.num_sequences.argmax())
            if ending == "kill":
                os.kill(r_workers.spawned_pids(llm)[busiest], signal.SIGKILL)
            else:
                engine.membership.drain(engine.scheduler, busiest)
    assert_nothing_held(engine)
    return [tokens[number] for number in range(len(tokens))]


def watch(llm: LLM) -> list[Handover]:
    """Return a list to which all handovers of states are added."""
    found, tails = list[Handover](), llm.engine.scheduler.store.tails
    handovers = tails.handovers

    def watched(mini_batches: Any) -> tuple[Handover, ...]:
        found.extend(made := handovers(mini_batches))
        return made

    tails.handovers = watched  # type: ignore[method-assign]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_next", {"state_on": "s"}),
        ("falcon_h1", {"state_on": "s", "max_num_batched_tokens": 200}),
        pytest.param("lfm2", {"state_on": "s", "num_mini_batches": 2}, marks=pytest.mark.thorough),
        ("qwen3_next", {"r_workers": "spawn:3", "num_mini_batches": 2, "audit": 1.0}),
        ("lfm2", {"max_num_batched_tokens": 300, "kv_replicas": 2}),
        pytest.param("falcon_h1", {}, marks=pytest.mark.thorough),
        pytest.param("jamba", {}, marks=pytest.mark.thorough),
        pytest.param("nemotron_h", {"max_num_batched_tokens": 100}, marks=pytest.mark.thorough),
        pytest.param("recurrent_gemma", {"num_mini_batches": 2}, marks=pytest.mark.thorough),
        pytest.param("kimi_linear", {"kv_replicas": 2}, marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_those_of_generate(model_type: str, settings: dict[str, Any], saved: Any) -> None:
    folder, expected = saved(model_type)
    with make_llm(folder, **settings) as llm:
        handovers = watch(llm)
        assert generated(llm) == expected
        changes = llm.engine.membership.changes
        assert (changes.audited > 0, changes.faulty, changes.undecided) == ("audit" in settings, (), 0)
    assert {each.start for each in handovers} == {512, 1024}
    assert any(each.source != each.target for each in handovers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "after", "settings"),
    [
        ("kill", 0, {"state_on": "s"}),
        ("kill", 30, {"kv_replicas": 2}),
        ("drain", 20, {}),
        pytest.param("kill", 0, {}, marks=pytest.mark.thorough),
        pytest.param("kill", 60, {"state_on": "s", "kv_replicas": 2}, marks=pytest.mark.thorough),
        pytest.param("drain", 0, {"state_on": "s", "kv_replicas": 2}, marks=pytest.mark.thorough),
    ],
)
def test_an_r_worker_goes(ending: str, after: int, settings: dict[str, Any], saved: Any) -> None:
    """Drafts of which a third are wrong are taken back from the tails' states."""
    folder, expected = saved("qwen3_next")
    texts = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with make_llm(folder, r_workers="spawn:3", max_num_batched_tokens=256, **drafts, **settings) as llm:
        always_draft(llm.engine, Clairvoyant(texts, 0.3))
        assert run_until_gone(llm, ending, after) == expected
        assert len(llm.engine.scheduler.snapshot().present) == 2


@pytest.mark.slow
def test_samples_and_later_prompts_go_on_from_the_first_range(saved: Any) -> None:
    """Two samples share all ranges; a prompt that differs in its second range begins with the first range's prefix.

    A text that filled exactly one range is the prefix of the next turn, which begins with a second range.
    """
    folder, _ = saved("lfm2")
    prompts = [PROMPTS[0], PROMPTS[0][:700] + PROMPTS[3][:200], PROMPTS[1][: RANGE + 1 - NUM_TOKENS]]
    with make_llm(folder, enable_prefix_caching=False, kv_shard_tokens=None) as llm:
        expected = generated(llm, prompts)
    with make_llm(folder) as llm:
        params = replace(GREEDY, temperature=1e-4, n=2)
        for prompt, tokens in zip(prompts, expected, strict=True):
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert [list(each.token_ids) for each in output.outputs] == [tokens] * 2
        turn, prefixes = [*prompts[2], *expected[2], *PROMPTS[2]], llm.engine.scheduler.store.prefixes
        assert (before := prefixes.num_hit_tokens) > 0
        (found,) = generated(llm, [turn])
        assert prefixes.num_hit_tokens - before == RANGE
        parks, limits = PoolParks(llm.engine.backend), llm.engine.scheduler.limits
        assert make_parking(llm.engine.config, llm.engine.s_model, parks, (), limits) is None
    with make_llm(folder, enable_prefix_caching=False, kv_shard_tokens=None) as llm:
        assert generated(llm, [turn]) == [found]


@pytest.mark.slow
@pytest.mark.parametrize("state_on", ["r", "s"])
def test_what_made_room_is_computed_again(state_on: str, saved: Any) -> None:
    """Each of two R-workers has a prompt, and one block too few for the state and the first token of a second range."""
    folder, _ = saved("falcon_h1")
    prompts = [PROMPTS[0][:500], PROMPTS[1]]
    with make_llm(folder, state_on=state_on) as llm:
        limits = llm.engine.scheduler.limits
        block_bytes = (32 << 20) // limits.num_blocks[0]
        expected = generated(llm, prompts)
    num_blocks = 2 * limits.state_blocks + RANGE // 16
    settings = {"kv_cache_memory": str(num_blocks * block_bytes), "schedule": "stall-free", "r_workers": "inproc:2"}
    with make_llm(folder, state_on=state_on, max_model_len=528, **settings) as llm:
        assert generated(llm, prompts) == expected
        assert llm.engine.scheduler.lifecycle.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("state_on", ["r", "s"])
def test_a_step_that_fails_after_a_handover_leaves_nothing(state_on: str, saved: Any) -> None:
    """Ctrl-C in the forward of the first steps in which ranges begin; their sequences are computed again."""
    folder, expected = saved("qwen3_next")
    with make_llm(folder, state_on=state_on) as llm:
        engine, steps, tokens = llm.engine, [], dict[int, list[int]]()
        tell = engine.world.tell

        def told(step: Any) -> None:
            tell(step)
            steps.append(len(step.handovers))

        def interrupt(*_: Any) -> None:
            if steps and steps[-1] and sum(map(bool, steps)) < 3:
                raise KeyboardInterrupt

        engine.world.tell = told  # type: ignore[method-assign]
        engine.s_model.model.model.layers[2].register_forward_pre_hook(interrupt)
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, GREEDY)
        num_interrupts = 0
        while engine.has_unfinished_requests():
            try:
                for output in engine.step():
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            except KeyboardInterrupt:
                num_interrupts += 1
        assert_nothing_held(engine)
        assert [tokens[number] for number in range(len(PROMPTS))] == expected and num_interrupts == 2


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"park_dir": "parked"}, "park_dir"),
        ({"prefill_workers": "spawn:1"}, "prefill_workers"),
        ({"r_workers": "localhost:1", "session": "s", "journal": "r-workers", "keep_session": 9.0}, "keep_session"),
    ],
)
def test_what_does_not_go_with_states_in_ranges_is_refused(settings: dict[str, Any], name: str) -> None:
    window = Recurrent(1, 16, 1.0, "window", 0, 0, 3, 0, False, False, 16)
    layout = KVLayout((window, Dense(2, 1, 16, 16, 0.25)), "float32", "float32")
    config = EngineConfig(**{"model": "demo", "device": "cpu", "kv_shard_tokens": RANGE, **settings})
    with pytest.raises(ConfigError, match=f"{name}: this model keeps a state per range .* leave one of them out"):
        check_ways(config, layout, on_gpu=False)
    check_ways(EngineConfig(model="demo", device="cpu", kv_shard_tokens=RANGE), layout, on_gpu=False)
