"""The pipeline: the order of mini-batches, failures of a layer, measured times, and outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from doubles.fake_backend import FakeBackend
from doubles.recorder import Recorder
from helpers.tiny import (
    NUM_LAYERS,
    PROMPTS,
    Engine,
    Tiny,
    check_a_failing_layer,
    check_prompts_in_chunks_and_decodes,
    expected_tokens,
    make_tiny,
    prompt,
)

from fastdecode.core.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.sworker.run.pipeline import MiniBatchForward, Pipeline
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.staging import pack


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


def forwards_of(tiny: Tiny, backend: Recorder, num_mini_batches: int) -> list[MiniBatchForward]:
    """Return one decoding sequence's forward for each mini-batch."""
    cpu, scratch = torch.device("cpu"), PromptScratch(tiny.layout)
    return [
        MiniBatchForward(i, pack(MiniBatch.of([Chunk(i, 0, 5, (i + 1,))]), cpu), tiny.code, backend, scratch)
        for i in range(num_mini_batches)
    ]


def run_order(tiny: Tiny, backend: Recorder, num_mini_batches: int, overlap: bool = True) -> str:
    """Return every submit in order."""
    forwards = forwards_of(tiny, backend, num_mini_batches)
    with torch.inference_mode():
        logits = Pipeline(backend, StateClock()).run(forwards, overlap)
    assert [rows.shape for rows in logits] == [(1, 96)] * num_mini_batches
    return " ".join(backend.log)


NEVER = 10**9
"""So many polls that a result is there only when it is waited for."""


@pytest.mark.parametrize("polls", [{}, {0: NEVER, 1: NEVER}, {0: 1, 1: 1}], ids=["at once", "late", "one poll late"])
def test_two_mini_batches_take_turns(tiny: Tiny, polls: dict[int, int]) -> None:
    assert run_order(tiny, Recorder(polls=polls), 2) == "A0 B0 A1 B1 A2 B2"


def test_three_mini_batches_take_turns(tiny: Tiny) -> None:
    assert run_order(tiny, Recorder(), 3) == "A0 B0 C0 A1 B1 C1 A2 B2 C2"


def test_without_overlap_each_runs_alone(tiny: Tiny) -> None:
    assert run_order(tiny, Recorder(), 2, overlap=False) == "A0 A1 A2 B0 B1 B2"


def test_one_mini_batch(tiny: Tiny) -> None:
    assert run_order(tiny, Recorder(), 1) == "A0 A1 A2"
    assert run_order(tiny, Recorder(), 0) == ""


def test_the_one_that_is_ready_goes_first(tiny: Tiny) -> None:
    """B's results are there at once and A's only when waited for, so B runs to its end before A."""
    assert run_order(tiny, Recorder(polls={0: NEVER}), 2) == "A0 B0 B1 B2 A1 A2"


def test_of_several_ready_ones_the_longest_paused_goes_first(tiny: Tiny) -> None:
    """A is ready only when asked again, so B goes first then, and A before C."""
    assert run_order(tiny, Recorder(polls={0: 1}), 3) == "A0 B0 C0 B1 A1 C1 B2 C2 A2"


def test_time_is_in_exactly_one_state(tiny: Tiny) -> None:
    backend = Recorder(polls={0: NEVER, 1: NEVER}, delay_seconds=0.004)
    clock = StateClock(recording=True)
    forwards = forwards_of(tiny, backend, 2)
    clock.restart()
    start = clock.since
    with torch.inference_mode():
        Pipeline(backend, clock).run(forwards)
    seconds = clock.snapshot()
    assert sum(seconds.values()) == pytest.approx(clock.since - start, abs=1e-9)
    assert seconds[WAIT] >= 2 * NUM_LAYERS * 0.004
    assert seconds[MODEL] > 0
    spans = [span for span in clock.intervals if span.start_seconds >= start]
    assert all(before.end_seconds == after.start_seconds for before, after in pairwise(spans))
    model = [(span.mini_batch, span.layer) for span in spans if span.state == MODEL]
    assert model == [(i, layer) for layer in range(NUM_LAYERS + 1) for i in range(2)]
    assert sum(span.end_seconds - span.start_seconds for span in spans if span.state == WAIT) == pytest.approx(
        seconds[WAIT], abs=1e-9
    )


def test_results_at_once_are_not_waited_for(tiny: Tiny) -> None:
    """The pipeline polls each result once, but not the last result: no other mini-batch is pending then."""
    clock, backend = StateClock(), Recorder()
    with torch.inference_mode():
        Pipeline(backend, clock).run(forwards_of(tiny, backend, 2))
    assert backend.polled == 2 * NUM_LAYERS - 1 and clock.state == HOST
    late = Recorder(polls={0: 3, 1: 3})
    run_order(tiny, late, 2)
    assert late.polled > backend.polled


# With the fake backend, and prompts.


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3])
def test_prompts_in_chunks_and_decodes_equal_the_plain_model(tiny: Tiny, num_mini_batches: int) -> None:
    check_prompts_in_chunks_and_decodes(tiny, num_mini_batches)


def test_constant_values_come_out_as_they_are(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant values make every attention output the same constant, wherever it was computed."""
    seen: list[torch.Tensor] = []
    hooks = []
    saved = {name: parameter.clone() for name, parameter in tiny.model.named_parameters()}
    for number, layer in enumerate(tiny.model.model.layers):
        layer.self_attn.v_proj.weight.zero_()
        layer.self_attn.v_proj.bias.fill_(number + 0.5)
        hooks.append(
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].clone()))
        )
    try:
        engine = Engine(tiny, FakeBackend())
        engine.step([prompt(0, PROMPTS[0], 6)], [prompt(2, PROMPTS[2], 18, attends=True)])
        engine.step([Chunk(0, 0, 6, (4,)), prompt(1, PROMPTS[1], 1)], [Chunk(2, 0, 18, (4,))])
    finally:
        for hook in hooks:
            hook.remove()
        tiny.model.load_state_dict(saved, strict=False)
    rows = [6, 18] * NUM_LAYERS + [2, 1] * NUM_LAYERS
    assert len(seen) == len(rows)
    for i, (o, num_rows) in enumerate(zip(seen, rows, strict=True)):
        torch.testing.assert_close(o[:num_rows], torch.full_like(o[:num_rows], i // 2 % NUM_LAYERS + 0.5))


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failing_layer_leaves_nothing_behind(tiny: Tiny, failing_call: int) -> None:
    check_a_failing_layer(tiny, failing_call)


def test_a_failing_backend_ends_every_greenlet(tiny: Tiny) -> None:
    backend = Recorder()
    forwards = forwards_of(tiny, backend, 3)
    backend.collect = lambda mini_batch: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        Pipeline(backend, StateClock()).run(forwards)
    assert all(forward.own_greenlet.dead for forward in forwards)
    assert run_order(tiny, Recorder(), 2) == "A0 B0 A1 B1 A2 B2"


def test_the_model_runs_only_in_a_greenlet(tiny: Tiny) -> None:
    with pytest.raises(RuntimeError, match="only inside its pipeline"):
        tiny.model(torch.tensor([[1, 2]]), use_cache=False)


def test_empty_mini_batches_are_skipped(tiny: Tiny) -> None:
    engine = Engine(tiny, FakeBackend())
    assert engine.step([], [prompt(0, PROMPTS[0], 6)]) == {0: expected_tokens(tiny, PROMPTS[0], 1)[0]}
    nothing_sampled = replace(prompt(1, PROMPTS[2], 18), samples=False)
    assert engine.step([nothing_sampled], []) == {}
