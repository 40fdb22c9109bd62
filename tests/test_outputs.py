"""A request's outputs never change, though their tuples are made only when read."""

from __future__ import annotations

import copy

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.api.outputs import CompletionOutput, Grown, Logprob, RequestMetrics


def test_a_grown_list_is_the_list_as_it_was() -> None:
    items = [3, 1, 4, 1, 5]
    seen, as_it_was = Grown(items), tuple(items)
    items += [9, 2, 6]
    assert (len(seen), tuple(seen), list(reversed(seen))) == (5, as_it_was, [5, 1, 4, 1, 3])
    assert seen[0] == 3 and seen[-1] == 5 and 9 not in seen and seen[2:] == (4, 1, 5)
    every = [None, *range(-7, 8)]
    for start in every:
        for stop in every:
            for step in (None, 2, -1, -3):
                assert seen[start:stop:step] == as_it_was[start:stop:step]
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            seen[wrong]


def test_outputs_are_compared_and_shown_by_what_they_hold() -> None:
    tokens, logprobs = [7, 8], [{7: Logprob(-1.0, 1)}, {8: Logprob(-2.0, 1)}]
    seen = CompletionOutput(0, "ab", Grown(tokens), None, None, Grown(logprobs))
    tokens.append(9)
    logprobs.append({9: Logprob(-3.0, 1)})
    made = CompletionOutput(0, "ab", (7, 8), logprobs=tuple(logprobs[:2]))
    assert seen == made == copy.deepcopy(seen) and repr(seen) == repr(made)
    assert type(seen.token_ids) is tuple and seen.token_ids is seen.token_ids
    assert type(seen.logprobs) is tuple and CompletionOutput(0, "ab", (7, 8)).logprobs is None
    assert seen != CompletionOutput(0, "ab", Grown(tokens)) and seen != "ab"
    moments = [1.0]
    metrics = RequestMetrics(0.5, Grown(moments))
    moments.append(2.0)
    assert metrics == RequestMetrics(0.5, (1.0,)) and type(metrics.token_seconds) is tuple
    assert repr(metrics) == "RequestMetrics(arrival_seconds=0.5, token_seconds=(1.0,), started_seconds=None)"


def test_outputs_of_earlier_steps_do_not_change() -> None:
    """Outputs that are read only after the last step are what they were at their step."""
    with LLM(max_model_len=256, kv_cache_memory="64MiB", device="cpu") as llm:
        params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=1, n=2)
        llm.engine.add_request("a", "def f(", params)
        kept = []
        while llm.engine.has_unfinished_requests():
            kept += llm.engine.step()
    last = kept[-1]
    assert [len(each.metrics.token_seconds) for each in kept] == list(range(1, 13)) and last.finished
    for number, output in enumerate(kept, 1):
        for early, late in zip(output.outputs, last.outputs, strict=True):
            assert early.token_ids == late.token_ids[:number] and late.text.startswith(early.text)
            assert late.logprobs is not None and early.logprobs == late.logprobs[:number]
        assert output.metrics.token_seconds == last.metrics.token_seconds[:number]
