"""The sampler against transformers' own processors, and against itself in other batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.sampling_rows import TOLERANCE, VOCAB, make_row, random_logits, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdecode.sworker.sampling import Sampler, SamplingRow, distribution
from fastdecode.sworker.sampling import sampler as sampler_module
from fastdecode.sworker.sampling.probabilities import FIRST_NUCLEUS

HISTORY = {"prompt": [4, 8, 15, 16, 23, 42, 4], "output": [7, 9, 7, 7, 42, 11]}


def assert_like_reference(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    probs = distribution(logits, rows)
    expected = torch.cat([reference(logits[i : i + 1], row) for i, row in enumerate(rows)])
    assert torch.equal(probs > 0, expected > 0), "support differs"
    torch.testing.assert_close(probs, expected, rtol=0, atol=TOLERANCE)
    return probs


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    *({"temperature": t} for t in (0.05, 0.7, 1.0, 1.9, 50.0)),
    *({"top_k": k} for k in (-1, 1, 2, 50, VOCAB - 1, VOCAB, VOCAB + 7)),
    *({"top_p": p} for p in (1e-9, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0)),
    *({"min_p": p} for p in (0.001, 0.05, 0.5, 1.0)),
    *({"repetition_penalty": p} for p in (0.5, 1.2, 5.0)),
    *({"presence_penalty": p} for p in (-1.5, 2.0)),
    *({"frequency_penalty": p} for p in (-0.7, 0.5)),
    {"logit_bias": {0: 30.0, 5: -4.0, VOCAB - 1: 8.5}},
    {"min_tokens": 7, "stop_token_ids": frozenset({0, 3, 99})},
    {"min_tokens": 6, "stop_token_ids": frozenset({0, 3, 99})},
    {"min_tokens": 6, "stop_token_ids": frozenset({0, 3, 99}), "logit_bias": {0: 1.0}},
    {"logit_bias": {7: 20.0, 42: -20.0, 8: 15.0}, "repetition_penalty": 1.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.7, "frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": {7: 5.0}},
    {"temperature": 2.0, "min_p": 0.05, "top_p": 0.8},
    {"allowed_token_ids": [7, 42, 8, 499], "logit_bias": {7: 20.0, 9: 90.0}, "repetition_penalty": 1.7},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"bad_words_token_ids": ((5,), (42, 11, 77), (11, 78), (9, 79), (7, 42, 11, 80))},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: ",".join(f"{k}={v}" for k, v in option.items())[:40])
def test_each_option_is_transformers(option: dict[str, Any]) -> None:
    logits = random_logits(1, rows=6)
    probs = assert_like_reference(logits, [make_row(**HISTORY, **option)] * 6)
    neutral = option in ({"temperature": 1.0}, {"top_k": -1}, {"top_p": 1.0}) or option.get("top_k", 0) >= VOCAB
    if not neutral and option != {"min_tokens": 6, "stop_token_ids": frozenset({0, 3, 99})}:
        assert not torch.equal(probs, logits.softmax(-1)), "the option did nothing"


bad_words = st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple)

rows_with_options = st.builds(
    make_row,
    prompt=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 20), max_size=8),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.5]),
    top_k=st.sampled_from([0, -1, 1, 3, 40, 400]),
    top_p=st.just(1.0) | st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.frozensets(st.integers(0, 30), min_size=1, max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 30), st.floats(-9, 9), min_size=1, max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(31, 90), min_size=9, max_size=20),
    bad_words_token_ids=st.lists(bad_words, max_size=4).map(tuple),
    generator_seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rows=st.lists(rows_with_options, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_options_together_are_transformers_in_any_batch(rows: list[SamplingRow], seed: int) -> None:
    logits = random_logits(seed, rows=len(rows))
    probs = assert_like_reference(logits, rows)
    sampled = Sampler().sample(logits, rows)
    for i, row in enumerate(rows):
        assert probs[i, sampled[i].token_id] > 0 and not sampled[i].failed
        assert Sampler().sample(logits[i : i + 1], [row]) == [sampled[i]]
        assert torch.equal(distribution(logits[i : i + 1], [row])[0], probs[i])


@pytest.mark.parametrize("top_k", [0, 900])
def test_large_nuclei_and_ties_are_transformers(top_k: int) -> None:
    logits = random_logits(2, rows=4, vocab=20_000, scale=1.0)
    rows = [make_row(top_p=p, top_k=top_k) for p in (0.55, 0.7, 0.95, 0.999)]
    probs = assert_like_reference(logits, rows)
    assert (probs > 0).sum(-1).min() >= FIRST_NUCLEUS, "the nucleus must outgrow the first candidates"
    tied = (logits * 2).round() / 2  # Thousands of logits are equal; transformers' sort decides which of them stay.
    probs = distribution(tied, rows)
    expected = torch.cat([reference(tied[i : i + 1], row) for i, row in enumerate(rows)])
    assert torch.equal((probs > 0).sum(-1), (expected > 0).sum(-1))
    torch.testing.assert_close(probs.sort(-1).values, expected.sort(-1).values, rtol=0, atol=TOLERANCE)


def crowd(count: int) -> list[SamplingRow]:
    """Return rows of every kind, with plain ones between them."""
    return [
        make_row(
            prompt=range(i, i + 5),
            output=range(2 * i % 7),
            temperature=(0.0, 0.8, 1.3)[i % 3],
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9, 1.0, 0.99)[i % 4],
            min_p=(0.0, 0.0, 0.02)[i // 2 % 3],
            repetition_penalty=(1.0, 1.2)[i // 3 % 2],
            frequency_penalty=(0.0, 0.5)[i // 5 % 2],
            logprobs=(None, 2, None, 6)[i % 4],
            generator_seed=i * 77,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_or_in_a_crowd_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = crowd(40), random_logits(3, rows=40, vocab=4099).to(dtype)
    together, probs = Sampler().sample(logits, rows), distribution(logits, rows)
    assert len({sampled.token_id for sampled in together}) > 25
    for i, row in enumerate(rows):
        assert Sampler().sample(logits[i : i + 1], [row]) == [together[i]]
        assert torch.equal(distribution(logits[i : i + 1], [row])[0], probs[i])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = Sampler().sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    monkeypatch.setattr(sampler_module, "CHUNK_ELEMENTS", 3 * 4099)
    assert Sampler().sample(logits, rows) == together


def test_threads_do_not_matter() -> None:
    rows, logits, before = crowd(12), random_logits(4, rows=12, vocab=70_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = Sampler().sample(logits, rows), distribution(logits, rows)
        torch.set_num_threads(2)
        two = Sampler().sample(logits, rows), distribution(logits, rows)
    finally:
        torch.set_num_threads(before)
    assert one[0] == two[0] and torch.equal(one[1], two[1])


def test_logits_and_rows_are_left_alone() -> None:
    rows, logits = crowd(12), random_logits(5, rows=12)
    before, rows_before = logits.clone(), [dataclasses.replace(row) for row in rows]
    Sampler().sample(logits, rows)
    distribution(logits, rows)
    assert torch.equal(logits, before) and rows == rows_before


def test_strided_logits() -> None:
    rows, wide = crowd(12), random_logits(6, rows=12, vocab=2 * VOCAB)
    assert Sampler().sample(wide[:, ::2], rows) == Sampler().sample(wide[:, ::2].contiguous(), rows)
    transposed = wide.t().contiguous().t()
    assert Sampler().sample(transposed, rows) == Sampler().sample(wide, rows)


def test_greedy_is_argmax_lowest_id_first() -> None:
    logits = random_logits(7, rows=50).to(torch.bfloat16)
    logits[:, 100] = logits[:, 300] = 50
    rows = [make_row(temperature=0, top_k=3, top_p=0.1, min_p=0.5)] * 50
    assert [s.token_id for s in Sampler().sample(logits, rows)] == [100] * 50
    biased = [make_row(temperature=0, logit_bias={9: 0.0}, logprobs=1)] * 50
    sampled = Sampler().sample(logits, biased)
    assert [s.token_id for s in sampled] == [100] * 50 and all(list(s.logprob or {}) == [100] for s in sampled)
