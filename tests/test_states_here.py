"""States with the S-worker, ``state_on s``: tokens are ``generate``'s, whatever happens to R-workers."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.tiny_hybrids import random_prompts, saver
from msgspec import structs

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.state_pairs import LayerParts, StateKeeper
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import BackendError, CapacityError, ConfigError
from fastdecode.core.state_room import StateRoom
from fastdecode.core.types import CONTROL, SPAN, SpanMode, StepPlan, StepReport, Verb, WorkerPlan
from fastdecode.engine.compose.setup import check_ways
from fastdecode.kinds import Dense, Recurrent
from fastdecode.kinds.layout import KVLayout

NUM_TOKENS = 20
PROMPTS = random_prompts((70, 1, 30, 29))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

WINDOW = Recurrent(1, 16, 1.0, "window", 0, 0, 3, 0, False, False, 16, kept_rows=4)
LAYOUT = KVLayout(
    (
        structs.replace(WINDOW, filters=np.ones(48, np.float32).tobytes()),
        Dense(2, 1, 16, 16, 0.25),
        structs.replace(WINDOW, filters=np.arange(48, dtype=np.float32).tobytes()),
        Dense(2, 1, 16, 16, 0.5),
    ),
    "float32",
    "float32",
)
"""Two layers that keep a window of two tokens, and two that attend."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a tiny model of a type, with what transformers generates by it."""
    return saver(tmp_path_factory.mktemp("hybrids"), PROMPTS, NUM_TOKENS)


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128, "s_threads": 1, "r_threads": 1}
    defaults |= {"dtype": "float32", "kv_cache_memory": "16MiB", "max_num_seqs": 8, "block_size": 16}
    return LLM(str(folder), **{**defaults, "state_on": "s", "state_memory": "256MiB", **settings})


def generated(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
    assert_nothing_held(llm.engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_until_killed(llm: LLM, after: int = 20) -> list[list[int]]:
    """Return the outputs of all prompts; the busiest R-worker is killed once there are ``after`` tokens."""
    engine, tokens, killed = llm.engine, dict[int, list[int]](), False
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not killed and sum(map(len, tokens.values())) >= after:
            killed = True
            busiest = int(engine.scheduler.store.workers.num_sequences.argmax())
            os.kill(r_workers.spawned_pids(llm)[busiest], signal.SIGKILL)
    assert_nothing_held(engine)
    return [tokens[number] for number in range(len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3_next", {"max_num_batched_tokens": 16}),
        ("falcon_h1", {"r_workers": "inproc:3", "num_mini_batches": 3, "max_num_batched_tokens": 32}),
        pytest.param("jamba", {"r_workers": "spawn:2", "num_mini_batches": 2}, marks=pytest.mark.thorough),
        pytest.param("kimi_linear", {"r_workers": "inproc:2", "num_mini_batches": 2}, marks=pytest.mark.thorough),
        pytest.param("nemotron_h", {"r_workers": "spawn:1"}, marks=pytest.mark.thorough),
        pytest.param("lfm2", {"r_workers": "spawn:3", "num_mini_batches": 2}, marks=pytest.mark.thorough),
        pytest.param("minimax", {"num_mini_batches": 3, "max_num_batched_tokens": 8}, marks=pytest.mark.thorough),
        pytest.param("recurrent_gemma", {"r_workers": "inproc:2"}, marks=pytest.mark.thorough),
        pytest.param("zamba2", {"r_workers": "spawn:2"}, marks=pytest.mark.thorough),
        pytest.param("granitemoehybrid", {"max_num_batched_tokens": 11}, marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_those_of_generate(model_type: str, settings: dict[str, Any], saved: Any) -> None:
    folder, expected = saved(model_type)
    with make_llm(folder, **settings) as llm:
        assert generated(llm) == expected
        assert llm.engine.scheduler.limits.state_blocks == 1, "one block of an R-worker stands for a state"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copies", "drafts"), [(1, False), (2, True), pytest.param(2, False, marks=pytest.mark.thorough)]
)
def test_a_killed_r_worker_takes_its_states_along(copies: int, drafts: bool, saved: Any) -> None:
    """With one copy the states are computed again; a second copy's go back behind the lost and refused rows."""
    folder, expected = saved("qwen3_next")
    texts = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    settings: dict[str, Any] = {"r_workers": "spawn:3", "num_mini_batches": 2, "kv_replicas": copies}
    if drafts:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    with make_llm(folder, **settings) as llm:
        if drafts:
            always_draft(llm.engine, Clairvoyant(texts, 0.3))
        assert run_until_killed(llm) == expected
        assert len(llm.engine.scheduler.snapshot().present) == 2


@pytest.mark.slow
def test_an_r_worker_that_comes_back_over_tcp_gets_states_again(saved: Any) -> None:
    """The R-worker is killed and started again at its address; its sequences' states are of 16 bits."""
    folder, _ = saved("lfm2")
    with make_llm(folder, mamba_ssm_cache_dtype="bfloat16", state_on="r", state_memory=None) as llm:
        expected = generated(llm)
    with r_workers.listening() as (_, first), r_workers.listening() as (process, second):
        settings = {"r_workers": f"{first},{second}", "kv_cache_memory": None, "r_threads": None}
        with make_llm(folder, mamba_ssm_cache_dtype="bfloat16", **settings) as llm:
            assert generated(llm) == expected
            process.kill()
            process.wait()
            assert generated(llm) == expected
            with r_workers.listening(listen=f"tcp://{second}"):
                while len(llm.engine.scheduler.snapshot().present) < 2:
                    llm.engine.look_around()
                assert generated(llm) == expected


@pytest.mark.slow
def test_what_made_room_is_computed_again(saved: Any) -> None:
    """R-workers have too few blocks, and the scheduler counts them as they do; states have room."""
    folder, expected = saved("qwen3_next")
    with make_llm(folder) as llm:
        block_bytes = (16 << 20) // llm.engine.scheduler.limits.num_blocks[0]
    with make_llm(folder, kv_cache_memory=str(8 * block_bytes), max_model_len=96, schedule="stall-free") as llm:
        assert generated(llm, PROMPTS[2:]) == expected[2:]
        assert llm.engine.scheduler.lifecycle.num_preemptions > 0


@pytest.mark.slow
def test_no_more_states_are_kept_than_there_is_room_for(saved: Any) -> None:
    """Prompts begin alike, with room for three states beside those in flight; samples begin with copies."""
    folder, _ = saved("qwen3_next")
    prompts = [PROMPTS[0][:48] + [number] * 5 for number in (20, 21, 22, 23)]
    with make_llm(folder, enable_prefix_caching=False) as llm:
        expected = generated(llm, prompts)
        state_bytes = LayerParts.of(llm.engine.s_model.layout).state_bytes
    with make_llm(folder, max_num_seqs=4, r_workers="inproc:2", state_memory=7 * state_bytes) as llm:
        assert llm.engine.scheduler.limits.kept_states == 3
        for prompt, tokens in zip(prompts, expected, strict=True):
            params = replace(GREEDY, temperature=1e-4, n=2)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert [list(each.token_ids) for each in output.outputs] == [tokens] * 2
            assert 0 < llm.engine.scheduler.snapshot().num_prefixes <= 3
        assert llm.engine.scheduler.statistics.prefix_hit_tokens > 0
        assert_nothing_held(llm.engine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill_workers": "spawn:1"}, "prefill_workers: they send states to"),
        (
            {"r_workers": "localhost:1", "session": "s", "journal": "r-workers", "keep_session": 9.0},
            "keep_session: states that the S-worker keeps",
        ),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size: states that the S-worker keeps .* belong to one process",
        ),
        ({"state_on": "r", "state_memory": "1GiB"}, "state_memory: this memory is for states that the S-worker keeps"),
    ],
)
def test_what_does_not_go_with_states_here_is_refused(settings: dict[str, Any], message: str) -> None:
    config = EngineConfig(**{"model": "demo", "device": "cpu", "state_on": "s", **settings})
    with pytest.raises(ConfigError, match=message):
        check_ways(config, LAYOUT, on_gpu=False)


def test_without_attention_r_workers_would_have_nothing() -> None:
    alone = replace(LAYOUT, layers=LAYOUT.layers[:1])
    with pytest.raises(ConfigError, match="state_on: no layer of this model attends"):
        check_ways(EngineConfig(model="demo", device="cpu", state_on="s"), alone, on_gpu=False)
    with pytest.raises(ConfigError, match="state_on: no layer of this model is recurrent"):
        attends = replace(LAYOUT, layers=LAYOUT.layers[1:2])
        check_ways(EngineConfig(model="demo", device="cpu", state_on="s"), attends, on_gpu=False)


def test_memory_that_is_too_small_says_what_would_do() -> None:
    assert StateRoom.of(1000, 10, max_num_seqs=40, each=2).kept == 20
    with pytest.raises(
        CapacityError, match=r"states of max_num_seqs 51 sequences, 2 each, .* at most --max-num-seqs 50, "
    ):
        StateRoom.of(1000, 10, max_num_seqs=51, each=2)
    with pytest.raises(CapacityError, match="GiB for them: give at least --state-memory 1MiB, or --state-on r"):
        StateRoom.of(9, 10, max_num_seqs=1, each=1)


class Pools:
    """Two R-workers with all layers, as oracle, and two beside which states are kept here, in the same steps."""

    def __init__(self) -> None:
        sizes = [RWorkerSize(1 << 20, 1)] * 2
        self.whole, self.paired = (InprocBackend(sizes, 16) for _ in range(2))
        self.paired.keep_states(StateKeeper(6, 1, ()))
        self.infos = self.whole.open(LAYOUT), self.paired.open(LAYOUT)
        self.rng = np.random.default_rng(5)

    def step(self, spans: list[list[tuple[int, int, int]]], controls: list[list[tuple[Any, ...]]]) -> StepReport:
        """Run spans (sequence, context, rows) and controls of both R-workers; outputs have the same bits."""
        plans = [
            WorkerPlan(
                np.array(told, CONTROL), (np.array([(*span, SpanMode.ATTEND) for span in given], SPAN),)
            )
            for given, told in zip(spans, controls, strict=True)
        ]  # fmt: skip
        num_rows = sum(rows for given in spans for *_, rows in given)
        for pool in (self.whole, self.paired):
            pool.begin_step(StepPlan(tuple(plans)))
        for number, layer in enumerate(LAYOUT.layers if num_rows else ()):
            q, k, v, _ = (self.rng.standard_normal((num_rows, *shape)).astype(np.float32) for shape in layer.row_shapes)
            outputs = []
            for pool in (self.whole, self.paired):
                pool.submit(0, number, q, k, v)
                outputs.append(pool.collect(0).copy())
            assert np.array_equal(*outputs)
        self.whole.end_step()
        return self.paired.end_step()


def test_a_pair_does_what_an_r_worker_does() -> None:
    """Steps, forks, truncations, moves in two pieces and releases agree; a state counts as one block."""
    pools = Pools()
    whole, paired = (infos[0] for infos in pools.infos)
    assert (whole.state_blocks, paired.state_blocks) == (2, 1) and paired.num_blocks == whole.num_blocks
    assert LayerParts.of(LAYOUT).state_bytes == 3 * 256 * 64, "a block of rows, one of kept ones, and one of tokens"
    fork, truncate, release = (int(verb) for verb in (Verb.FORK, Verb.TRUNCATE, Verb.RELEASE))
    report = pools.step([[(1, 0, 20), (2, 0, 3)], [(3, 0, 33)]], [[], []])
    assert [each.blocks_free for each in report.workers] == [paired.num_blocks - (2 + 1 + 2), paired.num_blocks - 4]
    busy = report.workers[0].busy_end[0] > 0
    assert busy.tolist() == [False, True, False, True], "recurrent layers are the S-worker's time"
    pools.step([[(1, 20, 1), (2, 3, 4), (4, 20, 1)], [(3, 33, 2)]], [[(fork, 4, 1, 20)], []])
    pools.step([[(2, 5, 1)], [(3, 34, 1)]], [[(truncate, 2, 0, 5)], [(truncate, 3, 0, 34)]])
    for pool in (pools.whole, pools.paired):
        for start, count in ((0, 32), (32, 3)):
            pool.import_(0, 3, count, pool.export(1, 3, start, count), start)
    report = pools.step([[(3, 35, 1)], []], [[(release, 4, 0, 0)], [(release, 3, 0, 0)]])
    assert report.workers[1].blocks_free == paired.num_blocks
    for pool in (pools.whole, pools.paired):
        pool.begin_step(StepPlan((WorkerPlan(np.zeros(0, CONTROL), (np.array([(9, 0, 5, 1)], SPAN),)),) * 2))
        pool.abandon_step()
    report = pools.step([[], []], [[(release, name, 0, 0) for name in (1, 2, 3)], []])
    assert pools.paired.blocks_used == 0 == sum(paired.num_blocks - each.blocks_free for each in report.workers)
    with pytest.raises(BackendError, match="do not fit a sequence whose states the S-worker keeps"):
        pools.paired.import_(0, 7, 1, np.zeros(3, np.uint8))
    for pool in (pools.whole, pools.paired):
        pool.close()
