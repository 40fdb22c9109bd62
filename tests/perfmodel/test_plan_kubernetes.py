"""``fastdecode plan --emit kubernetes`` and ``--emit ray``.

Manifests hold the plan and are valid by the API's schemas, and what ``--emit`` passes on is what the engine takes.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes import Manifests, base, container, find, parsed, pods

from fastdecode.api.config import EngineConfig
from fastdecode.api.settings import parse_bytes
from fastdecode.cli.flags import engine_config
from fastdecode.cli.main import build_parser, main
from fastdecode.perfmodel.lab.cli.plan_emit import FORMATS

NAMES = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--link", "100Gb", "--seq-len", "1024"]
NUMBERS = ["--s-part-seconds", "1e-3", "--r-part-seconds-per-token", "4e-9", "--num-layers", "32", "--seq-len", "1024"]
NUMBERS += ["--mini-batch-size", "64"]
SHAPE = str(Path(__file__).parents[2] / "examples" / "llama-demo-shape")
DRAFTS = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}', "--acceptance-rate", "0.7"]


def emitted(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[Manifests, str]:
    """Return the manifests that ``plan`` emits, and the whole text."""
    assert main(["plan", *flags, "--emit", "kubernetes"]) == 0
    text = capsys.readouterr().out
    return list(yaml.safe_load_all(text)), text


@pytest.mark.parametrize(
    "flags",
    [NAMES, [*NAMES, *DRAFTS, "--kv-cache-dtype", "int8"], [*NAMES, "--model", f"{SHAPE}/config.json"], NUMBERS],
    ids=["names", "drafts", "folder", "numbers"],
)
def test_emitted_manifests_are_valid_and_start_an_engine(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    manifests, _ = emitted(capsys, *flags)
    assert [each["kind"] for each in manifests] == [each["kind"] for each in base()]
    for manifest in manifests:
        validate.validate(manifest, "1.31", strict=True)
    config = engine_config(parsed(manifests, "s-worker"))
    assert config.num_r_workers == find(manifests, "StatefulSet", "fastdecode-r-worker")["spec"]["replicas"]
    asked = build_parser().parse_args(["plan", *flags])
    assert config.speculative_config == asked.speculative_config
    assert config.kv_cache_dtype == asked.kv_cache_dtype


def test_emitted_manifests_hold_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "plan.json"
    manifests, text = emitted(capsys, *NAMES, "--output-json", str(figures))
    plan = json.loads(figures.read_text())
    server, r_worker = parsed(manifests, "s-worker"), parsed(manifests, "r-worker")
    assert server.r_workers == f"join:{plan['num_r_workers']}"
    assert (server.max_num_seqs, server.num_mini_batches) == (plan["in_flight"], plan["num_mini_batches"])
    assert server.kv_load_limit is None, "the pool grows and shrinks"
    assert parse_bytes("", r_worker.kv_cache_memory) == int(0.8 * 128e9)
    limits = container(manifests, "r-worker")["resources"]["limits"]
    assert limits["cpu"] == "31" and parse_bytes("", limits["memory"] + "B") > int(0.8 * 128e9) + 2**30
    assert container(manifests, "s-worker")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert server.model == "/models/llama-7b" and "the model's folder at llama-7b" in text
    (claim,) = (each for each in pods(manifests)["s-worker"]["spec"]["volumes"] if "persistentVolumeClaim" in each)
    mounts = {each["name"]: each["mountPath"] for each in container(manifests, "s-worker")["volumeMounts"]}
    assert server.model.startswith(mounts[claim["name"]])


def test_without_names_the_template_stays(capsys: pytest.CaptureFixture[str]) -> None:
    manifests, text = emitted(capsys, *NUMBERS)
    assert container(manifests, "r-worker") == container(base(), "r-worker")
    assert "nvidia.com/gpu" not in text and "set these for your nodes" in text


def test_what_no_manifest_starts_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt-len", "512", "--mini-batch-size", "256", "--num-prefill-workers", "2"]
    for flags, name in ((prompts, "num_prefill_workers"), (["--tensor-parallel-size", "2"], "tensor_parallel_size")):
        for form in FORMATS if name == "tensor_parallel_size" else ("kubernetes", "ray"):
            assert main(["plan", *NAMES, *flags, "--emit", form]) == 2
            assert f"{name}: --emit {form} " in capfd.readouterr().err


def test_emitted_ray_lines_hold_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "plan.json"
    flags = [*NAMES, "--model", SHAPE, *DRAFTS, "--output-json", str(figures)]
    assert main(["plan", *flags, "--emit", "ray"]) == 0
    text = capsys.readouterr().out
    plan = json.loads(figures.read_text())
    head, node, job = text.replace("\\\n", "").splitlines()
    assert head.startswith("ray start --head --num-cpus=0 ") and len(node.split(", ")) == plan["num_hosts"]
    words = shlex.split(job)
    assert words[:3] == ["ray", "job", "submit"] and words[words.index("--") + 1] == "fastdecode"
    given = vars(build_parser().parse_args(words[words.index("--") + 2 :]))
    names = [each.name for each in fields(EngineConfig) if each.name in given]  # Ray may not be installed.
    config = EngineConfig(**{name: given[name] for name in names})
    assert (config.r_worker_spec.kind, config.num_r_workers) == ("ray", plan["num_r_workers"])
    assert (config.r_threads, config.bytes_of("kv_cache_memory")) == (32, int(0.8 * 128e9))
    assert config.speculative_config == json.loads(DRAFTS[1])


@pytest.mark.parametrize("form", ["sbatch", "mpirun"])
def test_drafts_are_passed_on(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NAMES, *DRAFTS, "--emit", form]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""), comments=True)
    at = words.index("--speculative-config")
    assert json.loads(words[at + 1]) == json.loads(DRAFTS[1])
    assert main(["plan", *NAMES, "--emit", form]) == 0
    assert "--speculative-config" not in capsys.readouterr().out
