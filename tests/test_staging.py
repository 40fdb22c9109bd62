"""Staging: the same bits cross on every path, nothing is read early, and the thread never waits for the GPU.

The CUDA hand-off runs here on CPU tensors over a stand-in for ``torch.cuda`` whose copies happen late.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.fake_backend import FakeBackend
from doubles.fake_gpu import FakeGpu, staging_of
from doubles.recorder import Bits, Recorder
from helpers import latent_zoo, model_zoo, tiny_hybrids
from helpers.tiny import (
    NUM_LAYERS,
    Engine,
    Tiny,
    check_a_failing_layer,
    check_prompts_in_chunks_and_decodes,
    make_tiny,
    prompt,
    qkv,
)

from fastdecode import LLM, SamplingParams
from fastdecode.core.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.sworker.run import cuda_staging, s_worker
from fastdecode.sworker.run.cuda_staging import CudaStaging
from fastdecode.sworker.run.pipeline import MiniBatchForward, Pipeline
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.staging import HostStaging, pack, to_numpy


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


@pytest.mark.parametrize("attending", [slice(0, 18), slice(0, 5), slice(0, 0), torch.tensor([0, 3, 17])], ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_cross(dtype: torch.dtype, contiguous: bool, attending: slice | torch.Tensor) -> None:
    """Rows cross through either staging, with late copies, to the backend and back."""
    rows = qkv(dtype, contiguous, attending)
    expected = [to_numpy(each.clone(memory_format=torch.contiguous_format)) for each in rows]
    host, cuda = Bits(), Bits()
    for backend, staging in ((host, HostStaging(host)), (cuda, staging_of(FakeGpu(default_polls=2), cuda))):
        staging.send(0, 0, *rows)
        assert staging.next_ready([0]) == 0
        o = torch.as_tensor(staging.collect(0)).view(dtype)
        assert torch.equal(o, rows[0])
        for found, wanted in zip(backend.submitted[0], expected, strict=True):
            assert found.dtype == wanted.dtype == (np.float32 if dtype == torch.float32 else np.uint16)
            assert found.flags.c_contiguous and np.array_equal(found, wanted)
    if contiguous:
        assert np.shares_memory(host.submitted[0][1], to_numpy(rows[1]))


def test_nothing_is_submitted_before_it_is_there() -> None:
    gpu, backend = FakeGpu(default_polls=3), Bits()
    staging = staging_of(gpu, backend)
    staging.send(0, 0, *qkv(torch.float32, True, slice(0, 18)))
    assert gpu.log == ["down waits for compute", "copy down"]
    transfer = staging._transfers[0]
    assert [transfer.poll() for _ in range(3)] == [False] * 3 and backend.log == []
    assert transfer.poll() and backend.log == ["A0"]
    staging.collect(0)
    assert gpu.log[2:] == ["copy up", "compute waits for up"]
    assert gpu.synchronised == 0


def test_the_next_send_hands_over_what_came_down_meanwhile() -> None:
    backend = Bits()
    staging = staging_of(FakeGpu(), backend)
    rows = qkv(torch.float32, True, slice(0, 18))
    staging.send(0, 0, *rows)
    assert backend.log == []
    staging.send(1, 0, *rows)
    assert backend.log == ["A0"]


def test_an_abandoned_step_submits_nothing_later() -> None:
    backend = Bits()
    staging = staging_of(FakeGpu(), backend)
    rows = qkv(torch.float32, True, slice(0, 18))
    staging.send(0, 0, *rows)
    staging.begin_step()
    staging.send(1, 0, *rows)
    assert staging.next_ready([1]) == 1 and backend.log == ["B0"]


def test_buffers_stay_where_they_are_while_rows_fit() -> None:
    gpu = FakeGpu()
    staging = staging_of(gpu, Bits())
    q, k, v = qkv(torch.float32, True, slice(0, 18))
    addresses = []
    for count in (9, 9, 4, 9, 18):
        staging.send(0, 0, q[:count], k[:count], v[:count])
        staging.next_ready([0])
        addresses.append(staging.collect(0).data_ptr())
    assert len(set(addresses[:4])) == 1
    sizes = [(kind, count) for count in (576, 1152) for kind, count in (("qkv", count), ("o", count // 2))]
    assert gpu.allocated == [(place, count) for _, count in sizes for place in ("device", "pinned")]


def test_an_o_in_pinned_memory_is_not_copied_on_the_host() -> None:
    gpu = FakeGpu(pins_everything=True)
    staging = staging_of(gpu, Bits())
    staging.send(0, 0, *qkv(torch.float32, True, slice(0, 18)))
    staging.next_ready([0])
    assert torch.isfinite(staging.collect(0)).all()
    assert [kind for kind, _ in gpu.allocated].count("pinned") == 1


def test_an_idle_worker_spins_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cuda_staging.time, "sleep", slept.append)
    staging = staging_of(FakeGpu(polls=deque([cuda_staging.SPIN_POLLS + 5])), Bits())
    staging.send(0, 0, *qkv(torch.float32, True, slice(0, 18)))
    staging.next_ready([0])
    assert slept == [cuda_staging.SLEEP_SECONDS] * 5


# Through the pipeline.


def run_order(tiny: Tiny, backend: Recorder, gpu: FakeGpu, num_mini_batches: int) -> str:
    staging, scratch = staging_of(gpu, backend), PromptScratch(tiny.layout)
    packed = [pack(MiniBatch.of([Chunk(i, 0, 5, (i + 1,))]), torch.device("cpu")) for i in range(num_mini_batches)]
    forwards = [MiniBatchForward(i, rows, tiny.code, backend, scratch, staging) for i, rows in enumerate(packed)]
    with torch.inference_mode():
        Pipeline(backend, StateClock(), staging).run(forwards)
    return " ".join(backend.log)


def test_mini_batches_take_turns(tiny: Tiny) -> None:
    for late in (0, 1, 4):
        assert run_order(tiny, Recorder(), FakeGpu(default_polls=late), 2) == "A0 B0 A1 B1 A2 B2"
    assert run_order(tiny, Recorder(), FakeGpu(), 3) == "A0 B0 C0 A1 B1 C1 A2 B2 C2"
    assert run_order(tiny, Recorder(), FakeGpu(), 1) == "A0 A1 A2"


def test_who_is_ready_goes_first(tiny: Tiny) -> None:
    """A's first rows are seen to be down only after B's, and then A's results come late."""
    assert run_order(tiny, Recorder(), FakeGpu(polls=deque([20])), 2) == "B0 A0 B1 A1 B2 A2"
    assert run_order(tiny, Recorder(polls={0: 30}), FakeGpu(), 2) == "A0 B0 B1 B2 A1 A2"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let every new S-worker hand over through one stand-in, whose copies down are two polls late."""
    gpu = FakeGpu(default_polls=2)

    def make(backend: Any, device: torch.device) -> CudaStaging:
        gpu.names = deque(["down", "up"])
        return staging_of(gpu, backend)

    monkeypatch.setattr(s_worker, "make_staging", make)
    return gpu


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3])
def test_prompts_in_chunks_and_decodes_equal_the_plain_model(tiny: Tiny, gpu: FakeGpu, num_mini_batches: int) -> None:
    check_prompts_in_chunks_and_decodes(tiny, num_mini_batches)
    assert gpu.log.count("copy up") == gpu.log.count("copy down") > 0


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_failing_layer_leaves_nothing_behind(tiny: Tiny, gpu: FakeGpu, failing_call: int) -> None:
    check_a_failing_layer(tiny, failing_call)


@pytest.mark.parametrize(("scale", "clamped"), [(1e-6, False), (1e6, True)], ids=["idle GPU", "more than the wall"])
def test_model_time_is_the_compute_streams(tiny: Tiny, gpu: FakeGpu, scale: float, clamped: bool) -> None:
    """The stand-in's clock ticks once per recorded event; a step has one wait, and its states fill the wall time."""
    gpu.scale = scale
    engine = Engine(tiny, FakeBackend())
    for step in range(2):
        engine.worker.clock.restart()
        since = engine.worker.clock.since
        engine.step([prompt(2 * step, [5, 6], 2)], [prompt(2 * step + 1, [7], 1)])
        seconds = engine.worker.clock.snapshot()
        assert gpu.synchronised == step + 1
        assert sum(seconds.values()) == pytest.approx(engine.worker.clock.since - since, abs=1e-6)
        segments = 2 * (NUM_LAYERS + 1) + 1
        events_within = 2 * 2 * NUM_LAYERS + segments  # Each mini-batch sends rows in all segments but the last.
        if clamped:
            assert seconds[WAIT] == 0 and seconds[MODEL] > 0
        else:
            assert seconds[MODEL] == pytest.approx(events_within * 1e-3 * scale)
            assert seconds[WAIT] > seconds[MODEL]
    assert engine.worker.clock.state == HOST


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-gqa", "bfloat16"),
        pytest.param("llama-gqa", "float32", marks=pytest.mark.thorough),
        ("youtu", "float32"),
        ("qwen3_next", "float32"),
        pytest.param("lfm2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_an_engine_generates_the_same(
    name: str, dtype: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values, latent rows, and rows for states all give the same tokens."""
    folder, texts = str(tmp_path), model_zoo.prompts("llama-gqa")[1:5]
    builds = {"youtu": latent_zoo.build_model, "llama-gqa": model_zoo.build_model}
    builds.get(name, tiny_hybrids.built)(name).save_pretrained(tmp_path)
    prompts: list[Any] = [{"prompt_token_ids": [token % 128 for token in prompt[:200]]} for prompt in texts]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def generate(num_mini_batches: int) -> list[list[int]]:
        settings = {"skip_tokenizer_init": True, "dtype": dtype, "kv_cache_memory": "64MiB", "max_model_len": 256}
        with LLM(folder, s_threads=1, num_mini_batches=num_mini_batches, **settings) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    late = [generate(1), generate(2)]
    assert gpu.log
    monkeypatch.setattr(s_worker, "make_staging", lambda backend, device: HostStaging(backend))
    assert late == [generate(1), generate(2)]
