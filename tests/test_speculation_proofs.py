"""Speculative decoding where it could go wrong: distributions, losses, preemption, moves and grammars."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from helpers import model_zoo, r_workers
from helpers.drafting import Clairvoyant, always_draft
from helpers.engine_checks import assert_nothing_held
from helpers.examples import examples, thinned
from helpers.servers import MODEL, metrics, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode import LLM, SamplingParams, StructuredOutputsParams
from fastdecode.core.protocols import DraftRequest
from fastdecode.sworker.sampling import SamplingRow, distribution

NAME = "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
CHI_SQUARE_QUANTILE = 4.9
"""Standard deviations above the mean of a chi-square of many degrees, exceeded once in a million."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama and return its folder."""
    return model_zoo.save_model(NAME, tmp_path_factory.mktemp("llama"))


def make_llm(folder: Path | None = None, num_drafts: int = 4, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "max_model_len": 300, "s_threads": 1, "r_threads": 1, "kv_cache_memory": "64MiB"}
    ngram = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    given = {**defaults, "speculative_config": ngram, **settings}
    return LLM(str(folder), skip_tokenizer_init=True, **given) if folder else LLM(**given)


def clairvoyant(error: float, seed: int = 0) -> tuple[list[list[int]], list[list[int]], Clairvoyant]:
    """Return prompts, what transformers generates, and a drafter that knows it except for errors."""
    prompts, wanted = model_zoo.prompts(NAME), [list(tokens) for tokens in model_zoo.reference(NAME).tokens]
    return prompts, wanted, Clairvoyant(dict(zip(map(tuple, prompts), wanted, strict=True)), error, seed)


class RandomDrafter:
    """A drafter of random tokens, as many as are asked for or fewer."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._rng = vocab_size, np.random.default_rng(1)

    def propose(self, requests: Any, pending: Any) -> dict[int, list[int]]:
        counts = [int(self._rng.integers(0, each.num_drafts + 1)) for each in requests]
        drawn = [self._rng.integers(0, self._vocab_size, count).tolist() for count in counts]
        return {each.sequence_id: tokens for each, tokens in zip(requests, drawn, strict=True)}

    def forget(self, sequence_id: int) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(temperature=1.0), marks=pytest.mark.thorough),
        SamplingParams(temperature=0.8, top_k=5, repetition_penalty=1.3, min_p=0.02),
    ],
    ids=["plain", "cut and penalised"],
)
def test_sampled_texts_have_the_exact_distribution(params: SamplingParams, tmp_path: Path) -> None:
    """Counts of all texts of three tokens of a vocabulary of eight agree with the exact probabilities."""
    vocab, length, prompt, rounds, samples = 8, 3, [1, 4, 2], 24, 256
    model = model_zoo.build_model(NAME, vocab_size=vocab)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0 / model(torch.tensor([prompt])).logits.std())
    model.save_pretrained(tmp_path)
    exact = _probabilities(model, prompt, length, params)
    assert math.isclose(sum(exact.values()), 1.0, rel_tol=1e-5)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(exact, 0)
    with make_llm(tmp_path, num_drafts=length - 1, max_num_seqs=samples, seed=8) as llm:
        always_draft(llm.engine, RandomDrafter(vocab))
        for seed in range(rounds):
            many = replace(params, n=samples, seed=seed, max_tokens=length, ignore_eos=True, detokenize=False)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], many, use_tqdm=False)
            for each in output.outputs:
                counts[each.token_ids] += 1
        drafts = llm.engine.scheduler.statistics.drafts
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert _surprise(counts, exact, rounds * samples) < CHI_SQUARE_QUANTILE
    assert all(counts[text] == 0 for text, probability in exact.items() if probability == 0)
    blurred = {text: (probability + 1 / len(exact)) / 2 for text, probability in exact.items()}
    assert _surprise(counts, blurred, rounds * samples) > CHI_SQUARE_QUANTILE  # This test can fail.


def _probabilities(model: Any, prompt: list[int], length: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return the probabilities of all texts, by transformers' logits and the sampler's own distribution."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in found.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1:]
            row = distribution(logits, [SamplingRow(params, prompt, list(text))])[0].tolist()
            longer |= {(*text, token): probability * each for token, each in enumerate(row)}
        found = longer
    return found


def _surprise(counts: dict[tuple[int, ...], int], exact: dict[tuple[int, ...], float], total: int) -> float:
    """Return a chi-square in standard deviations above its mean.

    Texts that are expected less than five times count together.
    """
    expected = np.array([probability * total for probability in exact.values()])
    seen = np.array([counts[text] for text in exact], float)
    rare = expected < 5
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    seen = np.append(seen[~rare], seen[rare].sum())
    freedom = len(expected) - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


class Scripted:
    """A drafter that is right for as many tokens as a repeated pattern says, and then wrong."""

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], pattern: list[tuple[int, int]]) -> None:
        self._outputs, self._pattern = outputs, itertools.cycle(pattern)

    def propose(self, requests: Any, pending: Any) -> dict[int, list[int]]:
        return {each.sequence_id: self._draft(each, *next(self._pattern)) for each in requests}

    def _draft(self, request: DraftRequest, num_right: int, num_wrong: int) -> list[int]:
        done = len(request.output_token_ids)
        following = self._outputs[tuple(request.prompt_token_ids)][done:]
        tokens = [*following[:num_right], *(token ^ 1 for token in following[num_right : num_right + num_wrong])]
        return tokens[: request.num_drafts]

    def forget(self, sequence_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def patterns_llm(folder: Path) -> Any:
    """Yield an LLM with small blocks, so that drafts cross them."""
    with make_llm(folder, num_drafts=8, block_size=16, r_workers="inproc:2", num_mini_batches=2) as llm:
        yield llm


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=12))
@settings(max_examples=examples(25))
def test_any_pattern_of_right_and_wrong_drafts(patterns_llm: LLM, pattern: list[tuple[int, int]]) -> None:
    """Tokens are those of one at a time, blocks are exact after every step, and none is held in the end."""
    prompts, wanted, _ = clairvoyant(0.0)
    prompts, wanted, engine = prompts[:6], wanted[:6], patterns_llm.engine
    always_draft(engine, Scripted(dict(zip(map(tuple, prompts), wanted, strict=True)), pattern))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        known = engine.scheduler.snapshot()
        for sequence in (known.sequences[each] for each in known.decoding):
            assert sequence.num_cached == sequence.num_tokens - 1
            assert sequence.segments[sequence.tail].num_blocks == -(-sequence.num_cached // 16)
    assert [tokens[number] for number in range(len(prompts))] == wanted
    assert_nothing_held(engine)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [30, pytest.param(300, marks=pytest.mark.thorough)])
def test_an_r_worker_killed_while_it_verifies(folder: Path, moment: int) -> None:
    prompts, wanted, drafter = clairvoyant(0.3)
    with make_llm(folder, r_workers="spawn:3", num_mini_batches=2) as llm:
        always_draft(llm.engine, drafter)
        victim, tokens, engine = r_workers.spawned_pids(llm)[moment % 3], {}, llm.engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if victim and sum(map(len, tokens.values())) >= moment:
                os.kill(victim, signal.SIGKILL)
                victim = 0
        assert not victim and [tokens[number] for number in range(len(prompts))] == wanted
        assert_nothing_held(engine)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", thinned(["stall-free", "sls", "request-level", "prefill-first"], 2))
def test_preemption_moves_and_kept_prefixes(folder: Path, schedule: str) -> None:
    """The cache is too small, budgets leave few rows for drafts, and the same prompts come twice."""
    prompts, wanted, drafter = clairvoyant(0.2)
    tight = {"kv_cache_memory": "480KiB", "block_size": 16, "max_num_seqs": 12, "max_num_batched_tokens": 30}
    tight |= {"r_workers": "inproc:2", "schedule": schedule}
    with make_llm(folder, **tight) as llm:
        always_draft(llm.engine, drafter)
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        statistics = llm.engine.scheduler.statistics
        assert statistics.preemptions > 0 or schedule in ("sls", "request-level")
        assert statistics.drafts.num_accepted_tokens > 0
        assert_nothing_held(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", thinned(["int4", "int8", "float16"], 3))
def test_other_cache_dtypes_give_what_they_give_without_drafts(folder: Path, kv_dtype: str) -> None:
    """Tokens are stored one by one, and rejected ones leave nothing behind."""
    prompts, _, drafter = clairvoyant(0.3)
    found = []
    for drafts in (False, True):
        with make_llm(folder, kv_cache_dtype=kv_dtype) as llm:
            if drafts:
                always_draft(llm.engine, drafter)
            else:
                llm.engine.scheduler.drafts.policy = None
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.engine.scheduler.statistics.drafts.num_accepted_tokens > 0) == drafts
    assert found[0] == found[1]


FORMS = [
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}),
    StructuredOutputsParams(choice=["abababab", "abcabcabc"]),
    StructuredOutputsParams(regex="(ab){3,9}c?"),
]


@pytest.mark.parametrize("form", FORMS, ids=["json", "choice", "regex"])
def test_drafts_keep_to_grammars(form: StructuredOutputsParams) -> None:
    """Drafts that a grammar forbids are cut, and texts end where they are complete."""
    prompts = ['{"a": 1, "b": "x"} {"a": 2, "b": "y"} {"a"', "abcabcabababab ab", "ababab"]
    found = []
    for settings_ in ({"speculative_config": {}}, {}):
        with make_llm(**settings_) as llm:
            if not settings_:
                always_draft(llm.engine)
            params = [SamplingParams(temperature=t, max_tokens=40, structured_outputs=form, seed=3) for t in (0.0, 0.9)]
            texts = [llm.generate(prompts, each, use_tqdm=False) for each in params]
            found.append([[o.outputs[0].token_ids for o in outputs] for outputs in texts])
            found[-1].append([[o.outputs[0].finish_reason for o in outputs] for outputs in texts])
    assert found[0] == found[1]
    drafts = llm.engine.scheduler.statistics.drafts
    assert drafts.num_accepted_tokens > 0 or (form.schema and drafts.num_draft_tokens > 0)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_streams_what_it_would_without(tmp_path: Path) -> None:
    """An event may have several tokens with their log-probabilities, and counters have vLLM's names."""
    prompts = [f"def f{number}(x):\n    return x\n\n" * 4 for number in range(8)]
    with LLM(max_model_len=256, kv_cache_memory="64MiB", s_threads=1, r_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, logprobs=1)
        wanted = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with serving(tmp_path, "--served-model-name", MODEL, "--speculative-config", json.dumps(config)) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = list(threads.map(lambda prompt: _streamed(api, prompt), prompts))
        counts = metrics(server)
    assert [text for text, _ in found] == [each.text for each in wanted]
    values = [[places[t].logprob for t, places in zip(each.token_ids, each.logprobs, strict=True)] for each in wanted]
    assert [logprobs for _, logprobs in found] == values
    drafted, accepted = (
        counts[f'fastdecode:spec_decode_num_{name}_tokens_total{{model_name="{MODEL}"}}']
        for name in ("draft", "accepted")
    )
    assert 0 <= accepted <= drafted


def _streamed(api: openai.OpenAI, prompt: str) -> tuple[str, list[float]]:
    more = {"ignore_eos": True}
    events = api.completions.create(
        model=MODEL, prompt=prompt, stream=True, temperature=0, max_tokens=80, logprobs=1, extra_body=more
    )
    choices = [event.choices[0] for event in events]
    return "".join(each.text for each in choices), [v for each in choices for v in each.logprobs.token_logprobs]
