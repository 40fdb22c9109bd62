"""Outcomes of the sampler: fair draws, bans, bad rows that fail alone, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.sampling_rows import TOLERANCE, VOCAB, make_row, random_logits
from torch import Tensor

from fastdecode.sworker.sampling import Sampler, distribution
from fastdecode.sworker.sampling.probabilities import draw, sample_seed, uniform

# ---- random draws


def draws(probs: Tensor, count: int, *, one_seed: bool) -> np.ndarray:
    """Return how often each token of a distribution comes, over seeds or over positions of one seed."""
    seeds = [2024] * count if one_seed else [sample_seed(11, i) for i in range(count)]
    positions = range(count) if one_seed else [3] * count
    tokens = draw(probs.expand(count, -1), uniform(seeds, list(positions)))
    return np.bincount(tokens.numpy(), minlength=probs.shape[1])


@pytest.mark.parametrize("one_seed", [True, False])
def test_frequencies_follow_probabilities(one_seed: bool) -> None:
    probs = torch.tensor([[0.0, 0.3, 0.02, 0.08, 0.25, 0.0, 0.2, 0.05, 0.1, 0.0]])
    count = 40_000
    found = draws(probs, count, one_seed=one_seed)
    expected = probs[0].double().numpy() * count
    assert not found[expected == 0].any(), "a token of probability 0 was drawn"
    likely = expected > 0
    chi_square = ((found[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi_square < 22.5, "6 degrees of freedom: exceeded once in 1000 fair generators"
    assert chi_square > 0.3, "too even to be random"


def test_sample_draws_from_the_distribution() -> None:
    count, logits = 4000, random_logits(8, vocab=30, scale=1.0)
    rows = [
        make_row(temperature=0.7, top_k=6, logit_bias={0: 2.0}, generator_seed=sample_seed(5, i)) for i in range(count)
    ]
    found = Counter(s.token_id for s in Sampler().sample(logits.expand(count, -1), rows))
    probs = distribution(logits, rows[:1])[0].tolist()
    assert set(found) == {token for token, p in enumerate(probs) if p > 0} and len(found) == 6
    # The bound is exceeded once in 1,000 times, for 5 degrees of freedom.
    assert sum((found[t] - p * count) ** 2 / (p * count) for t, p in enumerate(probs) if p) < 20.5


def test_uniforms_are_uniform_and_independent() -> None:
    by_position = uniform([1] * 50_000, range(50_000))
    by_seed = uniform(list(range(50_000)), [0] * 50_000)
    for values in (by_position, by_seed):
        assert values.min() >= 0 and values.max() < 1
        empirical = np.arange(1, 50_001) / 50_000
        # The bound of Kolmogorov and Smirnov is exceeded once in 1,000 times.
        assert np.abs(np.sort(values) - empirical).max() < 1.95 / math.sqrt(50_000)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.015
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.015


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.zeros(1, 10_000)

    def token(seed: int, output: Sequence[int], prompt: Sequence[int] = (1,)) -> int:
        row = make_row(prompt=prompt, output=output, generator_seed=seed)
        return Sampler().sample(logits, [row])[0].token_id

    assert token(1, [5, 6]) == token(1, [7, 8], prompt=[9, 9, 9])
    assert len({token(1, range(position)) for position in range(20)}) > 15
    assert len({token(seed, []) for seed in (0, 1, 2, 3, -1, 2**63, 2**64 - 1)}) == 6  # -1 means 2**64 - 1.
    # Even seeds that differ by the generator's own stride must not give one stream, shifted.
    golden = 0x9E3779B97F4A7C15
    assert uniform([1], [1])[0] != uniform([1 + golden], [0])[0]
    assert sample_seed(1, 1) != sample_seed(1 ^ golden, 0)
    assert len({sample_seed(seed, index) for seed in range(100) for index in range(100)}) == 10_000


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_uniform_range(edge: float) -> None:
    probs = torch.tensor([[0.0, 0.1, 0.2, 0.7, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    assert draw(probs, np.array([edge, edge])).tolist() == ([1, 1] if edge == 0 else [3, 1])


# ---- bans


def test_min_tokens_without_stop_tokens_is_free() -> None:
    """Without stop tokens nothing is banned, so the likeliest of the model's own logits is taken without an edit."""
    assert make_row(temperature=0, min_tokens=2).plain_from == 0
    assert make_row(temperature=0, min_tokens=2, stop_token_ids=frozenset({3})).plain_from == 2


def test_min_tokens_holds_stop_tokens_back() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3], logits[0, 4] = 9, 5
    for length, expected in ((0, 4), (1, 4), (2, 3)):
        row = make_row(output=[1] * length, temperature=0, min_tokens=2, stop_token_ids=frozenset({3}))
        assert Sampler().sample(logits, [row])[0].token_id == expected


@pytest.mark.parametrize(
    ("prompt", "output", "words", "expected"),
    [
        ([1], [], ((9,),), 8),
        ([1], [5], ((5, 9),), 8),
        ([1], [6], ((5, 9),), 9),
        ([4], [5], ((4, 5, 9),), 8),
        ([3, 4], [], ((4, 9),), 8),
        ([4], [], ((3, 4, 9),), 9),
        ([1], [5], ((5, 9), (8,)), 7),
        ([1], [], (), 9),
    ],
)
def test_bad_words(prompt: list[int], output: list[int], words: tuple[tuple[int, ...], ...], expected: int) -> None:
    logits = torch.arange(10.0)[None]
    row = make_row(prompt=prompt, output=output, temperature=0, bad_words_token_ids=words)
    assert Sampler().sample(logits, [row])[0].token_id == expected


def test_token_ids_outside_the_vocabulary_are_ignored() -> None:
    outside = {"logit_bias": {VOCAB: 99.0}, "stop_token_ids": frozenset({VOCAB}), "bad_words_token_ids": ((VOCAB,),)}
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "min_tokens": 5}
    logits = random_logits(9, rows=2)
    odd = make_row(prompt=[VOCAB + 3], output=[VOCAB], **outside, **penalties)
    torch.testing.assert_close(distribution(logits, [odd, odd]), logits.softmax(-1), rtol=0, atol=1e-7)


# ---- rows that cannot be sampled


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 5}, {"logit_bias": {0: -9.0}}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bad_rows_fail_alone(fields: dict[str, Any], dtype: torch.dtype) -> None:
    clean = random_logits(10, rows=5).to(dtype)
    broken = clean.clone()
    broken[1, 17], broken[2], broken[3, 2] = math.nan, -math.inf, math.inf
    rows = [make_row(logprobs=2, generator_seed=i, **fields) for i in range(5)]
    expected, found = Sampler().sample(clean, rows), Sampler().sample(broken, rows)
    assert [s.failed for s in found] == [False, True, True, True, False]
    assert all(s.token_id == -1 and s.logprob is None for s in found[1:4])
    assert found[0] == expected[0] and found[4] == expected[4] and found[0].logprob
    assert distribution(broken, rows).sum(-1).round().tolist() == [1, 0, 0, 0, 1]


def test_a_nan_under_a_ban_still_fails() -> None:
    logits = random_logits(11)
    logits[0, 5] = math.nan
    row = make_row(temperature=0, bad_words_token_ids=((5,),))
    assert Sampler().sample(logits, [row])[0].failed and distribution(logits, [row]).sum() == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_everything_banned_fails(temperature: float) -> None:
    row = make_row(temperature=temperature, bad_words_token_ids=tuple((i,) for i in range(5)))
    other = make_row(temperature=temperature, logit_bias={0: 50.0})
    found = Sampler().sample(torch.zeros(2, 5), [row, other])
    assert found[0].failed and found[0].token_id == -1 and not found[1].failed and found[1].token_id == 0


def test_no_rows_and_wrong_shapes() -> None:
    assert Sampler().sample(torch.zeros(0, VOCAB), []) == []
    assert distribution(torch.zeros(0, VOCAB), []).shape == (0, VOCAB)
    for logits in (torch.zeros(VOCAB), torch.zeros(2, VOCAB), torch.zeros(1, 0)):
        with pytest.raises(ValueError, match=r"logits must be \[num_rows=1, vocab\]"):
            Sampler().sample(logits, [make_row()])


# ---- log-probabilities


@pytest.mark.parametrize("count", [0, 1, 5, -1, VOCAB + 5])
def test_logprobs_are_those_of_the_raw_logits(count: int) -> None:
    logits = random_logits(12, rows=4)
    rows = [make_row(logprobs=count, temperature=t, logit_bias={7: 40.0}, top_k=3) for t in (0, 1)] * 2
    expected = logits.log_softmax(-1)
    for i, sampled in enumerate(Sampler().sample(logits, rows)):
        assert sampled.token_id == 7 and sampled.logprob is not None
        best = expected[i].argsort(descending=True).tolist()
        listed = best[: VOCAB if count < 0 else count]
        assert list(sampled.logprob) == [7, *(t for t in listed if t != 7)]
        for token_id, (logprob, rank) in sampled.logprob.items():
            assert logprob == pytest.approx(expected[i, token_id].item(), abs=TOLERANCE)
            assert rank == best.index(token_id) + 1


def test_logprobs_only_for_rows_that_ask() -> None:
    sampled = Sampler().sample(random_logits(13, rows=3), [make_row(), make_row(logprobs=1), make_row()])
    assert [s.logprob is not None for s in sampled] == [False, True, False]


def test_ranks_of_equal_logits_are_by_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    sampled = Sampler().sample(logits, [make_row(temperature=0, logprobs=4)])[0]
    assert [(t, rank) for t, (_, rank) in (sampled.logprob or {}).items()] == [(1, 1), (2, 2), (4, 3), (0, 4)]
