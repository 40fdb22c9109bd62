"""``fastdecode plan``: the contract's keys, one clear line for each impossible case, and its speed."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.hardware import profile, r_point

from fastdecode.cli.main import build_parser, main
from fastdecode.perfmodel.deployment import Deployment, deployed_step_model
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
from fastdecode.perfmodel.measurements import PrefillPoint
from fastdecode.perfmodel.profile_json import read_profile, write_profile

CONTRACT = {
    "mini_batch_size", "in_flight", "num_r_workers", "num_r_workers_exact", "micro_batch_size", "interval_steps",
    "kv_load_limit", "step_seconds", "output_tokens_per_second", "sequence_seconds", "bottleneck",
    "r_worker_bandwidth_gb_per_s", "kv_bytes_per_token", "gpu_only", "candidates",
}  # fmt: skip

NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--link", "100Gb", "--seq-len", "1024"]
BARE = ["--s-part-seconds", "7.08e-3", "--r-part-seconds-per-token", "1.239e-7", "--num-layers", "32"]
NUMBERS = [*BARE, "--seq-len", "1024", "--mini-batch-size", "1024"]


def plan(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--output-json", str(path)]) == 0
    return json.loads(path.read_text())


def test_bare_numbers_give_the_papers_plan(tmp_path: Path) -> None:
    """Figures that need a model or a GPU are null."""
    found = plan(tmp_path, *NUMBERS)
    assert set(found) >= CONTRACT
    assert f"{found['num_r_workers_exact']:.1f}" == "9.2"
    assert (found["num_r_workers"], found["in_flight"], found["bottleneck"]) == (10, 2048, "s-worker")
    assert found["step_seconds"] == pytest.approx(2 * 32 * 7.08e-3)
    assert found["gpu_only"]["max_batch_size"] is None and found["kv_bytes_per_token"] is None
    assert found["use_fastdecode"] is None


V3 = ["--model", "deepseek-v3", "--gpu", "h200", "--cpu", "epyc-9654", "--link", "400Gb", "--seq-len", "16384"]
V3 += ["--tensor-parallel-size", "16", "--mini-batch-size", "64"]


def test_who_absorbs_latents_is_decided_by_tokens_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The better one of `s` and `r` wins, in words and in figures; R-workers' K and V reduce their memory."""
    found = {side: plan(tmp_path, *V3, "--latent-absorption", side) for side in ("s", "r", "auto")}
    rates = {side: each["output_tokens_per_second"] for side, each in found.items()}
    assert rates["auto"] == max(rates["s"], rates["r"]) and rates["r"] > rates["s"]
    assert found["auto"]["latent_absorption"] == "r" and found["s"]["latent_absorption"] == "s"
    assert found["s"]["r_workers_arithmetic_over_reads"] == pytest.approx(0.72, abs=0.01)  # 8 heads per rank
    assert "R-workers multiply K and V of latents, 0.128 GB each" in capsys.readouterr().out
    small = ["--kv-cache-memory", "0.1GB"]
    assert main(["plan", *V3, "--latent-absorption", "r", *small]) == 1
    assert "K and V of deepseek-v3 take 127,926,272 bytes" in capsys.readouterr().err
    for wrong in ([*NAMES], [*NUMBERS]):
        assert main(["plan", *wrong, "--latent-absorption", "r"]) != 0
        assert "latent_absorption: r needs" in capsys.readouterr().err


GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
}  # fmt: skip


def test_windows_are_read_and_not_the_whole_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten of Gemma-3's 62 layers see all 32,768 tokens. R-workers store everything and read a fifth."""
    path = tmp_path / "config.json"
    where = ["--gpu", "h100", "--cpu", "epyc-9654", "--seq-len", "32768", "--prompt-len", "30000"]
    path.write_text(json.dumps(GEMMA))
    whole = plan(tmp_path, "--model", str(path), *where, "--mini-batch-size", "192")
    path.write_text(json.dumps(GEMMA | {"sliding_window": 1024}))
    found = plan(tmp_path, "--model", str(path), *where, "--mini-batch-size", "192")
    share = (10 + 52 * 1024 / (30000 + 2768 / 2)) / 62
    assert found["num_r_workers_exact"] == pytest.approx(share * whole["num_r_workers_exact"])
    for name in ("kv_bytes_per_token", "r_worker_bandwidth_gb_per_s"):
        assert found[name] == pytest.approx(whole[name])
    assert found["r_workers_set_by"] == "memory" and found["gpu_only"]["max_batch_size"] > 4
    assert "52 of 62 layers see 1024 tokens: the mean layer reads 19%" in capsys.readouterr().out


def test_an_index_reads_less_than_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This also holds for the GPUs alone, which store all tokens."""
    where = ["--model", "minimax-m3", "--gpu", "h200", "--tensor-parallel-size", "8", "--cpu", "epyc-9654"]
    found = plan(tmp_path, *where, "--seq-len", "131072", "--prompt-len", "122880", "--tpot", "inf")
    held, read = found["kv_bytes_per_token"], found["kv_bytes_read_per_token"]
    assert held == 60 * 2 * 128 * 2 + 57 * 256  # a rank has one KV head, and all keys of the index
    assert read == pytest.approx(512 * (3 + 57 * 2048 / (122880 + 4096)) + 57 * 256)
    assert found["r_workers_set_by"] == "memory" and found["r_workers_bound_by"] == "reads"
    free = 0.9 * 8 * 141e9 - 2 * 426.1e9 - 7 * 2 * 6144 * 200064  # each rank has one embedding
    assert found["gpu_only"]["max_batch_size"] == int(free / (122880 + 4096) / (60 * 2048 + 57 * 256))
    out = capsys.readouterr().out
    assert "297.2 GB/s of KV (reads bind: arithmetic needs " in out and "57 of 60 layers read 2048 tokens" in out
    bare = [*BARE[:4], "--num-layers", "60", "--mini-batch-size", "8", "--seq-len", "1024"]
    assert main(["plan", *bare, "--model", "minimax-m3"]) == 2
    assert "minimax-m3 scans an index" in capsys.readouterr().err


def test_a_profile_knows_the_scan_of_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and scanned keys each have their measured rate; a profile without a scan is refused."""
    shape = replace(BUILT_IN["minimax-m3"], dtype="float16")
    tokens = {(1024, 256): 2e-5, (16, 4096): 2e-5, (16, 128): 2e-5}
    rows, scans = (
        tuple(r_point(n, context, rate * n * context + fixed, **heads) for (n, context), fixed in tokens.items())
        for rate, heads in (
            (4e-9, {"num_heads": 64, "num_kv_heads": 4}),
            (1e-9, {"num_heads": 4, "num_kv_heads": 1, "kind": "scan"}),
        )
    )
    path = tmp_path / "profile.json"
    lengths = ["--seq-len", "131072", "--prompt-len", "122880", "--mini-batch-size", "8"]
    path.write_text(write_profile(replace(profile(), shape=shape, r_part=rows + scans)))
    assert read_profile(path.read_text()).shape == shape
    args = build_parser().parse_args(["plan", "--profile", str(path), *lengths])
    share = (3 + 57 * 2048 / (122880 + 4096)) / 60
    assert read_inputs(args).planner.r_part.seconds_per_token == pytest.approx(share * 4e-9 + 57 / 60 * 1e-9, rel=1e-3)
    live = deployed_step_model(
        read_profile(path.read_text()), shape, "float16", Deployment(1, 32, longest_context=8192)
    )
    share = (3 + 57 * (2048 - 2048**2 / 16384) / 4096) / 60  # contexts are spread up to the longest
    assert live.r_part.seconds_per_token == pytest.approx(share * 4e-9 + 57 / 60 * 1e-9, rel=1e-3)
    path.write_text(write_profile(replace(profile(), shape=shape, r_part=rows)))
    assert main(["plan", "--profile", str(path), *lengths]) != 0
    assert "no scan of an index over a float16 cache" in capsys.readouterr().err


def test_a_profile_decides_who_absorbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R-workers absorb if the measured link is slow, and the S-worker absorbs if R-workers' products are slow."""
    shape = replace(BUILT_IN["deepseek-v3"], dtype="float16")
    heads = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576}
    sizes = ((1024, 256), (16, 4096), (16, 128), (256, 1024))
    path = tmp_path / "profile.json"
    for per_row, sooner in ((1e-6, True), (1e-3, False)):
        points = [r_point(n, context, 1e-9 * n * context + 2e-5, **heads) for n, context in sizes]
        points += [
            r_point(n, context, 1e-9 * n * context + per_row * n + 2e-5, kind="absorbing", **heads)
            for n, context in sizes
        ]
        measured = replace(profile(), shape=shape, r_part=tuple(points))
        assert measured.absorbs_sooner_at_r_workers(shape, "float16", 64, ["r0", "r1"]) == sooner
        path.write_text(write_profile(measured))
        lengths = ["--seq-len", "16384", "--mini-batch-size", "64"]
        found = plan(tmp_path, "--profile", str(path), *lengths)
        assert found["latent_absorption"] == ("r" if sooner else "s")
    assert not replace(measured, r_part=measured.r_part[:4]).absorbs_sooner_at_r_workers(shape, "float16", 64, ["r0"])
    capsys.readouterr()


def test_a_fixed_pool_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, *NAMES, "--num-r-workers", "5", "--tpot", "inf")
    assert (found["num_r_workers"], found["r_workers_set_by"], found["mini_batch_size"]) == (5, "pool", 192)
    assert "; as given)" in capsys.readouterr().out
    assert main(["plan", *NAMES, "--num-r-workers", "0"]) == 2
    assert "num_r_workers must be at least 1, not 0" in capsys.readouterr().err


def test_names_give_a_plan_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, *NAMES, "--mini-batch-size", "1024", "--gpu-price", "1", "--cpu-price", "0.5")
    assert set(found) >= CONTRACT and None not in found.values()
    assert found["kv_bytes_per_token"] == 32 * 16_384
    assert found["r_worker_bandwidth_gb_per_s"] == pytest.approx(132.1, abs=0.1)
    assert found["gpu_only"]["max_batch_size"] == 30
    assert found["use_fastdecode"] is True
    assert {row["num_r_workers"] for row in found["candidates"]} >= {6, found["num_r_workers"], 22}
    text = capsys.readouterr().out
    assert "GPU alone" in text and "price/1M" in text
    assert "measured: FastDecode paper" in text and "nominal, efficiency assumed" in text


def test_more_r_workers_on_a_host_share_what_it_has(tmp_path: Path) -> None:
    """Two sockets of 132 GB/s each: eight R-workers get a quarter of a socket each, and need as many hosts."""
    named = (
        "--model",
        "llama-7b",
        "--gpu",
        "a10",
        "--cpu",
        "epyc-7452",
        "--seq-len",
        "1024",
        "--mini-batch-size",
        "1024",
    )
    two, eight = (plan(tmp_path, *named, "--r-workers-per-host", number) for number in ("2", "8"))
    assert eight["num_r_workers_exact"] == pytest.approx(4 * two["num_r_workers_exact"], rel=0.05)
    assert two["num_hosts"] <= eight["num_hosts"] <= two["num_hosts"] + 1  # with more R-workers, the slowest is slower
    one = plan(tmp_path, *named, "--r-workers-per-host", "1")  # half of a host, as fast as before
    assert one["num_r_workers_exact"] == two["num_r_workers_exact"]


def test_a_profile_gives_a_plan_and_says_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(write_profile(profile()))
    found = plan(tmp_path, "--profile", str(path), "--seq-len", "1024", "--mini-batch-size", "1024", "--gpu", "a10")
    exact = 1024 * 512 * 1.239e-7 / (7.08e-3 - 2e-5)
    assert found["num_r_workers_exact"] == pytest.approx(exact)
    assert found["gpu_only"]["max_batch_size"] == 30
    r_part = 2e-5 + 1.239e-7 * 1024 * 512 / 10
    host = 1e-3 + 10 * 1e-4 + 1e-6 * 2048  # each step sends messages to ten R-workers
    trip = 3e-5 + 1024 * 32_768 / 10e9  # the slower one of two links
    assert found["step_seconds"] == pytest.approx(32 * (7.08e-3 + trip + r_part) + 2 * 1e-3 + host)
    assert (
        "measured on cluster with fastdecode 0.1.0: S-worker NVIDIA A10, R-worker Epyc 7452 (avx2)"
        in capsys.readouterr().out
    )


def test_kv_dtype_prompts_and_latency_reach_the_plan(tmp_path: Path) -> None:
    base = plan(tmp_path, *NAMES, "--mini-batch-size", "512")
    int8 = plan(tmp_path, *NAMES, "--mini-batch-size", "512", "--kv-cache-dtype", "int8")
    assert int8["num_r_workers_exact"] / base["num_r_workers_exact"] == pytest.approx((128 + 4) / 256)
    prompts = plan(tmp_path, *NAMES, "--mini-batch-size", "512", "--prompt-len", "512")
    assert prompts["output_tokens_per_second"] < base["output_tokens_per_second"]
    peak = (1024 + 32) * (512 + (512 + 16) / 2)  # with one micro-batch in its prompts
    assert peak <= prompts["kv_load_limit"] <= 1.05 * peak  # and the fullest R-worker's share
    assert plan(tmp_path, *NAMES, "--latency-limit", "300")["sequence_seconds"] <= 300
    hidden = plan(tmp_path, *NAMES, "--mini-batch-size", "512", "--overlapped-transport")
    assert hidden["step_seconds"] < base["step_seconds"]
    assert plan(tmp_path, *NAMES, "--mini-batch-size", "512", "--num-mini-batches", "3")["in_flight"] == 1536


def test_rows_of_prompts_send_keys_and_values_alone() -> None:
    """Half of the rows send q, k, v and o, half send k and v; each of two ranks sends half over its own PCIe."""
    args = build_parser().parse_args(["plan", *NAMES, "--prompt-len", "512", "--tensor-parallel-size", "2"])
    transport = read_inputs(args).planner.transport
    assert transport.row_bytes == 2 * 4096 * (4 + 2) / 2 / 2
    assert transport.hop_bytes_per_second == (32e9, 12.5e9 / 2)


def test_the_gpu_alone_wins_where_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences are short, and the GPU has much memory."""
    short = ["--gpu", "h200", "--prompt-len", "100", "--seq-len", "128"]
    assert main(["plan", "--model", "llama-7b", "--cpu", "epyc-9654", *short]) == 0
    assert "Do not use FastDecode here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--seq-len", "1024"], 2, "model is needed"),
        (NAMES[:-2], 2, "seq_len (prompt + output tokens) is needed"),
        ([*NAMES[:-2], "--seq-len", "0"], 2, "at least prompt_len + 1"),
        ([*NAMES, "--prompt-len", "1024"], 2, "must be at least prompt_len + 1 = 1025"),
        ([*NUMBERS, "--seq-len", "1e308"], 2, "seq_len (prompt + output) must be at most 1e+12 tokens, not 1e+308"),
        ([*NAMES, "--output-len-cv", "1e200"], 2, "output_len_cv (standard deviation over mean) must be at most 100"),
        ([*NAMES, "--gpu", "abacus"], 2, "gpu must be one of t4, l4, a10"),
        ([*NAMES, "--cpu", "abacus"], 2, "cpu must be one of epyc-7452"),
        ([*NAMES, "--model", "no-such-model"], 1, "no such model folder"),
        ([*NAMES, "--link", "0Gb"], 2, "no bandwidth at all"),
        ([*NAMES, "--mini-batch-size", "0"], 2, "mini_batch_size must be at least 1"),
        ([*NAMES, "--num-mini-batches", "0"], 2, "num_mini_batches must be at least 1"),
        ([*NAMES, "--gpu-price", "nan"], 2, "a price must be"),
        ([*NAMES, "--kv-cache-memory", "100MB"], 1, "holds 191 cached tokens, 834 fewer than one sequence of 1024"),
        ([*NAMES, "--latency-limit", "1"], 1, "cannot be met"),
        ([*NAMES, "--model", "opt-175b", "--tensor-parallel-size", "1"], 1, "(needs 32 of its kind"),
        ([*NAMES, "--profile", "/no/such/profile.json", "--cpu", "epyc-7452"], 2, "cpu and profile"),
        (["--seq-len", "10", "--profile", "/no/such/profile.json"], 1, "/no/such/profile.json"),
        ([*NUMBERS, "--profile", "p.json"], 2, "s_part_seconds and profile"),
        ([*BARE, "--seq-len", "1024"], 2, "mini_batch_size is needed"),
        ([*NUMBERS[2:]], 2, "s_part_seconds is needed"),
        ([*NUMBERS, "--gpu", "a10"], 2, "gpu and cpu have no place"),
        ([*NUMBERS, "--link", "10Gb"], 2, "need --model"),
        ([*NUMBERS, "--model", "llama-13b"], 2, "num_layers is 32, and llama-13b has 40"),
        ([*NUMBERS, "--r-part-seconds-per-token", "0"], 2, "finite and above zero"),
        ([*NUMBERS, "--r-part-seconds-per-token", "inf"], 2, "finite and above zero"),
        ([*NUMBERS, "--s-part-seconds", "inf"], 2, "above zero seconds"),
        ([*NAMES, "--r-workers-per-host", "0"], 2, "r_workers_per_host must be at least 1"),
        ([*NUMBERS, "--s-part-seconds", "-1"], 2, "above zero seconds"),
        ([*NUMBERS, "--tensor-parallel-size", "2"], 2, "tensor_parallel_size has no place beside bare numbers"),
        ([*NAMES, "--tensor-parallel-size", "0"], 2, "tensor_parallel_size must be at least 1, not 0"),
        ([*NAMES, "--tensor-parallel-size", "3"], 1, "3 ranks cannot share the 32 heads and 32 KV heads of llama-7b"),
        ([*NAMES, "--tensor-parallel-size", "2", "--rank-link", "fast"], 2, "link must be a bandwidth such as 100Gb"),
        ([*NUMBERS, "--output-json", "."], 2, ".: is a folder; name a file to write"),
        ([*NUMBERS, "--plot", "plan.txt"], 2, "plan.txt: a plot must end in .png, .pdf or .svg"),
        ([*NUMBERS, "--plot", "."], 2, ".: is a folder; name a file to write"),
        ([*NUMBERS, "--output-json", "/no/such/folder/plan.json"], 2, "no such folder"),
    ],
)
def test_failures_are_one_clear_line(
    arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2 for wrong usage, and 1 if no plan exists; the later one of two equal flags counts."""
    assert main(["plan", *arguments]) == status
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error
    assert "\n" not in error


def test_batch_size_and_latency_limit_exclude_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["plan", *NAMES, "--mini-batch-size", "8", "--latency-limit", "10"])
    assert exit_status.value.code == 2 and "not allowed with" in capfd.readouterr().err


def test_emitted_files_hold_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, *NAMES, "--mini-batch-size", "1024")
    capsys.readouterr()
    text = {}
    for form in ("hostfile", "sbatch", "mpirun"):
        assert main(["plan", *NAMES, "--mini-batch-size", "1024", "--emit", form]) == 0
        text[form] = capsys.readouterr().out
    slots = [int(number) for number in re.findall(r"^r-host-\d+ slots=(\d+)$", text["hostfile"], re.MULTILINE)]
    assert sum(slots) == found["num_r_workers"] and len(slots) == found["num_hosts"]
    for form in ("sbatch", "mpirun"):
        for flag, key in (("--max-num-seqs", "in_flight"), ("--kv-load-limit", "kv_load_limit")):
            assert f"{flag} {found[key]}" in text[form]
        assert '--model "${MODEL:?set it to a folder of llama-7b}"' in text[form]
        assert "fastdecode r-worker --transport mpi" in text[form]
    assert f"-n {found['num_r_workers']} fastdecode r-worker" in text["mpirun"]
    assert f"--nodes={found['num_hosts']} --ntasks={found['num_r_workers']} " in text["sbatch"]
    script = tmp_path / "job.sh"
    script.write_text(text["sbatch"])
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_an_emitted_model_is_one_that_an_engine_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that only plans know is asked for; of a config.json, its folder is given."""
    assert main(["plan", *NAMES, "--emit", "mpirun"]) == 0
    line = capsys.readouterr().out.replace("mpirun ", "echo ", 1)
    asked = subprocess.run(["sh", "-c", line], env={}, capture_output=True, text=True, check=False)
    assert asked.returncode != 0 and "MODEL: set it to a folder of llama-7b" in asked.stderr
    shape = str(Path(__file__).parents[2] / "examples" / "llama-demo-shape")
    for model in (shape, f"{shape}/config.json"):
        assert main(["plan", *NAMES, "--model", model, "--emit", "mpirun"]) == 0
        assert f"--model {shape} " in capsys.readouterr().out


def test_emitted_prefill_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prefill worker is on its own host with the S-worker's model; all ranks have a key."""
    flags = [*NAMES, *PROMPTS, "--num-prefill-workers", "3"]
    text = {}
    for form in ("hostfile", "sbatch", "mpirun"):
        assert main(["plan", *flags, "--emit", form]) == 0
        text[form] = capsys.readouterr().out
        assert subprocess.run(["bash", "-n"], input=text[form], text=True, check=False).returncode == 0
    hosts = [f"prefill-host-{number} slots=1" for number in (1, 2, 3)]
    assert text["hostfile"].splitlines()[-3:] == hosts
    command = 'fastdecode prefill-worker --transport mpi --model "${MODEL:?set it to a folder of llama-7b}" --key-file'
    assert f": -n 3 {command} pool.key" in text["mpirun"]
    assert "#SBATCH --nodes=3 --ntasks=3 --exclusive --gpus-per-node=1\n" in text["sbatch"]
    assert f"--het-group=2 --cpu-bind=ldoms {command} pool.key" in text["sbatch"]
    for form in ("sbatch", "mpirun"):
        assert "--r-workers mpi --prefill-workers mpi:3 --key-file pool.key" in text[form]


@pytest.mark.parametrize("form", ["sbatch", "mpirun"])
def test_emitted_r_workers_get_the_memory_that_was_planned_with(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """R-workers get the memory of the flags, or else of the preset; the S-worker gets no such flag."""
    for flags, memory in ((["--kv-cache-memory", "50GiB"], "50GiB"), ([], str(int(0.8 * 128e9)))):
        assert main(["plan", *NAMES, *flags, "--mini-batch-size", "1024", "--emit", form]) == 0
        text = capsys.readouterr().out
        assert text.count("--kv-cache-memory") == 1
        assert f"fastdecode r-worker --transport mpi --kv-cache-memory {memory}" in text
    assert main(["plan", *NUMBERS, "--emit", form]) == 0
    assert "--kv-cache-memory" not in capsys.readouterr().out


@pytest.mark.slow
def test_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    prices = ["--gpu-price", "1", "--cpu-price", "0.5"]
    assert main(["plan", *NAMES, *prices, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main(["plan", *NAMES, "--plot", str(tmp_path / "plan.png")]) == 2
    assert "plots need matplotlib: pip install 'fastdecode[plot]'" in capfd.readouterr().err


def test_a_plan_takes_less_than_a_second_and_no_torch(tmp_path: Path) -> None:
    """Processor seconds are counted, since the machine may be shared; imports run in a separate process."""
    start = time.process_time()
    assert main(["plan", *NAMES, "--latency-limit", "300"]) == 0
    assert time.process_time() - start < 1.0
    code = f"""
import sys
from fastdecode.cli.main import build_parser, main
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
status = main(["plan", *{NAMES!r}])
heavy = {{"torch", "transformers", "matplotlib"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else status)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


PROMPTS = ["--prompt-len", "512", "--mini-batch-size", "256", "--overlapped-transport"]


def test_prefill_workers_in_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has as many prefill workers as keep up, or as requested; then decodes wait for no prompt."""
    without = plan(tmp_path, *NAMES, *PROMPTS)
    chosen = plan(tmp_path, *NAMES, *PROMPTS, "--num-prefill-workers", "auto", "--prefill-gpu", "t4")
    assert "prefill" not in without
    prefill = chosen["prefill"]
    assert 0.4 < prefill["busy"] <= 0.8 and prefill["num_prefill_workers"] > 1
    assert prefill["tbt_seconds"] == chosen["step_seconds"] < prefill["tbt_without_seconds"]
    assert sum(prefill["parts"]) == prefill["prompt_len"] == 512
    assert prefill["ttft_chain_seconds"] < prefill["ttft_alone_seconds"] < prefill["ttft_seconds"]
    rate = chosen["output_tokens_per_second"] / 512
    assert prefill["prompts_per_second"] == pytest.approx(rate)
    capsys.readouterr()
    few = plan(tmp_path, *NAMES, *PROMPTS, "--num-prefill-workers", "1", "--prefill-gpu", "t4")["prefill"]
    assert few["busy"] == pytest.approx(prefill["busy"] * prefill["num_prefill_workers"]) and few["busy"] > 1
    assert few["ttft_seconds"] is None and few["parts"] == [512]
    assert "too few" in capsys.readouterr().out
    assert "prefill" not in plan(tmp_path, *NAMES, *PROMPTS, "--num-prefill-workers", "0")


def test_prefill_workers_as_measured(tmp_path: Path) -> None:
    """A profile must have measured prefill workers; otherwise the error names the command."""
    prompts = tuple(PrefillPoint(n, 1e-3 * n + 0.01, num_busy=busy) for n in (512, 2048) for busy in (1, 2))
    path = tmp_path / "profile.json"
    given = ["--profile", str(path), "--seq-len", "1024", *PROMPTS, "--num-prefill-workers", "2"]
    path.write_text(write_profile(profile()))
    assert main(["plan", *given]) == 1
    path.write_text(write_profile(replace(profile(), prefill=prompts)))
    found = plan(tmp_path, *given)["prefill"]
    assert found["ttft_alone_seconds"] == pytest.approx(0.522 + found["tbt_seconds"] / 2, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*NAMES, "--num-prefill-workers", "2"], "there are no prompts to compute"),
        ([*NAMES, *PROMPTS, "--prefill-gpu", "a100"], "needs --num-prefill-workers"),
        ([*NUMBERS, "--prompt-len", "512", "--num-prefill-workers", "2"], "bare numbers do not say"),
        ([*NAMES, *PROMPTS, "--num-prefill-workers", "-2"], "must be a whole number"),
        ([*NAMES, *PROMPTS, "--num-prefill-workers", "2", "--prefill-gpu", "b100"], "gpu must be one of"),
    ],
)
def test_prefill_workers_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
