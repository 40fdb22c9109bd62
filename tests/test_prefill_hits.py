"""Prompts on prefill workers whose beginning is cached.

Their parts begin after the prefix, which the first worker reads from the R-worker, here over real sockets.
test_prefill_parts.py and test_remote_prompts.py have the same without sockets.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import model_zoo, prefill_workers, r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.prefill_workers import AnyParts

from fastdecode import LLM, SamplingParams
from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.perfmodel.prefill_times import chain_traffic_tokens

NAME, BLOCK_SIZE = "llama-gqa", 16
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "block_size": BLOCK_SIZE,
    "kv_cache_memory": "64MiB",
    "s_threads": 1,
    "r_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)
HITS = ((0, 112), (2, 32), (5, 64), (6, 16), (7, 144), (0, 192))
"""Prompts of the zoo, and the number of their cached tokens: one block, several, and all tokens but one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("zoo") / NAME)


@pytest.fixture(scope="module")
def addresses(folder: Path) -> Iterator[str]:
    """Yield the addresses of four workers, which serve one test after another."""
    with prefill_workers.threads(folder, 4) as found:
        yield found


class Run:
    """An engine whose prefill workers compute only what follows a hit; ``seen`` has what they did."""

    def __init__(self, llm: LLM, sizes: tuple[int, ...] = (), seed: int = 0) -> None:
        self.llm, self.seen = llm, []
        self.policy = OnlyHits([0, 1, 2, 3], seed, sizes=sizes)
        if llm.engine.prefills:
            llm.engine.scheduler.remote_prompts.policy = self.policy
            llm.engine.prefills.on_prefilled = self.seen.append

    def __call__(self, index: int, cached: int, params: SamplingParams = GREEDY) -> Any:
        """Return the output for a prompt of the zoo once its first tokens are cached."""
        prompt = model_zoo.prompts(NAME)[index]
        self.llm.engine.reset_prefix_cache()
        self.llm.generate([{"prompt_token_ids": prompt[:cached]}], FIRST, use_tqdm=False)
        return self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]


class OnlyHits(AnyParts):
    """A policy for tests: random parts of what follows a cached prefix."""

    def assign(self, num_tokens: int, context_len: int = 0) -> Any:
        """See ``PrefillPolicy``."""
        return super().assign(num_tokens, context_len) if context_len else ()


def expected(index: int) -> list[int]:
    return list(model_zoo.reference(NAME).tokens[index][:16])


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 3, 4))])
def test_tokens_are_those_of_generate(folder: Path, addresses: str, size: int) -> None:
    """One block, several, or all tokens but one are cached, and the traffic is as the formula says."""
    with LLM(str(folder), prefill_workers=addresses, **SETTINGS) as llm:
        run = Run(llm, (size,), seed=size)
        row_bytes = sum(layer.token_bytes("float32") for layer in llm.engine.s_model.layout.layers)
        handed = handed_out(llm)
        for index, cached in HITS:
            assert list(run(index, cached).token_ids) == expected(index)
            prefill, seen = handed[-1], run.seen[-1]
            rows = [part.end - part.start for part in prefill.parts]
            assert prefill.context_len == cached
            assert seen.read_bytes == cached * row_bytes
            assert seen.sent_bytes == chain_traffic_tokens(rows, cached) * row_bytes
            assert seen.stored_bytes == sum(rows) * row_bytes
        assert len(handed) == len(HITS)
        assert_nothing_held(llm.engine)


def handed_out(llm: LLM) -> list[RemotePrefill]:
    """Return a list that gets each prompt as it goes to prefill workers."""
    assert llm.engine.prefills is not None
    found: list[RemotePrefill] = []
    submit = llm.engine.prefills.backend.submit
    llm.engine.prefills.backend.submit = lambda prefill, infos: (found.append(prefill), submit(prefill, infos))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype"),
    [
        ("inproc:1", "int4"),
        *(pytest.param("spawn:1", each, marks=pytest.mark.thorough) for each in ("bfloat16", "float32", "int8")),
    ],
)
def test_every_cache_dtype(folder: Path, addresses: str, kind: str, kv_cache_dtype: str) -> None:
    """Log-probabilities of the first token are as near to transformers' as without prefill workers."""
    exact = [reference_logprobs(index) for index, _ in HITS]
    check_nearness(folder, addresses, {**SETTINGS, "kv_cache_dtype": kv_cache_dtype, "r_workers": kind}, exact)


@pytest.mark.slow
def test_a_sixteen_bit_model(tmp_path: Path) -> None:
    model_zoo.load_model(NAME, torch.bfloat16).save_pretrained(tmp_path)
    exact = [reference_logprobs(index) for index, _ in HITS]
    with prefill_workers.threads(tmp_path, 4) as addresses:
        check_nearness(tmp_path, addresses, SETTINGS, exact)


def check_nearness(folder: Path, addresses: str, settings: dict[str, Any], exact: list[np.ndarray]) -> None:
    """Compare with an engine without prefill workers that is in the same state."""
    with LLM(str(folder), **settings) as llm:
        without = [logprobs(Run(llm)(*hit, FIRST)) for hit in HITS]
    with LLM(str(folder), prefill_workers=addresses, **settings) as llm:
        run = Run(llm)
        found = [logprobs(run(*hit, FIRST)) for hit in HITS]
        assert [seen.read_bytes > 0 for seen in run.seen] == [True] * len(HITS)
        assert_nothing_held(llm.engine)
    errors, usual = (
        [np.abs(ours - theirs).max() for ours, theirs in zip(each, exact, strict=True)] for each in (found, without)
    )
    assert max(errors) < 1.2 * max(usual) + 1e-4


def reference_logprobs(index: int) -> np.ndarray:
    """Return transformers' log-probabilities of the first token."""
    logits = model_zoo.reference_logits(model_zoo.build_model(NAME), model_zoo.prompts(NAME)[index], [0])[0]
    return logits.log_softmax(dim=-1).numpy()


def logprobs(output: Any) -> np.ndarray:
    """Return log-probabilities of the first token, by token id."""
    first = output.logprobs[0]
    return np.array([first[token].logprob for token in sorted(first)])


def test_those_that_gather_all_form_a_chain_after_a_hit(folder: Path, addresses: str) -> None:
    with LLM(str(folder), prefill_workers=addresses, prefill_parallel="tsp", **SETTINGS) as llm:
        run = Run(llm, (3,))
        assert list(run(0, 112).token_ids) == expected(0)
        assert run.seen[0].read_bytes > 0


@pytest.mark.slow
def test_the_prefix_is_evicted_while_the_prompt_is_under_way(folder: Path, addresses: str) -> None:
    """The prefix's blocks stay until the sequence that was forked from it ends, and aborts free them."""
    with LLM(str(folder), prefill_workers=addresses, **SETTINGS) as llm:
        run, engine = Run(llm, (2,)), llm.engine
        for turn in range(3):
            prompt = model_zoo.prompts(NAME)[0]
            llm.generate([{"prompt_token_ids": prompt[:112]}], FIRST, use_tqdm=False)
            engine.add_request("hit", prompt, GREEDY)
            before, tokens = len(run.policy.started_jobs), []
            while len(run.policy.started_jobs) == before:
                tokens += engine.step()
            engine.reset_prefix_cache()
            # This request writes the blocks that the eviction freed.
            engine.add_request("other", model_zoo.prompts(NAME)[7], GREEDY)
            if turn % 3 == 2:
                engine.abort_request(["hit"])
            while engine.has_unfinished_requests():
                tokens += engine.step()
            ended = {output.request_id: list(output.outputs[0].token_ids) for output in tokens if output.finished}
            assert ended.pop("other") == expected(7)
            assert turn % 3 == 2 or ended == {"hit": expected(0)}
            assert_nothing_held(engine)


@pytest.mark.slow
def test_r_workers_are_killed_while_prompts_go_on_from_their_prefixes(folder: Path, addresses: str) -> None:
    """The prompt is computed from its tokens on the remaining R-workers."""
    settings = {**SETTINGS, "r_workers": "spawn:3", "kv_cache_memory": "32MiB"}
    with LLM(str(folder), prefill_workers=addresses, **settings) as llm:
        run, engine = Run(llm, (2, 3)), llm.engine
        handed, pids = handed_out(llm), r_workers.spawned_pids(llm)
        for _ in range(2):
            prompt = model_zoo.prompts(NAME)[0]
            engine.reset_prefix_cache()
            llm.generate([{"prompt_token_ids": prompt[:112]}], FIRST, use_tqdm=False)
            engine.add_request("hit", prompt, GREEDY)
            before, tokens = len(handed), []
            while len(handed) == before:
                engine.step()
            os.kill(pids[handed[-1].stores[0].r_worker], signal.SIGKILL)
            while engine.has_unfinished_requests():
                tokens += engine.step()
            assert list(tokens[-1].outputs[0].token_ids) == expected(0)
        assert len(run.policy.started_jobs) >= 2  # A third job starts where a broken connection is noticed first.
        assert_nothing_held(engine)
