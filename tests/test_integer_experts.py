"""All experts' products in one call have the bits of each expert's product alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_zoo
from helpers.integer_oracle import product, weights_of

from fastdecode import _sworker
from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel
from fastdecode.sworker.model import packing
from fastdecode.sworker.model.packed_weight import FileMaps, Sample
from fastdecode.sworker.products import experts, kernels
from fastdecode.sworker.products.codes import IntegerCodes
from fastdecode.sworker.products.kernels import array

ISAS = _sworker.integer_isas()
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("instructions", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "kind"), [((0, 1, 0, 13, 26, 5), "silu"), ((3, 0, 0, 1, 1, 1), "none"), ((0,), "none")]
)
def test_experts_in_one_call_are_each_expert_alone(
    counts: tuple[int, ...], kind: str, dtype: torch.dtype, instructions: str
) -> None:
    """Also the sums of ranks: rows are quantized by given peaks, added up, and scaled."""
    torch.manual_seed(len(counts))
    kernels.use_openmp()
    x = torch.randn(sum(counts), 320 if kind == "silu" else 160).to(dtype)
    weights = [weights_of(torch.randn(70, 160), None, 160) for _ in counts]
    ends = torch.tensor(counts).cumsum(0)
    parts = [product(own, each, 70, instructions, 1, kind) for own, each in zip(weights, x.split(counts), strict=True)]
    experts, wanted = _sworker.IntegerExperts(weights), torch.cat(parts)
    for threads in (1, 2):
        found, peaks = torch.empty_like(wanted), torch.empty(len(x))
        experts.multiply(array(x), ends.numpy(), array(found), kind, instructions, threads)
        assert torch.equal(found, wanted)
        sums, again = torch.empty(wanted.shape, dtype=torch.int32), torch.empty_like(wanted)
        experts.find_peaks(array(x), peaks.numpy(), kind, instructions, threads)
        experts.add_up(array(x), ends.numpy(), peaks.numpy(), sums.numpy(), kind, instructions, threads)
        experts.scale(sums.numpy(), ends.numpy(), peaks.numpy(), array(again), instructions, threads)
        assert torch.equal(again, wanted)


def test_ends_of_experts_that_do_not_fit_are_refused() -> None:
    experts = _sworker.IntegerExperts([weights_of(torch.randn(8, 16), None, 16) for _ in range(3)])
    x, out = torch.randn(5, 16), torch.empty(5, 8)
    for ends in ([5, 5], [2, 1, 5], [0, 3, 4], [0, 3, 6], [-1, 3, 5]):
        with pytest.raises(ValueError, match="ends"):
            experts.multiply(array(x), torch.tensor(ends).numpy(), array(out), "none", "scalar", 1)
    with pytest.raises(ValueError, match="one shape"):
        _sworker.IntegerExperts([weights_of(torch.randn(8, 16), None, 16), weights_of(torch.randn(9, 16), None, 16)])
    with pytest.raises(ValueError, match="empty"):
        _sworker.IntegerExperts([])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_quantized_as_they_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer's experts are joined in the model's dtype; codes and digests are those of joined ones."""
    config = EngineConfig(
        str(model_zoo.save_model(name, tmp_path / name)), quantization="int8", device="cpu", skip_tokenizer_init=True
    )
    joined: list[torch.Size] = []
    stack = torch.stack

    def counted(tensors: Any, *more: Any, **named: Any) -> torch.Tensor:
        found = stack(tensors, *more, **named)
        joined.extend([found.shape] if found.ndim == 3 else [])
        return found

    monkeypatch.setattr(torch, "stack", counted)
    each = SModel(config)
    assert not joined
    monkeypatch.setattr(packing, "_experts_arguments", lambda *_: {})
    whole = SModel(config)
    assert len(joined) == 3 * model_zoo.RECIPES[name].settings["num_hidden_layers"]
    assert each.identity == whole.identity
    found, wanted = (
        {key: value + 0 for key, value in model.model.named_parameters() if "experts" in key} for model in (each, whole)
    )
    assert found.keys() == wanted.keys() and len(found) >= 4
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_pages_of_joined_experts_are_given_back_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss stores all experts of a layer in one tensor. Its pages are freed expert by expert.
    Transposed experts of one tensor are turned in the same memory.
    """
    given: list[torch.Size] = []
    let_go, quantized, turned = FileMaps.let_go, experts.quantized, list[int]()

    def watched(weight: torch.Tensor, block: int) -> IntegerCodes:
        assert weight.is_contiguous()
        turned.append(weight.data_ptr())
        return quantized(weight, block)

    def noted(maps: FileMaps, tensor: torch.Tensor) -> bool:
        given.append(tensor.shape)
        return let_go(maps, tensor)

    monkeypatch.setattr(FileMaps, "let_go", noted)
    monkeypatch.setattr(experts, "quantized", watched)
    folder = model_zoo.save_model("gpt_oss", tmp_path / "gpt_oss")
    model = SModel(EngineConfig(str(folder), quantization="int8", device="cpu", skip_tokenizer_init=True))
    whole = [each.shape for name, each in model.model.named_parameters() if name.endswith("gate_up_proj")]
    assert len(whole) == 4 and given.count(whole[0][1:]) == 4 * whole[0][0]
    count = whole[0][0]
    assert len(turned) == 2 * 4 * count
    assert all(len(set(turned[first : first + count])) == 1 for first in range(0, len(turned), count))


def test_a_sample_of_parts_is_that_of_the_whole() -> None:
    for shape in ((7, 10, 11), (3, 5), (2, 64, 64), (64, 1), (129, 1)):
        whole = torch.randn(shape)
        sample = Sample(whole.numel())
        assert torch.equal(torch.cat([sample.of(part) for part in whole]), Sample(whole.numel()).of(whole)), shape


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.slow
def test_codes_of_packed_experts_are_given_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's codes and packed weights are never all in memory at once, even if glibc keeps freed memory."""
    torch.empty(1 << 24, dtype=torch.int8)  # after this, glibc takes smaller tensors from its heap
    codes = [IntegerCodes(torch.ones(2048, 1024, dtype=torch.int8), torch.ones(2048), 1024) for _ in range(64)]
    resident = [resident_bytes()]
    make = _sworker.IntegerWeights

    def watched(*args: Any) -> Any:
        made = make(*args)
        resident.append(resident_bytes())
        return made

    monkeypatch.setattr(_sworker, "IntegerWeights", watched)
    packed = experts._packed(codes)
    assert len(packed) == 64 and len(resident) == 65
    assert max(resident) - resident[0] < 3 << 25  # all codes have 4 << 25 bytes


def resident_bytes() -> int:
    """Return the resident memory of this process without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
