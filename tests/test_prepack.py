"""Packed linear layers give what torch's own give, in any batch, and keep no weight twice."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import model_zoo
from safetensors.torch import load_file, save_file

from fastdecode.api.config import EngineConfig
from fastdecode.sworker.model import prepack
from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight
from fastdecode.sworker.model.prepack import PackedLinears, equal_within_rounding
from fastdecode.sworker.model.smodel import SModel
from fastdecode.sworker.run.staging import MIN_ROWS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Attention(torch.nn.Module):
    """Three layers that read the same rows."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(96, width, bias) for width in (64, 32, 16))

    def forward(self, rows: torch.Tensor, others: torch.Tensor | None = None) -> list[torch.Tensor]:
        return [self.q_proj(rows), self.k_proj(rows if others is None else others), self.v_proj(rows)]


def pack(model: torch.nn.Module) -> PackedLinears:
    return PackedLinears(model.requires_grad_(False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 129, 300])
def test_packed_product_matches(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    """The product agrees with one in float64."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 72, bias=bias).to(dtype)
    weight, offset = linear.weight.detach().double(), linear.bias.detach().double() if bias else None
    assert pack(torch.nn.Sequential(linear)).num_layers == 1
    rows = torch.randn(1, num_rows, 96).to(dtype)
    exact = F.linear(rows.double(), weight, offset)
    product = linear(rows)
    assert product.dtype == dtype and product.shape == exact.shape
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(product.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_shared_product_matches(dtype: torch.dtype, bias: bool) -> None:
    """One layer is also called with other rows, and again with the same."""
    torch.manual_seed(0)
    model, plain = Attention(bias).to(dtype), Attention(bias).to(dtype)
    plain.load_state_dict(model.state_dict())
    assert pack(model).num_shared == 3
    rows, others = torch.randn(2, 1, 20, 96).to(dtype)
    for arguments in ((rows,), (rows,), (rows, others), (others, rows)):
        for found, wanted in zip(model(*arguments), plain(*arguments), strict=True):
            assert equal_within_rounding(found, wanted)


def test_a_shared_product_keeps_no_rows() -> None:
    model = Attention()
    pack(model)
    rows = torch.randn(1, 20, 96)
    watched = weakref.ref(rows)
    model(rows)
    del rows
    assert watched() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 192), (2816, 256)])
def test_a_row_gets_the_same_bits_in_any_company(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """The bits depend neither on the number of rows, nor on the row's place, nor on the number of threads."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs).to(dtype)
    pack(torch.nn.Sequential(linear))
    rows = torch.randn(1, 700, inputs).to(dtype)
    threads = torch.get_num_threads()
    try:
        alone = linear(rows[:, 40 : 40 + MIN_ROWS])
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            for start, stop in ((0, 56), (40, 104), (39, 170), (0, 256), (0, 700)):
                found = linear(rows[:, start:stop])[:, 40 - start :][:, :MIN_ROWS]
                assert torch.equal(found, alone), (torch_threads, start, stop)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_let_go_and_read_back(dtype: torch.dtype) -> None:
    """Packed weights hold no memory and count as parameters; ``state_dict`` and ``undo`` give the same bits."""
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(96, 40)).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counted = sum(parameter.numel() for parameter in model.parameters())
    watched = [weakref.ref(parameter) for name, parameter in model.named_parameters() if name.endswith("weight")]
    packed = pack(model)
    assert [reference() for reference in watched] == [None] * 4
    assert sum(parameter.numel() for parameter in model.parameters()) == counted

    def check() -> None:
        state = model.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())

    check()
    packed.undo()
    assert not any(isinstance(parameter, PackedWeight) for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    check()


def test_packing_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a packed weight meanwhile would take its memory twice."""
    monkeypatch.setattr(prepack.SharedProduct, "weight", lambda self, index: pytest.fail("unpacked"))
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(96, 40))
    assert pack(model).num_layers == 4
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    model[0](torch.randn(1, 20, 96))


def test_a_tied_weight_is_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 96), torch.nn.Linear(96, 50, bias=False))
    model[1].weight = model[0].weight
    assert pack(model).num_layers == 1
    assert model[1].weight is model[0].weight and not isinstance(model[0].weight, PackedWeight)


def test_only_plain_linears_are_packed() -> None:
    """Subclasses may compute something else, so they are not packed."""

    class Scaled(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled(8, 8), torch.nn.LayerNorm(8))
    assert pack(model).num_layers == 1
    assert "forward" not in vars(model[1])


def test_a_product_that_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prepack.SharedProduct._compute
    monkeypatch.setattr(prepack.SharedProduct, "_compute", lambda self, rows: right(self, rows) * 1.001)
    model = torch.nn.Sequential(torch.nn.Linear(96, 72))
    assert pack(model).num_layers == 0
    assert "forward" not in vars(model[0]) and not isinstance(model[0].weight, PackedWeight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_code_that_reads_a_weight_gets_it(dtype: torch.dtype) -> None:
    """A packed weight may be an argument of any operation or method, and describes itself as the plain one."""
    linear = torch.nn.Linear(96, 72).to(dtype)
    plain = linear.weight.detach().clone()
    pack(torch.nn.Sequential(linear))
    weight, rows = linear.weight, torch.randn(4, 96).to(dtype)
    assert isinstance(weight, PackedWeight) and isinstance(weight, torch.nn.Parameter)
    facts = [(each.shape, each.dtype, each.device, each.is_meta, each.numel(), len(each)) for each in (weight, plain)]
    assert facts[0] == facts[1]
    for use in (
        lambda each: F.linear(rows, each),
        lambda each: rows @ each.T,
        lambda each: torch.cat([each, each]),
        lambda each: each[3:5] + 1,
        lambda each: each.data,
        lambda each: each.detach(),
        lambda each: each.float().norm(),
        lambda each: copy.deepcopy(each),
    ):
        assert torch.equal(use(weight), use(plain))


def test_a_model_that_needs_parts_in_one_piece_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs again without packing if it fails over packed layers."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.gate_proj.weight, PackedWeight):
            raise RuntimeError("needs the plain weight")
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result

    def packed_weights() -> int:
        model = SModel(EngineConfig(model=folder, skip_tokenizer_init=True)).model
        return sum(isinstance(parameter, PackedWeight) for parameter in model.parameters())

    folder = str(model_zoo.save_model("llama-gqa", tmp_path))
    assert packed_weights() == 3 * 7 + 1
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert packed_weights() == 0


def test_pages_of_a_checkpoint_are_given_back(tmp_path: Path) -> None:
    """Only pages of a file are given back, and the file itself is unchanged."""
    file = tmp_path / "weights.safetensors"
    values = torch.randn(64 * mmap.PAGESIZE)
    save_file({"weight": values}, file)
    mapped, ours = load_file(file)["weight"], values.clone()
    maps = FileMaps()
    assert not maps.let_go(ours) and torch.equal(ours, values)
    maps.let_go(mapped)
    assert torch.equal(load_file(file)["weight"], values)


def test_pages_that_were_written_stay(tmp_path: Path) -> None:
    """A tensor that will be read again is given back only if its file still has all of it."""
    file = tmp_path / "weights.safetensors"
    values = torch.randn(64 * mmap.PAGESIZE)
    save_file({"weight": values}, file)
    mapped = load_file(file)["weight"]
    assert FileMaps(unwritten=True).let_go(mapped) and torch.equal(mapped, values)
    mapped[5000] = 7.0
    assert not FileMaps(unwritten=True).let_go(mapped) and mapped[5000] == 7.0


@contextmanager
def ring() -> Iterator[torch.Tensor]:
    """Map a ring of io_uring, as torch.distributed's store does: the kernel maps its pages once."""
    libc = ctypes.CDLL(None, use_errno=True)
    io_uring_setup = 425
    descriptor = libc.syscall(io_uring_setup, 8, ctypes.create_string_buffer(120))
    if descriptor < 0:
        pytest.skip(f"this system allows no io_uring: {os.strerror(ctypes.get_errno())}")
    with mmap.mmap(descriptor, mmap.PAGESIZE) as mapping:
        yield torch.frombuffer(mapping, dtype=torch.uint8)
    os.close(descriptor)


def test_a_ring_of_the_kernel_counts_as_no_file() -> None:
    """A page of a ring that was given back would raise SIGBUS, as ranks with int8 products did when they ended."""
    with ring() as mapped:
        assert not any(FileMaps(unwritten).let_go(mapped) for unwritten in (False, True))


def test_a_file_without_a_name_counts_as_no_file() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = torch.frombuffer(mmap.mmap(descriptor, mmap.PAGESIZE), dtype=torch.uint8)
    os.close(descriptor)
    assert not any(FileMaps(unwritten).let_go(memory) for unwritten in (False, True))


def test_only_the_mappings_of_a_model_s_tensors_are_given_back(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("model", "other")]
    mapped = []
    for file in files:
        save_file({"weight": torch.ones(64 * mmap.PAGESIZE)}, file)
        mapped.append(load_file(file)["weight"])
        assert mapped[-1].sum() == 64 * mmap.PAGESIZE
    FileMaps(unwritten=True).let_all_go([mapped[0]])
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    resident = [int(re.search(rf"{file}\n.*?Rss: +(\d+)", smaps, re.S)[1]) for file in files]
    assert resident[0] == 0 and resident[1] >= 4 * 64 * mmap.PAGESIZE // 1024
    assert mapped[0].sum() == 64 * mmap.PAGESIZE
