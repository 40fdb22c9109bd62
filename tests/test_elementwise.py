"""Rows keep their bits among any number of other rows: elementwise functions, and all that models send to R-workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_hybrids import built, random_prompts

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel
from fastdecode.sworker.adapters.elementwise import aligned_count, use_aligned_functions
from fastdecode.sworker.model.support import repeats_rows
from fastdecode.sworker.run.pipeline import ModelGreenlet

COUNTS = (1, 2, 3, 5, 7, 11, 16, 17, 18, 19, 23, 33)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    (f"{owner.__name__}.{name}", lambda rows, owner=owner, name=name: getattr(owner, name)(rows))  # type: ignore[misc]
    for owner, names in ((F, "elu gelu mish silu softplus"), (torch, "rsqrt sigmoid"), (torch.Tensor, "rsqrt sigmoid"))
    for name in names.split()
]
CALLS += [
    ("gelu of tanh", lambda rows: F.gelu(rows, approximate="tanh")),
    ("a method", lambda rows: rows.sigmoid()),
    ("a module", torch.nn.SiLU()),
    ("softplus with arguments", lambda rows: F.softplus(rows, 2.0, threshold=10.0)),
]


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let torch use this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def in_forward(call: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the result of ``call``, called as a model's forward would."""
    found: torch.Tensor = ModelGreenlet(lambda: call(rows), lambda *_: torch.empty(0)).switch()
    return found


@pytest.mark.parametrize("call", [each for _, each in CALLS], ids=[name for name, _ in CALLS])
def test_an_element_has_the_same_bits_at_any_place(call: Callable[..., torch.Tensor], num_threads: int) -> None:
    use_aligned_functions()
    for dtype in DTYPES:
        for width, num_rows in ((1, 99), (4, 40), (8, 40), (24, 40), (1000, 40)):
            rows = (3 * torch.randn(1, num_rows, width, generator=torch.Generator().manual_seed(0))).to(dtype)
            rows = rows.abs() if "rsqrt" in repr(call) else rows
            many = in_forward(call, rows).nan_to_num(7.0)
            assert many.dtype is dtype and many.shape == rows.shape
            for count in COUNTS:
                for start in (0, 1):
                    few = in_forward(call, rows[:, start : start + count].clone()).nan_to_num(7.0)
                    assert torch.equal(few, many[:, start : start + count])
            wide = torch.cat([rows, rows], -1)[..., :width]  # a view with gaps
            assert torch.equal(in_forward(call, wide).nan_to_num(7.0), many)


def test_other_callers_get_torchs_own_functions() -> None:
    """Torch's sigmoid rounds some last elements otherwise than vectors of elements, which this test relies on."""
    use_aligned_functions()
    rows = 3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([torch.sigmoid(each) for each in rows.split(1)]).flatten()
    assert torch.equal(torch.sigmoid(rows)[:960], in_forward(torch.sigmoid, rows)[:960])
    ours = torch.cat([in_forward(torch.sigmoid, each) for each in rows.split(1)])
    assert torch.equal(ours, in_forward(torch.sigmoid, rows)) and not torch.equal(ours, alone)


@pytest.mark.parametrize("count", [1, 63, 64, 1000, 16_385, 32_768, 32_769, 98_303, 11_008 * 17])
def test_every_share_is_whole_vectors(count: int) -> None:
    for num_threads in range(1, 17):
        padded = aligned_count(count, num_threads)
        assert count <= padded <= count + 64 * 16 * 15 * 2
        if padded > 1 << 14:
            for shares in (num_threads, min(num_threads, -(-padded // 32_768))):
                assert padded % (64 * shares) == 0


MODELS = (
    "falcon_h1", "qwen3_next", "lfm2", "jamba", "kimi_linear", "nemotron_h", "minimax", "recurrent_gemma", "zamba2",
    "granitemoehybrid", "qwen2_moe",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "quantization"),
    [
        pytest.param(name, quantization, marks=[pytest.mark.thorough] * ((number % 2 == 0) == (quantization is None)))
        for number, name in enumerate(MODELS)
        for quantization in (None, "int8")
    ],
)
def test_what_models_send_does_not_depend_on_other_rows(
    model_type: str, quantization: str | None, tmp_path: Path
) -> None:
    """Models of each kind of recurrence, and one with a gate of one element per row."""
    built(model_type).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    model = SModel(EngineConfig(str(tmp_path), quantization=quantization, **settings))
    counts = [count for count in COUNTS if count >= model.code.least_rows]
    assert repeats_rows(model.code, model._hf_config, counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "state_dtype", "quantization"),
    [
        pytest.param("falcon_h1", "bfloat16", "int8", marks=pytest.mark.thorough),
        ("qwen3_next", "bfloat16", "int8"),
        pytest.param("jamba", "float16", "int8", marks=pytest.mark.thorough),
        ("recurrent_gemma", "bfloat16", "int8"),
        ("falcon_h1", "float16", None),
        pytest.param("kimi_linear", "bfloat16", "int8", marks=pytest.mark.thorough),
        pytest.param("zamba2", "bfloat16", "int8", marks=pytest.mark.thorough),
        pytest.param("minimax", "bfloat16", None, marks=pytest.mark.thorough),
    ],
)
def test_states_of_16_bits_do_not_depend_on_mini_batches_or_chunks(
    model_type: str, state_dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    """Every log probability has the same bits however sequences are dealt to mini-batches, steps and chunks."""
    built(model_type).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    settings |= {"s_threads": 1, "r_threads": 1, "kv_cache_memory": "16MiB", "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [{"prompt_token_ids": each} for each in random_prompts((70, 1, 30, 29))]
    found = []
    for more in (
        {"num_mini_batches": 1},
        {"num_mini_batches": 2},
        {"num_mini_batches": 3, "max_num_seqs": 3, "max_num_batched_tokens": 7},
    ):
        with LLM(str(tmp_path), **settings, mamba_ssm_cache_dtype=state_dtype, **more) as llm:
            outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
        found.append([[[(key, p.logprob) for key, p in at.items()] for at in each.logprobs or []] for each in outputs])
    assert len(found[0][0]) == 16 and found[1] == found[0] and found[2] == found[0]
