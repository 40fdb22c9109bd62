"""Weights as published: packed checkpoints, hub ids, the fewest GPUs that hold them, and sessions by context."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.hardware import profile

from fastdecode.cli.main import main
from fastdecode.perfmodel.known_models import BUILT_IN, HUB_NAMES, known_name
from fastdecode.perfmodel.lab.gpu_only import fewest_gpus
from fastdecode.perfmodel.model_config import find_shape, read_shape
from fastdecode.perfmodel.model_sizes import FORMATS, KEPT_PACKED, format_of
from fastdecode.perfmodel.presets import find_gpu
from fastdecode.perfmodel.profile_json import write_profile

MACHINE = ["--gpu", "rtx-5090", "--cpu", "threadripper-7995wx"]
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 4}}}}, "gptq"),
        ({"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 3}}}}, None),
        ({"quant_method": "aqlm"}, None),
        ({}, None),
    ],
)
def test_a_configuration_says_its_format(quantization: dict[str, object], name: str | None) -> None:
    assert format_of(quantization) == name
    if name:
        shape = read_shape({**CONFIG, "quantization_config": quantization}, "m")
        assert shape.weight_bits == FORMATS[name] and shape.max_context == 131072


def test_bytes_of_packed_weights_by_hand() -> None:
    """Layers have 4.25 bits a weight, and both embeddings keep two bytes."""
    plain = BUILT_IN["llama-3-8b"]
    packed = replace(plain, weight_bits=4.25)
    vocabulary = 2 * 4096 * 128256
    assert packed.weight_bytes == round((plain.parameters - vocabulary) * 4.25 / 8) + 2 * vocabulary
    assert packed.kv_bytes_per_token("bfloat16") == plain.kv_bytes_per_token("bfloat16")


def test_packed_weights_favour_the_gpu_alone_and_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = tmp_path / "plan.json", {}
    for words in ([], ["--weights", "gguf-q4_k_m"]):
        assert (
            main(["plan", "--model", "llama-3-8b", *MACHINE, "--seq-len", "8192", *words, "--output-json", str(path)])
            == 0
        )
        found[len(words)] = json.loads(path.read_text("utf-8"))
    assert found[2]["gpu_only"]["users"] > 1.4 * found[0]["gpu_only"]["users"]
    assert found[2]["output_tokens_per_second"] == found[0]["output_tokens_per_second"]
    assert "the S-worker unpacks them to bfloat16, 16.06 GB; the GPU alone keeps them packed" in capsys.readouterr().out


def test_formats_that_the_engine_keeps_packed_count_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed weights stay packed on one GPU, and two ranks of an S-worker unpack them."""
    assert {*KEPT_PACKED} == {*FORMATS} - {name for name in FORMATS if name.startswith("gguf")}
    words = ["plan", "--gpu", "h100", "--cpu", "epyc-9654", "--seq-len", "8192", "--model"]
    assert main([*words, "llama-3-8b", "--weights", "awq"]) == 0
    assert "weights in awq: they stay packed on the GPU, 5.73" in capsys.readouterr().out
    assert main([*words, "llama-3-8b", "--weights", "awq", "--tensor-parallel-size", "2"]) == 0
    assert "the S-worker unpacks them to bfloat16, 16.06 GB" in capsys.readouterr().out
    assert main([*words, "gpt-oss-120b", "--weights", "mxfp4", "--tensor-parallel-size", "1"]) == 0
    assert "they stay packed on the GPU, 6" in capsys.readouterr().out


def test_a_model_gets_the_fewest_gpus_that_hold_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "--model", "llama-3.3-70b", "--gpu", "h100", "--cpu", "epyc-9654", "--seq-len", "8192"]
    assert main([*words, "--output-json", str(path)]) == 0
    assert json.loads(path.read_text("utf-8"))["tensor_parallel_size"] == 2
    assert "FastDecode needs 2 x h100 and" in capsys.readouterr().out
    assert main([*words, "--tensor-parallel-size", "1"]) == 1
    assert "(needs 2 of its kind: --tensor-parallel-size)" in capsys.readouterr().err
    assert fewest_gpus(BUILT_IN["kimi-k2"], find_gpu("t4")) is None


def test_hub_ids_are_known() -> None:
    assert set(HUB_NAMES.values()) <= set(BUILT_IN)
    assert find_shape("Qwen/Qwen3-32B") is BUILT_IN["qwen3-32b"]
    tuned = {"meta-llama/Llama-3.1-8B-Instruct": "llama-3-8b", "moonshotai/Kimi-K2-Instruct-0905": "kimi-k2"}
    assert {name: known_name(name) for name in tuned} == tuned and known_name("nobody/nothing") is None


def test_the_list_of_models_and_the_table_of_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-models"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in BUILT_IN)
    path = tmp_path / "table.json"
    assert main(["plan", "--table", "--model", "llama-3-8b", *MACHINE, "--output-json", str(path)]) == 0
    cells = {(cell["context"], cell["sessions"]): cell for cell in json.loads(path.read_text("utf-8"))["table"]}
    assert set(cells) == {(c, s) for c in (8192, 32768, 131072, 262144) for s in (1, 4, 8, 32)}
    assert cells[8192, 1]["gpu_alone"] < cells[8192, 1]["streamed"]
    assert cells[32768, 32]["gpu_alone"] is None and cells[32768, 32]["fastdecode"] < cells[32768, 32]["streamed"]
    ways = ("gpu_alone", "fastdecode", "streamed")
    assert all(cells[262144, 1][way] is None and cells[262144, 1][f"{way}_in_turns"] == 0 for way in ways)
    assert cells[32768, 32]["gpu_alone_in_turns"] > 0
    assert "KV over PCIe" in capsys.readouterr().out


def test_a_table_s_best_is_the_way_with_most_tokens_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row of the table names the way with the most tokens per second, sessions in turns included."""
    home = ["--gpu", "rtx-4090", "--cpu", "ryzen-9950x"]
    assert main(["plan", "--table", "--model", "llama-3-8b", *home]) == 0
    out = capsys.readouterr().out
    rows = {tuple(line.split()[:2]): line for line in out.splitlines() if re.match(r" +[\d,]+ +\d+ ", line)}
    assert "in turns 39.6/s" in rows["32,768", "4"] and rows["32,768", "4"].endswith("  GPU alone, in turns")
    assert rows["8,192", "1"].endswith("  GPU alone") and rows["131,072", "1"].endswith("  FastDecode")
    assert "GPU memory" in rows["131,072", "1"] and rows["131,072", "32"].endswith("  FastDecode, in turns")
    assert rows["262,144", "1"].split()[2:] == ["context", "context", "context", "-"]
    assert "llama-server" not in out and "Host memory: " in out and "assumed for ryzen-9950x" in out
    for line in rows.values():
        rates = [float(rate.replace(",", "")) for rate in re.findall(r"([\d.,]+)/s", line)]
        without_gpu = "GPU memory" in line or "context" in line
        ways = ("FastDecode", "KV over PCIe") if without_gpu else ("GPU alone", "FastDecode", "KV over PCIe")
        best = line.split("  ")[-1].removesuffix(", in turns")
        assert not rates or max(rates) == rates[ways.index(best)]


def test_a_table_without_a_gpu_or_with_too_little_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--table", "--model", "llama-3-8b", "--cpu", "ryzen-9950x"]
    assert main(words) == 2 and "gpu is needed" in capsys.readouterr().err
    assert main([*words, "--gpu", "rtx-4090", "--kv-cache-memory", "10MB"]) == 1
    assert "one R-worker's memory holds 76 cached tokens" in capsys.readouterr().err
    path = tmp_path / "profile.json"
    path.write_text(write_profile(profile()))
    assert main(["plan", "--table", "--profile", str(path)]) == 2
    assert "table: the table compares with the GPU alone; name a GPU with --gpu" in capsys.readouterr().err
