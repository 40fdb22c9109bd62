"""Figures that the papers print, computed from the inputs printed beside them."""

from __future__ import annotations

import pytest

from fastdecode.perfmodel import equations
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.presets import find_cpu_host, find_gpu
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import GpuSPart, Transport

R_SECONDS = 0.1239e-6
"""Seconds of one R-worker (socket) per cached token and layer of the 7B model."""

T_1024_SECONDS = 7.08e-3

PAPER_7B = ModelShape("paper-7b", 32, 4096, 4 * 4096, 32, 32, 128, 32000, mlp_matrices=2, dtype="float16")
"""The sizes of the 7B layer in FastDecode's paper: 12·h² weights."""

WORKED = ModelShape("worked", 64, 4096, 16384, 32, 8, 256, 32128, tied_embeddings=True)
WORKED_EXPERTS = ModelShape(
    "worked-experts", 64, 4096, 16384, 32, 8, 256, 32128, tied_embeddings=True, num_experts=16, experts_per_token=2
)
"""The model of "All About Transformer Inference", Worked Problems, dense and as a mixture of experts."""

V5E_BYTES_PER_SECOND, V5E_FLOPS_PER_SECOND = 8.1e11, 1.97e14


@pytest.mark.parametrize(
    ("in_flight", "output_len", "interval", "micro_batch", "stabilized"),
    [(6, 6, 2, 2, 24), (1024, 1024, 32, 32, 540_672)],
)
def test_stabilized_load(in_flight: int, output_len: int, interval: int, micro_batch: int, stabilized: int) -> None:
    assert equations.micro_batch_size(in_flight, output_len, interval) == micro_batch
    assert equations.peak_load_stabilized(in_flight, output_len, interval) == stabilized


@pytest.mark.parametrize(("seq_len", "printed"), [(1024, "9.2"), (768, "6.9")])
def test_r_workers_of_the_paper(seq_len: int, printed: str) -> None:
    workers = equations.balanced_r_workers(1024, Workload(seq_len).mean_context, R_SECONDS, T_1024_SECONDS)
    assert f"{workers:.1f}" == printed


def test_r_workers_of_short_sequences() -> None:
    assert f"{equations.balanced_r_workers(1024, Workload(128).mean_context, R_SECONDS, T_1024_SECONDS):.2f}" == "1.15"


def test_r_is_what_the_paper_measured() -> None:
    """1024 sequences of 256 tokens on 4 sockets take 8.12 ms; the preset of that CPU agrees."""
    preset = host_r_part(PAPER_7B, "float16", find_cpu_host("epyc-7452"))
    assert preset.seconds_per_token * 1024 * 256 / 4 == pytest.approx(8.12e-3, rel=0.005)


def test_the_a10_preset_is_near_what_the_paper_measured() -> None:
    """T(1) and T(1024) are compared; the second is loading plus multiplying at 0.62 of the FLOP/s."""
    s_part = GpuSPart(PAPER_7B, find_gpu("a10"))
    assert s_part.layer_seconds(1) == pytest.approx(1.46e-3, rel=0.01)
    assert s_part.layer_seconds(1024) == pytest.approx(T_1024_SECONDS, rel=0.05)


def test_sizes_of_a_7b_layer() -> None:
    assert 1024 * PAPER_7B.attending_row_bytes // 10**5 == 335  # 33.55 MB, which the paper cuts to 33.5
    pcie, network = (Transport(PAPER_7B.attending_row_bytes, (rate,)) for rate in (32e9, 100e9 / 8))
    # The exact product is 1.049; the book prints 1.04.
    assert pcie.trip_seconds(1024) == pytest.approx(1.04e-3, abs=0.01e-3)
    assert f"{network.trip_seconds(1024) * 1e3:.2f}" == "2.68"
    kv_bytes = PAPER_7B.layer_layout.token_bytes("float16")
    assert kv_bytes == 16_384 and f"{1024 * 256 * kv_bytes / 1e9:.2f}" == "4.29"
    assert PAPER_7B.layer_parameters * PAPER_7B.item_bytes // 10**6 == 402


def test_pop_quiz() -> None:
    """The quiz asks for 30B int8 parameters and 8,192 tokens of 100 kB each on 16 chips."""
    chips = {"flops_per_second": 16 * V5E_FLOPS_PER_SECOND, "bytes_per_second": 16 * V5E_BYTES_PER_SECOND}
    step = {batch: equations.roofline_step_seconds(batch, 100e3 * 8192, 30e9, 30e9, **chips) for batch in (4, 256)}
    assert f"{step[4] * 1e3:.2f}" == "2.57"
    assert f"{step[256] * 1e3:.0f}" == "21"


TABLES = {
    40: [
        (1, "6.7", "32.7", "4.98", "200.61"),
        (8, "53.6", "79.6", "12.13", "659.30"),
        (16, "107.2", "133.2", "20.30", "787.99"),
        (32, "214.4", "240.4", "36.65", "873.21"),
        (64, "428.8", "454.8", "69.33", "923.13"),
        (240, "1608", "1634", "249.09", "963.53"),
    ],
    8: [
        (1, "1.34", "27.34", "4.17", "239.94"),
        (8, "10.72", "36.72", "5.60", "1429.19"),
        (16, "21.44", "47.44", "7.23", "2212.48"),
        (32, "42.88", "68.88", "10.50", "3047.62"),
        (64, "85.76", "111.76", "17.04", "3756.62"),
        (240, "321.6", "347.6", "52.99", "4529.34"),
    ],
}
"""For each number of KV heads: batch, KV memory, total memory, step ms and tokens/s of LLaMA 2-13B,
with 8,192 tokens per sequence on 8 chips.
"""


@pytest.mark.parametrize("kv_heads", TABLES)
def test_tables_of_the_13b_model(kv_heads: int) -> None:
    """Rows follow, as in the book, from one sequence's rounded KV memory; a total is the least that holds its batch."""
    layout = BUILT_IN["llama-13b"].with_kv_heads(kv_heads).kv_layout("float16")
    kv_bytes = float(f"{8192 * layout.kv_bytes_per_token:.{1 if kv_heads == 40 else 2}e}")
    for batch, kv_memory, memory, milliseconds, tokens_per_second in TABLES[kv_heads]:
        assert f"{batch * kv_bytes / 1e9:g}" == kv_memory
        total = float(memory) * 1e9
        assert equations.roofline_max_batch_size(total * 1.0001, 26e9, kv_bytes) == batch
        assert equations.roofline_max_batch_size(total * 0.9999, 26e9, kv_bytes) == batch - 1
        step = equations.roofline_step_seconds(batch, kv_bytes, 13e9, 26e9, 1600e12, 8 * 0.82e12)
        assert f"{step * 1e3:.2f}" == milliseconds
        assert f"{batch / step:.2f}" == tokens_per_second


def test_cache_and_weights_of_the_13b_model() -> None:
    """The tables' inputs are ours, and 8 chips of 16 GiB hold a batch of 16, or of 64 with 8 KV heads."""
    shape = BUILT_IN["llama-13b"]
    assert f"{shape.parameters / 1e9:.0f}" == "13"
    assert f"{shape.weight_bytes / 1e9:.0f}" == "26"
    layouts = {heads: shape.with_kv_heads(heads).kv_layout("float16") for heads in (40, 8)}
    sizes = {heads: 8192 * layout.kv_bytes_per_token for heads, layout in layouts.items()}
    assert f"{sizes[40] / 1e9:.1f}" == "6.7" and f"{sizes[8] / 1e9:.2f}" == "1.34"
    assert 16 <= equations.roofline_max_batch_size(128 * 2**30, 26e9, sizes[40]) < 32
    assert 64 <= equations.roofline_max_batch_size(128 * 2**30, 26e9, sizes[8]) < 240


def test_worked_model() -> None:
    assert f"{WORKED.parameters / 1e9:.3f}" == "18.385"
    for heads, kv_bytes in ((8, 262_144), (1, 32_768)):  # Each element takes one byte.
        assert WORKED.num_layers * WORKED.with_kv_heads(heads).layer_layout.kv_elements == kv_bytes
    chips = {"flops_per_second": 16 * V5E_FLOPS_PER_SECOND, "bytes_per_second": 16 * V5E_BYTES_PER_SECOND}
    empty = equations.roofline_step_seconds(1, 0, WORKED.parameters, WORKED.parameters, **chips)
    assert f"{empty * 1e3:.2f}" == "1.42"


def test_worked_model_as_a_mixture_of_experts() -> None:
    assert f"{WORKED_EXPERTS.parameters / 1e9:.1f}" == "211.7"
    assert f"{WORKED_EXPERTS.active_parameters / 1e9:.1f}" == "31.3"


def test_the_papers_socket_reads_two_thirds_of_its_bandwidth() -> None:
    """A socket of nominally 205 GB/s reads 16,384 bytes in 0.1239 µs, as the paper measured."""
    reading = find_cpu_host("epyc-7452").read_bytes_per_second
    assert f"{reading.nominal / 1e9:.0f}" == "205"
    assert reading.achieved == pytest.approx(16_384 / R_SECONDS, rel=0.005)
