"""Machines for plans: presets, numbers, one host with its GPU, and this machine as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import build_parser, main
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.named_machine import named_machine
from fastdecode.perfmodel.machine_words import cpu_host_of, gpu_of
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS, find_cpu_host, find_gpu

ASKED_GPUS = "RTX 3090|4090|5090|RTX PRO 6000|L4|L40S|A100|H100|H200|B200|MI300X|GH200"
ASKED_HOSTS = "EPYC 9654|9965|7452|6980P|8480|Ryzen 9950X|Threadripper 7995WX|Graviton4|Grace|M3 Ultra|laptop"


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main(["plan", "--model", "llama-3-8b", "--seq-len", "8192", *words, "--output-json", str(path)]) == 0
    return json.loads(path.read_text("utf-8"))


def test_presets_are_found_by_the_names_that_people_say() -> None:
    assert all(find_gpu(name) in GPUS.values() for name in ASKED_GPUS.split("|"))
    assert all(find_cpu_host(name) in CPU_HOSTS.values() for name in ASKED_HOSTS.split("|"))
    assert find_gpu("rtx_5090") is find_gpu("RTX-5090") is find_gpu("5090") is GPUS["rtx-5090"]


def test_numbers_say_a_machine() -> None:
    gpu, host = gpu_of("1792GB/s:210TFLOPS:32GiB"), cpu_host_of("90 GB/s : 16 cores : 64GiB")
    assert (gpu.kv_bytes_per_second.nominal, gpu.flops_per_second.nominal) == (1792e9, 210e12)
    assert (gpu.memory_bytes, gpu.host_bytes_per_second) == (32 * 2**30, 32e9)
    assert gpu_of("1.8TB/s:210TFLOPS:32GB:pcie64GB/s").host_bytes_per_second == 64e9
    assert (host.cores, host.r_workers_per_host, host.memory_bytes) == (16, 1, 64 * 2**30)
    assert host.read_bytes_per_second.nominal == 90e9 and host.holds_gpu


@pytest.mark.parametrize(
    ("flag", "words", "message"),
    [
        ("gpu", "1792GB/s:32GiB", "does not say its TFLOPS"),
        ("gpu", "1792GB/s:32GiB:9TFLOPS:9TFLOPS", "twice"),
        ("gpu", "0GB/s:1TFLOPS:1GiB", "no figure of a machine"),
        ("gpu", "1792GB:32:9TFLOPS", "'32' is not understood"),
        ("gpu", "there", "numbers such as 1792GB/s:210TFLOPS:32GiB, or here"),
        ("cpu", "90GB/s:1.5cores:64GiB", "whole number"),
        ("cpu", "90GB/s:16cores", "does not say its memory"),
        ("cpu", "90GB/s:16cores:64GiB:9TFLOPS", "'9TFLOPS' is not understood"),
        ("cpu", "90GB/s", "does not say its cores and memory"),
    ],
)
def test_words_that_are_no_machine(flag: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_of(words) if flag == "gpu" else cpu_host_of(words)


def test_one_host_has_its_own_r_workers_and_pcie_alone(tmp_path: Path) -> None:
    words = ["plan", "--model", "llama-3-8b", "--seq-len", "8192"]
    at_home = [["--gpu", "5090", "--cpu", "9950x"], ["--gpu", "h100", "--cpu", "epyc-9654", "--link", "pcie"]]
    for machine, r_workers in zip(at_home, (1, 2), strict=True):
        named = named_machine(build_parser(["plan"]).parse_args([*words, *machine]))
        assert named.hops(1) == (64e9,)
        found = planned(tmp_path, *machine)
        assert (found["num_r_workers"], found["num_hosts"]) == (r_workers, 1)
        assert "tensor_parallel" not in found or found["tensor_parallel"] == []
    apart = named_machine(build_parser(["plan"]).parse_args([*words, *at_home[0], "--link", "10Gb"]))
    assert apart.hops(2) == (64e9, 10e9 / 16)


def test_what_a_token_costs_by_list_prices_chooses_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--gpu", "h100", "--cpu", "epyc-9654", "--tpot", "inf")
    listed = found["list_price_per_million_tokens"]
    assert found["price_per_million_tokens"] is None and listed["fastdecode"] > 0 < listed["gpu_only"]
    assert "USD with FastDecode" in (text := capsys.readouterr().out) and "by list prices" in text
    given = planned(
        tmp_path, "--gpu", "h100", "--cpu", "epyc-9654", "--tpot", "inf", "--gpu-price", "2", "--cpu-price", "1"
    )
    assert given["list_price_per_million_tokens"]["fastdecode"] is None and given["price_per_million_tokens"] > 0
    planned(tmp_path, "--gpu", "t4", "--cpu", "epyc-7452", "--kv-cache-dtype", "int8", "--model", "opt-6.7b")
    assert "Prices are not known: --gpu-price and --cpu-price take" in capsys.readouterr().out


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The R-workers' reads and the S-worker's products are measured, and only once per process."""
    found = planned(tmp_path, "--gpu", "here", "--cpu", "here")
    text = capsys.readouterr().out
    assert "measured here: attention of an R-worker" in text and "measured here: bfloat16 products" in text
    assert found["num_hosts"] == 1 and 0.5 < found["r_worker_bandwidth_gb_per_s"] < 2000
    import torch

    if not torch.cuda.is_available():
        assert "for want of a GPU" in text and "share the same cores" in text
        assert main(["plan", "--model", "llama-3-8b", "--seq-len", "8192", "--gpu", "here", "--cpu", "laptop"]) == 2
        assert "there is no GPU here" in capsys.readouterr().err
