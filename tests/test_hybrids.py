"""Models with recurrent layers: greedy tokens equal ``generate``'s, whatever happens to the states."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import model_zoo, r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.prefill_workers import AnyParts
from helpers.tiny_hybrids import random_prompts, saver
from transformers import AutoConfig

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import CapacityError, ConfigError
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.compose.backends import pool_layout
from fastdecode.engine.compose.setup import check_ways
from fastdecode.kinds import Dense, Recurrent
from fastdecode.kinds.layout import KVLayout

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
LENGTHS = (70, 1, 30, 29)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a tiny model of a type, with what transformers generates by it."""
    return saver(tmp_path_factory.mktemp("hybrids"), prompts(), NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128, "s_threads": 1, "r_threads": 1}
    return LLM(str(folder), **{**defaults, "dtype": "float32", "kv_cache_memory": "16MiB", **settings})


def generated(llm: LLM, first: int = 0) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts()[first:]], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("model_type", "mini_batches", "budget"),
    [
        pytest.param("qwen3_next", 1, 16, marks=pytest.mark.thorough),
        ("qwen3_next", 3, 256),
        pytest.param("falcon_h1", 2, 32, marks=pytest.mark.thorough),  # so below, with drafts
        ("lfm2", 2, 256),
        pytest.param("jamba", 2, 32, marks=pytest.mark.thorough),
        pytest.param("minimax", 3, 16, marks=pytest.mark.thorough),
        ("recurrent_gemma", 2, 32),
        ("mamba2", 2, 32),
    ],
)
def test_tokens_are_those_of_generate(model_type: str, mini_batches: int, budget: int, saved: Any) -> None:
    """States are of each kind, and prompts are cut to chunks of up to ``budget`` tokens."""
    folder, expected = saved(model_type)
    with make_llm(folder, num_mini_batches=mini_batches, max_num_seqs=4, max_num_batched_tokens=budget) as llm:
        assert llm.engine.scheduler.limits.state_blocks > 0
        assert generated(llm) == expected


def test_samples_begin_with_a_copy_of_the_prompts_state(saved: Any) -> None:
    folder, expected = saved("qwen3_next")
    params = replace(GREEDY, temperature=1e-4, n=3)  # With a temperature of 0 there would be only one sample.
    with make_llm(folder) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompts()[2]}], params, use_tqdm=False)
        assert [list(each.token_ids) for each in output.outputs] == [expected[2]] * 3
        assert_nothing_held(llm.engine)


def test_a_state_that_made_room_is_computed_again(saved: Any) -> None:
    """Memory holds two states and too few of their tokens.

    If the scheduler counted otherwise than the R-worker, the R-worker would refuse.
    """
    folder, expected = saved("qwen3_next")
    with make_llm(folder, block_size=16) as llm:
        limits = llm.engine.scheduler.limits
        block_bytes = (16 << 20) // limits.num_blocks[0]
    num_blocks = 2 * limits.state_blocks + 5
    small = {"kv_cache_memory": f"{num_blocks * block_bytes}", "max_model_len": 80, "block_size": 16}
    with make_llm(folder, max_num_seqs=4, schedule="stall-free", **small) as llm:
        assert llm.engine.scheduler.limits.num_blocks == (num_blocks,)
        assert generated(llm, first=2) == expected[2:]
        assert llm.engine.scheduler.lifecycle.num_preemptions > 0
    with pytest.raises(CapacityError, match="one sequence of max_model_len"):
        make_llm(folder, block_size=16, kv_cache_memory=f"{(limits.state_blocks + 7) * block_bytes}")


@pytest.mark.parametrize("ending", [pytest.param("kill", marks=pytest.mark.thorough), "drain"])
def test_r_workers_that_go_take_no_token_with_them(ending: str, saved: Any) -> None:
    """An R-worker is killed, or drained, when its sequences and their states move to the others."""
    folder, expected = saved("qwen3_next")
    with make_llm(folder, r_workers="spawn:3") as llm:
        assert run_until_gone(llm, ending) == expected


def test_states_of_16_bits_take_half_the_room_and_losses_keep_tokens(saved: Any) -> None:
    """Chunks, copies, prefill workers and a loss change no token, though tokens may differ from float32's."""
    folder, _ = saved("qwen3_next")
    with make_llm(folder, mamba_ssm_cache_dtype="bfloat16") as llm:
        layout = llm.engine.s_model.layout
        of_layer = layout.sequence_bytes(0) / layout.with_state_dtype("float32").sequence_bytes(0)
        assert 0.5 < of_layer < 0.7, "windows stay float32"
        expected = generated(llm)
    cut = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_mini_batches": 2, "prefill_workers": "spawn:1"}
    with make_llm(folder, r_workers="spawn:3", kv_replicas=2, mamba_ssm_cache_dtype="bfloat16", **cut) as llm:
        assert run_until_gone(llm, "kill") == expected


@pytest.mark.parametrize(
    ("model_type", "mini_batches"), [("qwen3_next", 2), pytest.param("lfm2", 1, marks=pytest.mark.thorough)]
)
def test_with_two_copies_a_kill_costs_no_token_and_no_prefill(model_type: str, mini_batches: int, saved: Any) -> None:
    """The other copy of a state goes back behind the row that attended on the killed R-worker."""
    folder, expected = saved(model_type)
    records: list[StepRecord] = []
    with make_llm(folder, r_workers="spawn:3", kv_replicas=2, num_mini_batches=mini_batches) as llm:
        llm.engine.on_step = records.append
        assert run_until_gone(llm, "kill") == expected
    (lost,) = (number for number, record in enumerate(records) if record.lost_workers)
    assert all(record.is_decode for record in records[lost:])


@pytest.mark.parametrize("ending", ["kill", pytest.param("drain", marks=pytest.mark.thorough)])
def test_two_copies_go_together_with_drafts_and_prefixes(ending: str, saved: Any) -> None:
    folder, expected = saved("qwen3_next")
    texts = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), expected, strict=True)}
    settings = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "block_size": 16}
    with make_llm(folder, r_workers="spawn:3", kv_replicas=2, kv_cache_memory="64MiB", **settings) as llm:
        always_draft(llm.engine, Clairvoyant(texts, 0.3))
        llm.generate([{"prompt_token_ids": each} for each in prompts()], GREEDY, use_tqdm=False)
        assert run_until_gone(llm, ending) == expected
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 0


def test_a_run_that_is_refused_leaves_no_folder(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved("qwen3_next")
    with pytest.raises(ConfigError, match="park_dir"):
        make_llm(folder, park_dir=str(tmp_path / "parked"), state_on="s")
    assert not (tmp_path / "parked").exists()


@pytest.mark.thorough
def test_a_model_that_attends_drafts_for_a_hybrid(saved: Any, tmp_path: Path) -> None:
    """Most of the draft model's tokens are wrong, and are taken back from the states."""
    folder, expected = saved("qwen3_next")
    model_zoo.build_model("qwen3", vocab_size=128).save_pretrained(tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    with make_llm(folder, speculative_config=drafts, num_mini_batches=2) as llm:
        always_draft(llm.engine)
        assert generated(llm) == expected
        assert llm.engine.scheduler.statistics.drafts.num_draft_tokens > 20


def test_a_kill_within_a_prompt_costs_that_prompt(saved: Any) -> None:
    """The state of the prompt's second copy cannot go back so far."""
    folder, expected = saved("qwen3_next")
    settings = {"block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    with make_llm(folder, r_workers="spawn:3", kv_replicas=2, **settings) as llm:
        assert run_until_gone(llm, "kill", after=0) == expected


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_next", {"kv_replicas": 2, "r_workers": "spawn:3"}),
        pytest.param("falcon_h1", {}, marks=pytest.mark.thorough),
        pytest.param("lfm2", {"r_workers": "spawn:1"}, marks=pytest.mark.thorough),
    ],
)
def test_prefill_workers_hand_states_on(model_type: str, settings: dict[str, Any], saved: Any) -> None:
    """States go from part to part, and the last to each R-worker that stores the prompt; one of these is killed."""
    folder, expected = saved(model_type)
    with make_llm(folder, prefill_workers="spawn:2", **settings) as llm:
        policy = llm.engine.scheduler.remote_prompts.policy = AnyParts([0, 1], sizes=(1, 2))
        assert run_until_gone(llm, "kill" if settings else "") == expected
        assert len(policy.started_jobs) >= len(expected)


def run_until_gone(llm: LLM, ending: str, after: int = 20) -> list[list[int]]:
    """Return the outputs of all prompts, with a kill or a drain once there are ``after`` tokens.

    The busiest R-worker, or the one with a prompt under way, goes; with ``ending`` "" none does.
    """
    engine, tokens, gone = llm.engine, dict[int, list[int]](), not ending
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not gone and sum(map(len, tokens.values())) >= after:
            gone = True
            prompts_under_way = list(engine.scheduler.store.residents.prompts.values())
            victim = int(engine.scheduler.store.workers.num_sequences.argmax())
            victim = prompts_under_way[0].tail.home if prompts_under_way else victim
            if ending == "kill":
                os.kill(r_workers.spawned_pids(llm)[victim], signal.SIGKILL)
            else:
                engine.drain_r_worker(victim)
    assert gone
    assert_nothing_held(engine)
    return [tokens[number] for number in range(len(tokens))]


def test_after_a_step_that_failed_states_are_computed_again(saved: Any) -> None:
    """The step fails in its fourth layer, once some states are written."""
    folder, expected = saved("qwen3_next")
    with make_llm(folder) as llm:
        engine, tokens, layers = llm.engine, {}, llm.engine.s_model.model.model.layers

        def fail(*_: Any) -> None:
            hook.remove()
            raise RuntimeError("the fourth layer fails once")

        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, GREEDY)
        for _ in range(6):
            engine.step()
        hook = layers[3].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="fails once"):
            engine.step()
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        assert [tokens[number] for number in range(len(tokens))] == expected
        assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("prefill_scratch", "1MiB"),
        ("prefill_parallel", "tsp"),
    ],
)
def test_what_does_not_go_with_states_is_refused(setting: str, value: Any, saved: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: this model keeps a state"):
        make_llm(saved("lfm2")[0], r_workers="inproc:2", **{setting: value})


@pytest.mark.parametrize(
    ("model_type", "ending", "settings"),
    [
        ("qwen3_next", "kill", {"r_workers": "spawn:3"}),
        pytest.param(
            "qwen3_next", "drain", {"r_workers": "inproc:2", "num_mini_batches": 2}, marks=pytest.mark.thorough
        ),
        ("lfm2", "", {"max_num_batched_tokens": 16, "max_num_seqs": 3}),
        pytest.param("minimax", "", {"kv_replicas": 2, "r_workers": "inproc:2"}, marks=pytest.mark.thorough),
        pytest.param("falcon_h1", "kill", {"r_workers": "spawn:3"}, marks=pytest.mark.thorough),
        ("jamba", "", {}),
    ],
)
def test_drafts_of_the_first_layers_leave_their_states_as_they_were(
    model_type: str, ending: str, settings: dict[str, Any], saved: Any
) -> None:
    """Drafts are made in every step, so most are refused; each pass is a step that is abandoned."""
    folder, expected = saved(model_type)
    num_layers = AutoConfig.from_pretrained(folder).num_hidden_layers // 2  # Some layers call attention twice.
    drafts = {"method": "early_exit", "num_speculative_tokens": 3, "num_layers": num_layers}
    with make_llm(folder, speculative_config=drafts, **settings) as llm:
        always_draft(llm.engine)
        assert run_until_gone(llm, ending) == expected
        counts = llm.engine.scheduler.statistics.drafts
        assert counts.num_draft_tokens > 20 and counts.num_accepted_tokens < counts.num_draft_tokens


def test_drafts_of_the_first_layers_outlive_preemption(saved: Any) -> None:
    """Memory holds two states, and too few of their tokens."""
    folder, expected = saved("qwen3_next")
    drafts = {"method": "early_exit", "num_speculative_tokens": 2, "num_layers": 2}
    with make_llm(folder, block_size=16, speculative_config=drafts) as llm:
        limits = llm.engine.scheduler.limits
        block_bytes = (16 << 20) // limits.num_blocks[0]
    num_blocks = 2 * limits.state_blocks + 5
    small = {"kv_cache_memory": f"{num_blocks * block_bytes}", "max_model_len": 80, "block_size": 16}
    with make_llm(folder, max_num_seqs=4, schedule="stall-free", speculative_config=drafts, **small) as llm:
        always_draft(llm.engine)
        assert generated(llm, first=2) == expected[2:]
        assert llm.engine.scheduler.lifecycle.num_preemptions > 0


def test_drafts_of_the_first_layers_keep_states_of_16_bits(saved: Any) -> None:
    """Tokens may differ from those of float32, but drafts change none."""
    folder, _ = saved("lfm2")
    with make_llm(folder, mamba_ssm_cache_dtype="bfloat16") as llm:
        expected = generated(llm)
    drafts = {"method": "early_exit", "num_speculative_tokens": 2, "num_layers": 1}
    with make_llm(folder, mamba_ssm_cache_dtype="bfloat16", speculative_config=drafts) as llm:
        always_draft(llm.engine)
        assert generated(llm) == expected


def test_early_exit_says_how_many_layers_there_are(saved: Any) -> None:
    """The message counts layers, not their calls."""
    folder, _ = saved("falcon_h1")
    most = AutoConfig.from_pretrained(folder).num_hidden_layers
    drafts = {"method": "early_exit", "num_speculative_tokens": 2, "num_layers": most}
    with pytest.raises(ConfigError, match=f"num_layers must be from 1 to {most - 1} for this model"):
        make_llm(folder, speculative_config=drafts)


def window(width: int) -> Recurrent:
    """Return a layer that is only a convolution of ``width`` channels."""
    return Recurrent(1, width, 1.0, "window", 0, 0, 3, 0, False, False, 64)


@pytest.mark.parametrize(("drafts", "kept_rows"), [({}, 1), ({"method": "ngram", "num_speculative_tokens": 4}, 5)])
def test_r_workers_that_keep_sessions_keep_a_row_beside_states(drafts: dict[str, Any], kept_rows: int) -> None:
    layout = KVLayout((window(16),), "float32", "float32")
    kept = {"r_workers": "localhost:1", "session": "s", "journal": "j", "keep_session": 9.0}
    told = [pool_layout(EngineConfig(speculative_config=drafts, **each), layout) for each in ({}, kept)]
    assert [each.layers[0].keeps_single for each in told] == [False, True]
    assert told[1].layers[0].kept_rows == kept_rows


@pytest.mark.parametrize(("widths", "message"), [((64,), "no layer of this model attends"), ((0, 64, 32), "several")])
def test_prefill_workers_are_refused_for_some_layers(widths: tuple[int, ...], message: str) -> None:
    layers = [window(width) if width else Dense(1, 1, 16, 16, 1.0) for width in widths]
    config = EngineConfig(model="demo", device="cpu", prefill_workers="spawn:1")
    with pytest.raises(ConfigError, match=f"prefill_workers: .*{message}"):
        check_ways(config, KVLayout(tuple(layers), "float32", "float32"), on_gpu=False)


@pytest.mark.parametrize(
    ("model_type", "ending", "settings"),
    [
        pytest.param("qwen3_next", "kill", {"r_workers": "spawn:3"}, marks=pytest.mark.thorough),
        ("qwen3_next", "drain", {"r_workers": "inproc:2", "num_mini_batches": 2}),
        ("falcon_h1", "", {"max_num_batched_tokens": 16, "max_num_seqs": 3}),
        ("lfm2", "", {}),
    ],
)
def test_drafts_that_are_refused_leave_no_trace_in_states(
    model_type: str, ending: str, settings: dict[str, Any], saved: Any
) -> None:
    """Half of the drafts are wrong, and sequences move, or are lost, while rows are kept beside their states."""
    folder, expected = saved(model_type)
    texts = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), expected, strict=True)}
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with make_llm(folder, speculative_config=drafts, **settings) as llm:
        always_draft(llm.engine, Clairvoyant(texts, 0.3))
        assert run_until_gone(llm, ending) == expected
        counts = llm.engine.scheduler.statistics.drafts
        assert 20 < counts.num_accepted_tokens < counts.num_draft_tokens - 20
