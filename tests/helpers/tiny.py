"""A Llama of three layers on the fake backend, for tests of the pipeline, staging and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from doubles.fake_backend import FakeBackend
from transformers import LlamaConfig, LlamaForCausalLM

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.metrics import StateClock
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import StepPlan, StepReport
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.model.support import probe_layout
from fastdecode.sworker.model.transformers_code import TransformersCode
from fastdecode.sworker.run.pipeline import ATTENTION_NAME, ModelGreenlet, register_attention
from fastdecode.sworker.run.s_worker import SWorker
from fastdecode.sworker.run.staging import rows_of
from fastdecode.sworker.sampling import SamplingRow

NUM_LAYERS = 3
GREEDY = SamplingRow(SamplingParams(temperature=0), (), ())


@dataclass(frozen=True)
class Tiny:
    """A Llama with random weights and our attention, and the same one with transformers' own attention."""

    model: LlamaForCausalLM
    plain: LlamaForCausalLM
    layout: KVLayout

    @property
    def code(self) -> TransformersCode:
        """The model's code as the S-worker runs it."""
        return TransformersCode(self.model)


def make_tiny() -> Tiny:
    """Return a tiny Llama; register its attention with transformers first."""
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
    return Tiny(model, plain, probe_layout(TransformersCode(model), model.config, "auto"))


@dataclass
class Engine:
    """An S-worker on the fake backend, run step by step."""

    tiny: Tiny
    backend: FakeBackend

    def __post_init__(self) -> None:
        self.backend.open(self.tiny.layout)
        self.worker = SWorker(self.tiny.code, self.tiny.layout, self.backend, StateClock())

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
    """Return greedy tokens of the plain model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.plain(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check_prompts_in_chunks_and_decodes(tiny: Tiny, num_mini_batches: int) -> None:
    """Check two workers with prompts over the scratch, in one and two chunks, and one that attends on its R-worker."""
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
        assert len(engine.worker.prompts.sequence_ids) == (1 if number == 0 else 0)
    for i, tokens in outputs.items():
        assert tokens == expected_tokens(tiny, PROMPTS[i], len(tokens))
        assert len(tokens) == 5 - (i in (0, 2))


def check_a_failing_layer(tiny: Tiny, failing_call: int) -> None:
    """Check that a step which fails in the middle layer can be abandoned and repeated."""
    chunks = [prompt(0, PROMPTS[0], 6)], [prompt(2, PROMPTS[2], 18, attends=True)]
    clean = Engine(tiny, FakeBackend())
    engine = Engine(tiny, FakeBackend())
    expected = clean.step(*chunks)
    calls: list[int] = []
    greenlets: list[ModelGreenlet] = []

    def fail(*_: object) -> None:
        calls.append(len(calls) + 1)
        if calls[-1] == failing_call:
            raise ArithmeticError("a layer failed")

    original = engine.worker.forwards
    engine.worker.forwards = lambda step: [greenlets.append(f.own_greenlet) or f for f in original(step)]  # type: ignore[method-assign, func-returns-value]
    step = engine.begin(*chunks)
    hook = tiny.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="a layer failed"):
            engine.compute(step)
    finally:
        hook.remove()
    assert len(greenlets) == 2 and all(each.dead for each in greenlets)
    assert not torch.is_inference_mode_enabled()
    engine.backend.abandon_step()
    assert engine.backend.cached == {}
    assert engine.step(*chunks) == expected
    follow = [Chunk(0, 0, 6, (expected[0],))], [Chunk(2, 0, 18, (expected[2],))]
    assert engine.step(*follow) == clean.step(*follow)


def qkv(dtype: torch.dtype, contiguous: bool, attending: slice | torch.Tensor) -> list[torch.Tensor]:
    """Return 20 rows of 4 query and 2 key-value heads, in the form in which a model passes them."""
    torch.manual_seed(1)
    heads = [torch.randn(1, 20, count, 8).to(dtype).transpose(1, 2) for count in (4, 2, 2)]
    rows = [rows_of(each if contiguous else each.contiguous()) for each in heads]
    assert all(each.is_contiguous() == contiguous for each in rows)
    return [rows[0][:18][attending], rows[1][:18], rows[2][:18]]
