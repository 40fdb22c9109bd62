"""The S-worker on a real GPU; these tests are skipped without one.

test_staging.py tests the logic alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.recorder import Bits
from helpers import model_zoo
from helpers.engine_checks import assert_nothing_held
from helpers.tiny import qkv
from transformers.models.llama.modeling_llama import LlamaMLP

from fastdecode import LLM, SamplingParams
from fastdecode.api import config as config_module
from fastdecode.api.config import EngineConfig
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.core.errors import ConfigError
from fastdecode.core.metrics import StepRecord
from fastdecode.sworker.model.loader import resolve_device
from fastdecode.sworker.run.cuda_staging import CudaDevice, CudaStaging, Phase
from fastdecode.sworker.run.staging import to_numpy

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU that it can use")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def llm_on_gpu(name: str, folder: Path, **settings: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "max_model_len": 512, "kv_cache_memory": "256MiB", "device": "cuda"}
    return LLM(str(model_zoo.save_model(name, folder)), **{**defaults, **settings})


def generate(llm: LLM, name: str) -> list[list[int]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in model_zoo.prompts(name)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def check_nothing_left(llm: LLM) -> None:
    s_worker = llm.engine.world.s_worker
    assert s_worker.device.type == "cuda" and isinstance(s_worker.staging, CudaStaging)
    assert all(transfer.phase is Phase.IDLE for transfer in s_worker.staging._transfers.values())
    assert s_worker.prompts.sequence_ids == ()
    assert isinstance(llm.engine.backend, InprocBackend)
    assert_nothing_held(llm.engine)


@needs_gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
@pytest.mark.parametrize("name", model_zoo.ARCHITECTURES)
def test_greedy_float32_equals_the_cpu(name: str, num_mini_batches: int, enforce_eager: bool, tmp_path: Path) -> None:
    expected = [list(tokens[: GREEDY.max_tokens]) for tokens in model_zoo.reference(name).tokens]
    with llm_on_gpu(
        name, tmp_path, num_mini_batches=num_mini_batches, enforce_eager=enforce_eager, max_num_seqs=16
    ) as llm:
        assert generate(llm, name) == expected
        check_nothing_left(llm)
        graphs = llm.engine.world.s_worker.graphs
        assert (graphs is None) == enforce_eager
        assert graphs is None or graphs.row_counts == [16] or name in model_zoo.SPARSE
        assert llm.engine.world.s_worker.pipeline.cores is None


@needs_gpu
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_graphs_of_every_row_count_give_what_eager_code_gives(num_mini_batches: int, tmp_path: Path) -> None:
    """80 sequences end one after the other, so every graph of up to 128 (or 64) rows is used."""
    prompts: list[Any] = [{"prompt_token_ids": [i, i + 1, 2 * i]} for i in range(80)]
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True, detokenize=False) for i in range(80)]

    def tokens(**settings: Any) -> list[list[int]]:
        with llm_on_gpu("llama-gqa", tmp_path, num_mini_batches=num_mini_batches, max_num_seqs=80, **settings) as llm:
            graphs = llm.engine.world.s_worker.graphs
            assert graphs is None or graphs.row_counts == [16, 32, 64, 128][: 4 - num_mini_batches + 1]
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    assert tokens() == tokens(enforce_eager=True)


@needs_gpu
def test_a_model_that_reads_back_runs_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails in the middle leaves the GPU usable."""
    expected = [list(tokens[: GREEDY.max_tokens]) for tokens in model_zoo.reference("llama-gqa").tokens]
    forward = LlamaMLP.forward

    def reading_back(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * float(x[0, 0, 0].item() < 1e9)

    monkeypatch.setattr(LlamaMLP, "forward", reading_back)
    with llm_on_gpu("llama-gqa", tmp_path, num_mini_batches=2) as llm:
        graphs = llm.engine.world.s_worker.graphs
        assert graphs is not None and graphs.row_counts == []
        assert generate(llm, "llama-gqa") == expected


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str, tmp_path: Path) -> None:
    with llm_on_gpu("llama-gqa", tmp_path, dtype=dtype, num_mini_batches=2) as llm:
        tokens = generate(llm, "llama-gqa")
        check_nothing_left(llm)
    assert {len(each) for each in tokens} == {GREEDY.max_tokens}
    assert all(0 <= token < model_zoo.VOCABULARY for each in tokens for token in each)


@needs_gpu
def test_the_lanes_never_wait_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises if an operation between the first layer and the last synchronises."""
    with llm_on_gpu("llama-gqa", tmp_path, num_mini_batches=2) as llm:
        generate(llm, "llama-gqa")  # The set-up before the first step may wait.
        run = llm.engine.world.s_worker.pipeline.run

        def watched(*args: Any) -> list[torch.Tensor]:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(llm.engine.world.s_worker.pipeline, "run", watched)
        generate(llm, "llama-gqa")


@needs_gpu
def test_the_states_fill_the_wall(tmp_path: Path) -> None:
    steps: list[StepRecord] = []
    with llm_on_gpu("llama-gqa", tmp_path, num_mini_batches=2) as llm:
        llm.engine.on_step = steps.append
        generate(llm, "llama-gqa")
    for step in steps:
        assert step.s_seconds > 0 and step.wait_seconds >= 0
        assert step.wall_seconds == pytest.approx(step.s_seconds + step.wait_seconds + step.host_seconds)


@needs_gpu
@pytest.mark.parametrize("attending", [slice(0, 18), slice(0, 0), [0, 3, 17]], ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_cross(dtype: torch.dtype, contiguous: bool, attending: slice | list[int]) -> None:
    rows = qkv(dtype, contiguous, attending if isinstance(attending, slice) else torch.tensor(attending))
    backend, gpu = Bits(), torch.device("cuda", torch.cuda.current_device())
    staging = CudaStaging(backend, CudaDevice(gpu))
    for layer in range(20):
        staging.send(0, layer, *(each.to(gpu) + layer for each in rows))
        assert staging.next_ready([0]) == 0
        for found, each in zip(backend.submitted[-1], rows, strict=True):
            assert np.array_equal(found, to_numpy(each + layer))
        assert torch.equal(staging.collect(0).cpu(), rows[0] + layer)


@needs_none
def test_cuda_without_a_gpu_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver the error comes before anything is loaded, and without a usable GPU while loading."""
    monkeypatch.setattr(config_module, "_has_gpu_driver", lambda: False)
    with pytest.raises(ConfigError, match=r"^device: 'cuda' needs a GPU, .* use 'auto' or 'cpu'$"):
        EngineConfig(device="cuda")
    monkeypatch.setattr(config_module, "_has_gpu_driver", lambda: True)
    with pytest.raises(ConfigError, match=r"^device: 'cuda' was asked for, and torch .* finds no GPU"):
        LLM(device="cuda", kv_cache_memory="64MiB")
    assert EngineConfig(device="cuda").device == "cuda"


@pytest.mark.parametrize(
    ("name", "available", "kind"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu")]
)
def test_auto_is_a_gpu_where_there_is_one(
    name: str, available: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_available: Callable[[], bool] = lambda: available  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert resolve_device(name).type == kind
