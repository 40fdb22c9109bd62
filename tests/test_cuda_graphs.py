"""CUDA graphs equal the model's own code when replayed; what cannot be captured runs eagerly.

Here a stand-in on the CPU replays operations on their addresses; test_cuda.py has real graphs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.fake_backend import FakeBackend
from doubles.graph_recorder import FakeRecorder, Pool
from helpers import latent_zoo, model_zoo, tiny_hybrids
from helpers.examples import thinned
from helpers.fake_recorders import fake_recorders
from helpers.tiny import NUM_LAYERS, Engine, Tiny, make_tiny, prompt

from fastdecode import LLM, SamplingParams
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.engine.compose import build
from fastdecode.sworker.run import s_worker
from fastdecode.sworker.run.cuda_graphs import CudaGraphForward
from fastdecode.sworker.run.pipeline import MiniBatchForward
from fastdecode.sworker.run.staging import pack
from fastdecode.sworker.run.threads import SharedCores

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


def decodes(count: int, first: int = 0) -> list[Chunk]:
    """Return one token for each of ``count`` sequences, after five tokens each."""
    return [Chunk(first + i, 0, 5, (i % 90,)) for i in range(count)]


class GraphEngine(Engine):
    """An engine on the fake backend whose S-worker captures its graphs through the stand-in."""

    def captured(self, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, num_mini_batches: int = 1) -> FakeRecorder:
        recorder = FakeRecorder(NUM_LAYERS)
        monkeypatch.setattr(s_worker, "make_recorder", lambda device: recorder)
        self.worker.capture_graphs(num_mini_batches, max_num_seqs)
        return recorder

    def logits(self, *mini_batches: list[Chunk]) -> list[torch.Tensor]:
        """Return the logits of one step, which is then abandoned."""
        step = self.begin(*mini_batches)
        with torch.inference_mode():
            found = [each.clone() for each in self.worker.pipeline.run(self.worker.forwards(step))]
        self.backend.abandon_step()
        return found


@pytest.fixture
def engine(tiny: Tiny) -> GraphEngine:
    return GraphEngine(tiny, FakeBackend())


def prefilled(engine: GraphEngine, count: int) -> None:
    for i in range(count):
        engine.step([prompt(i, [(7 * i + j) % 96 for j in range(5)], 5)])


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [(1,), (16,), (17,), (3, 30), (40, 40), (33, 2, 16)], ids=str)
def test_replayed_logits_equal_the_models_own(
    engine: GraphEngine, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """Mini-batches of several row counts alternate at every layer, three steps in a row."""
    prefilled(engine, sum(counts))
    starts = [sum(counts[:i]) for i in range(len(counts))]
    mini_batches = [decodes(count, start) for count, start in zip(counts, starts, strict=True)]
    wanted = engine.logits(*mini_batches)
    recorder = engine.captured(monkeypatch, 64 * len(counts), len(counts))
    before = recorder.replays()
    for _ in range(3):
        assert_alike(engine.logits(*mini_batches), wanted)
    ran = [sum(now) - sum(was) for now, was in zip(recorder.replays(), before, strict=True)]
    assert sorted(ran, reverse=True)[: len(counts)] == [3 * (NUM_LAYERS + 1)] * len(counts)
    assert sum(ran) == 3 * (NUM_LAYERS + 1) * len(counts)


def test_the_smallest_count_that_fits_is_taken(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.captured(monkeypatch, 100)
    graphs, staging = engine.worker.graphs, engine.worker.staging
    assert graphs is not None and graphs.row_counts == [16, 32, 64, 128]
    for count, expected in ((1, 16), (16, 16), (17, 32), (65, 128), (128, 128), (129, None)):
        forward = graphs.forward(0, pack(MiniBatch.of(decodes(count)), torch.device("cpu")), staging)
        assert (forward and len(forward._captured.logits)) == expected


def test_prompts_run_the_models_own_code(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.captured(monkeypatch, 16)
    tokens = [7, 3, 50]

    def kinds(*chunks: Chunk) -> list[type]:
        step = ScheduledStep((MiniBatch.of(chunks),), ((),))
        return [type(forward) for forward in engine.worker.forwards(step)]

    assert kinds(*decodes(2)) == [CudaGraphForward]
    assert kinds(prompt(1, tokens, 3)) == [MiniBatchForward]
    assert kinds(*decodes(1), prompt(1, tokens, 3)) == [MiniBatchForward]
    assert kinds(*decodes(1), prompt(1, tokens, 2, attends=True)) == [MiniBatchForward]
    assert kinds(*decodes(17)) == [MiniBatchForward]


def test_padding_does_no_harm(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that earlier steps left in rows of padding change no bit of the others."""
    prefilled(engine, 16)
    engine.captured(monkeypatch, 16)
    (alone,) = engine.logits(decodes(3))
    engine.logits(decodes(16)[::-1])
    assert engine.worker.graphs is not None
    with torch.inference_mode():
        for rows in engine.worker.graphs._captured[0][16].attention:
            rows.o[3:] = 1e4
    (again,) = engine.logits(decodes(3))
    assert torch.equal(alone, again)


def test_mini_batches_need_pools_of_their_own(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pool for both, what A keeps between two graphs is lost to B, so the tests above can fail."""
    prefilled(engine, 4)
    mini_batches = decodes(2), decodes(2, first=2)
    wanted = engine.logits(*mini_batches)
    shared = Pool()
    monkeypatch.setattr(FakeRecorder, "pool", lambda self: shared)
    engine.captured(monkeypatch, 32, 2)
    assert engine.logits(*mini_batches)[0].isnan().any()
    assert_alike(engine.logits(mini_batches[0]), wanted[:1])


@pytest.mark.parametrize("reads_back", [True, False], ids=["reads back", "changes by itself"])
def test_a_model_that_cannot_be_captured_runs_eagerly(
    engine: GraphEngine, reads_back: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that reads a number from its rows fails the capture; one that bakes a number in fails the proof."""
    prefilled(engine, 2)
    wanted = engine.logits(decodes(2))
    calls: list[int] = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return output * bool(output[0, 0, 0].item() > -1e9) if reads_back else output * (1 + len(calls))

    with caplog.at_level(logging.WARNING):
        handle = engine.tiny.model.model.layers[1].register_forward_hook(hook)
        try:
            engine.captured(monkeypatch, 32, 2)
        finally:
            handle.remove()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    reason = "not permitted when stream is capturing" if reads_back else "give other logits than its own code"
    assert reason in caplog.text and "without CUDA graphs" in caplog.text
    assert engine.worker.graphs is not None and engine.worker.graphs.row_counts == []
    assert_alike(engine.logits(decodes(2)), wanted)


def test_an_abandoned_step_leaves_the_graphs_usable(engine: GraphEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled(engine, 4)
    mini_batches = decodes(2), decodes(2, first=2)
    wanted = engine.logits(*mini_batches)
    engine.captured(monkeypatch, 32, 2)
    step = engine.begin(*mini_batches)
    forwards = engine.worker.forwards(step)
    with torch.inference_mode():
        forwards[0].own_greenlet.switch()
    for forward in forwards:
        forward.own_greenlet.throw()
        assert forward.own_greenlet.dead
    engine.backend.abandon_step()
    assert_alike(engine.logits(*mini_batches), wanted)


def test_threads_are_watched_where_the_model_uses_them(engine: GraphEngine) -> None:
    assert isinstance(engine.worker.pipeline.cores, SharedCores)
    assert s_worker.make_recorder(torch.device("cpu")) is None


# Whole engines.


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[FakeRecorder]:
    """Return the list of stand-ins: every S-worker captures through one of its own."""
    return fake_recorders(monkeypatch)


def generate(name: str, folder: Path, count: int, **settings: Any) -> list[list[int]]:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory": "256MiB", "device": "cpu"}
    defaults |= {"s_threads": 1, "r_threads": 1}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in model_zoo.prompts(name)]
    with LLM(str(model_zoo.save_model(name, folder)), **{**defaults, **settings}) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", thinned(model_zoo.ARCHITECTURES, 3, 2))
def test_every_architecture_generates_the_same(
    name: str, recorders: list[FakeRecorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokens = generate(name, tmp_path, 10, num_mini_batches=2, max_num_seqs=24, r_workers="inproc:2")
    assert tokens == [list(each[:10]) for each in model_zoo.reference(name).tokens]
    (recorder,) = recorders
    if name in model_zoo.SPARSE:
        assert "without CUDA graphs" in caplog.text
    else:
        assert "without CUDA graphs" not in caplog.text
        assert len(recorder.replays()) == 2 and all(min(each) > 6 for each in recorder.replays())


def test_latent_rows_are_captured(
    recorders: list[FakeRecorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts attend with torch in chunks, as on a GPU."""
    monkeypatch.setattr(build, "PromptCache", lambda backend: None)
    model, texts = latent_zoo.build_model("minicpm3"), latent_zoo.prompts((130, 40, 3, 17))
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    settings = latent_zoo.SETTINGS | {"prefill_scratch": "16MiB", "max_num_batched_tokens": 64, "max_num_seqs": 16}
    with LLM(str(tmp_path), **settings, num_mini_batches=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert [model_zoo.disagreements(model, *pair) for pair in zip(texts, tokens, strict=True)] == [0] * 4
    assert len(recorders[0].replays()) == 2 and all(min(each) > 6 for each in recorders[0].replays())


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5", marks=pytest.mark.thorough)])
def test_recurrent_layers_are_captured(name: str, recorders: list[FakeRecorder], tmp_path: Path) -> None:
    """Rows for states leave a graph as queries, keys and values do."""
    texts = tiny_hybrids.random_prompts((70, 1, 30, 29))
    expected = tiny_hybrids.save_with_texts(tmp_path, name, texts, 10)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    settings = {"skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory": "64MiB", "device": "cpu"}
    with LLM(str(tmp_path), **settings, s_threads=1, r_threads=1, max_num_seqs=16, num_mini_batches=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert len(recorders[0].replays()) == 2 and all(min(each) > 6 for each in recorders[0].replays())


def test_enforce_eager_captures_nothing(recorders: list[FakeRecorder], tmp_path: Path) -> None:
    tokens = generate("llama-gqa", tmp_path, 8, enforce_eager=True)
    assert recorders == []
    assert tokens == [list(each[:8]) for each in model_zoo.reference("llama-gqa").tokens]
