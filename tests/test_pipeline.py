"""The pipeline: who runs when, what happens when a layer fails, where the time goes, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from doubles.fake_backend import FakeBackend
from doubles.recorder import Recorder
from transformers import LlamaConfig, LlamaForCausalLM

from fastdecode.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.sampling_params import SamplingParams
from fastdecode.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.sworker.forward import MiniBatchForward
from fastdecode.sworker.lanes import ATTENTION_NAME, Lane, register_attention
from fastdecode.sworker.packing import pack
from fastdecode.sworker.pipeline import Pipeline
from fastdecode.sworker.prefill import PromptScratch
from fastdecode.sworker.probe import probe_layout
from fastdecode.sworker.sampling import SamplingRow
from fastdecode.sworker.worker import SWorker
from fastdecode.types import KVLayout, StepPlan, StepReport

NUM_LAYERS = 3
GREEDY = SamplingRow(SamplingParams(temperature=0), (), ())


@dataclass(frozen=True)
class Tiny:
    """A Llama with random weights whose attention is ours, and the same one with transformers' own."""

    model: LlamaForCausalLM
    plain: LlamaForCausalLM
    layout: KVLayout


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    register_attention()
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    plain = LlamaForCausalLM._from_config(deepcopy(config), attn_implementation="eager").eval().requires_grad_(False)
    for parameter in plain.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.3)
    model = (
        LlamaForCausalLM._from_config(deepcopy(config), attn_implementation=ATTENTION_NAME).eval().requires_grad_(False)
    )
    model.load_state_dict(plain.state_dict())
    return Tiny(model, plain, probe_layout(model, model.config, "auto"))


def forwards_of(tiny: Tiny, backend: Recorder, num_mini_batches: int) -> list[MiniBatchForward]:
    """One decoding sequence in each mini-batch."""
    cpu, scratch = torch.device("cpu"), PromptScratch()
    return [
        MiniBatchForward(
            i, pack(MiniBatch.of([Chunk(i, 0, 5, (i + 1,))]), cpu), tiny.model, tiny.layout, backend, scratch
        )
        for i in range(num_mini_batches)
    ]


def run_order(tiny: Tiny, backend: Recorder, num_mini_batches: int, overlap: bool = True) -> str:
    """Every submit in order."""
    forwards = forwards_of(tiny, backend, num_mini_batches)
    with torch.inference_mode():
        logits = Pipeline(backend, StateClock()).run(forwards, overlap)
    assert [rows.shape for rows in logits] == [(1, 96)] * num_mini_batches
    return " ".join(backend.log)


NEVER = 10**9
"""Polls of a result that is only there when it is waited for."""


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
    """B's results are there at once, A's only when waited for: B runs to its end, then A."""
    assert run_order(tiny, Recorder(polls={0: NEVER}), 2) == "A0 B0 B1 B2 A1 A2"


def test_of_several_ready_ones_the_longest_paused_goes_first(tiny: Tiny) -> None:
    """A is ready only when asked again: B goes first then, and A before C."""
    assert run_order(tiny, Recorder(polls={0: 1}), 3) == "A0 B0 C0 B1 A1 C1 B2 C2 A2"


def test_time_is_in_exactly_one_state(tiny: Tiny) -> None:
    backend = Recorder(polls={0: NEVER, 1: NEVER}, delay_seconds=0.004)
    clock = StateClock(recording=True)
    forwards = forwards_of(tiny, backend, 2)
    clock.restart()
    start = time.perf_counter()
    with torch.inference_mode():
        Pipeline(backend, clock).run(forwards)
    seconds = clock.snapshot()
    wall = time.perf_counter() - start
    assert sum(seconds.values()) == pytest.approx(wall, abs=1e-3)
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
    clock = StateClock()
    with torch.inference_mode():
        Pipeline(backend := Recorder(), clock).run(forwards_of(tiny, backend, 2))
    seconds = clock.snapshot()  # only the pipeline's own turns count as waiting
    assert seconds[WAIT] < seconds[MODEL] and clock._state == HOST


# With the fake backend, and prompts.


@dataclass
class Engine:
    """An S-worker on the fake backend, step by step."""

    tiny: Tiny
    backend: FakeBackend

    def __post_init__(self) -> None:
        self.backend.open(self.tiny.layout)
        self.worker = SWorker(self.tiny.model, self.tiny.layout, self.backend, StateClock())

    def begin(
        self, *mini_batches: Sequence[Chunk], controls: Sequence[tuple[int, int, int, int]] = ()
    ) -> ScheduledStep:
        no_more: list[tuple[tuple[int, int, int, int], ...]] = [()] * (self.backend.num_workers - 1)
        step = ScheduledStep(tuple(map(MiniBatch.of, mini_batches)), (tuple(controls), *no_more))
        plan: StepPlan = step.to_step_plan()
        self.backend.begin_step(plan)
        return step

    def compute(self, step: ScheduledStep) -> dict[int, int]:
        ids = [sequence_id for part in step.mini_batches for sequence_id in part.sampled_ids]
        sampled = self.worker.run(step, {sequence_id: [GREEDY] for sequence_id in ids})
        report: StepReport = self.backend.end_step()
        assert len(report.workers) == self.backend.num_workers
        return {sequence_id: tokens[0].token_id for sequence_id, tokens in sampled.items()}

    def step(self, *mini_batches: Sequence[Chunk]) -> dict[int, int]:
        return self.compute(self.begin(*mini_batches))


def prompt(
    sequence_id: int, tokens: Sequence[int], stop: int, start: int = 0, attends: bool = False, worker: int = 0
) -> Chunk:
    last = stop == len(tokens)
    return Chunk(sequence_id, worker, start, tokens[start:stop], attends, last, last, is_decode=False)


PROMPTS = [[7, 3, 50, 2, 91, 2], [11], [60, 61, 62, 63, 64, 65, 66, 67, 68, 5, 6, 7, 8, 9, 1, 2, 3, 80], [30, 20, 10]]


def expected_tokens(tiny: Tiny, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.plain(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3])
def test_prompts_in_chunks_and_decodes_equal_the_plain_model(tiny: Tiny, num_mini_batches: int) -> None:
    """Two workers; prompts over the scratch, in one piece and in two, and one that attends on its R-worker."""
    engine = Engine(tiny, FakeBackend(num_workers=2))
    home = [0, 1, 1, 0]
    first = [
        prompt(0, PROMPTS[0], 4),
        prompt(1, PROMPTS[1], 1, worker=1),
        prompt(2, PROMPTS[2], 10, attends=True, worker=1),
        prompt(3, PROMPTS[3], 3),
    ]
    second = [prompt(0, PROMPTS[0], 6, start=4), prompt(2, PROMPTS[2], 18, start=10, attends=True, worker=1)]

    def dealt(chunks: list[Chunk]) -> list[list[Chunk]]:
        parts = [chunks[i::num_mini_batches] for i in range(num_mini_batches)]
        return [sorted(part, key=lambda chunk: (chunk.worker, not chunk.attends)) for part in parts]

    outputs: dict[int, list[int]] = {i: [] for i in range(4)}
    for number in range(5):
        decodes = [
            Chunk(i, home[i], len(PROMPTS[i]) + len(tokens) - 1, (tokens[-1],))
            for i, tokens in outputs.items()
            if tokens
        ]
        chunks = [first, second][number] if number < 2 else []
        for sequence_id, token in engine.step(*dealt(decodes + chunks)).items():
            outputs[sequence_id].append(token)
        assert engine.worker.scratch.num_sequences == (1 if number == 0 else 0)
    for i, tokens in outputs.items():
        assert tokens == expected_tokens(tiny, PROMPTS[i], len(tokens))
        assert len(tokens) == 5 - (i in (0, 2))


def test_constant_values_come_out_as_they_are(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are c whatever the token make every attention output c, wherever it was computed."""
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
    """In the middle layer of the first or of the second mini-batch: the step can be abandoned and done again."""
    chunks = [prompt(0, PROMPTS[0], 6)], [prompt(2, PROMPTS[2], 18, attends=True)]
    clean = Engine(tiny, FakeBackend())
    engine = Engine(tiny, FakeBackend())
    expected = clean.step(*chunks)
    calls: list[int] = []
    lanes: list[Lane] = []

    def fail(*_: object) -> None:
        calls.append(len(calls) + 1)
        if calls[-1] == failing_call:
            raise ArithmeticError("a layer failed")

    original = engine.worker._forwards
    engine.worker._forwards = lambda step: [lanes.append(f.lane) or f for f in original(step)]  # type: ignore[method-assign, func-returns-value]
    step = engine.begin(*chunks)
    hook = tiny.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="a layer failed"):
            engine.compute(step)
    finally:
        hook.remove()
    assert len(lanes) == 2 and all(lane.dead for lane in lanes)
    assert not torch.is_inference_mode_enabled()
    engine.backend.abandon_step()
    assert engine.backend.cached == {}
    assert engine.step(*chunks) == expected
    follow = [Chunk(0, 0, 6, (expected[0],))], [Chunk(2, 0, 18, (expected[2],))]
    assert engine.step(*follow) == clean.step(*follow)


def test_a_failing_backend_ends_every_lane(tiny: Tiny) -> None:
    backend = Recorder()
    forwards = forwards_of(tiny, backend, 3)
    backend.collect = lambda mini_batch: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        Pipeline(backend, StateClock()).run(forwards)
    assert all(forward.lane.dead for forward in forwards)
    assert run_order(tiny, Recorder(), 2) == "A0 B0 A1 B1 A2 B2"


def test_the_model_runs_only_in_a_lane(tiny: Tiny) -> None:
    with pytest.raises(RuntimeError, match="only inside its pipeline"):
        tiny.model(torch.tensor([[1, 2]]), use_cache=False)


def test_empty_mini_batches_are_skipped(tiny: Tiny) -> None:
    engine = Engine(tiny, FakeBackend())
    assert engine.step([], [prompt(0, PROMPTS[0], 6)]) == {0: expected_tokens(tiny, PROMPTS[0], 1)[0]}
    nothing_sampled = replace(prompt(1, PROMPTS[2], 18), samples=False)
    assert engine.step([nothing_sampled], []) == {}
