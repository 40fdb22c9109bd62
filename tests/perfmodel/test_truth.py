"""Plans against measurements: the paper's figure 9, the barrier in closed form, and bounds on what is asked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from fastdecode.cli.main import main
from fastdecode.kinds import recurrent
from fastdecode.perfmodel.load import barrier, expected_largest
from fastdecode.perfmodel.sizing import Workload

PAPER = ["--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--link", "100Gb", "--seq-len", "1024"]


@pytest.mark.parametrize(("in_flight", "measured"), [(256, 1542), (512, 2202), (1024, 2279)])
def test_figure_9_of_the_paper(in_flight: int, measured: int, tmp_path: Path) -> None:
    """The plan's tokens per second of the 7B model on 8 sockets are within a tenth of the measured ones."""
    path = tmp_path / "plan.json"
    words = [*PAPER, "--num-r-workers", "8", "--mini-batch-size", str(in_flight // 2)]
    assert main(["plan", *words, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text("utf-8"))
    assert found["output_tokens_per_second"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("number", [2, 4, 8, 32])
def test_the_expected_largest_of_normals(number: int) -> None:
    draws = np.random.default_rng(0).normal(size=(20_000, number)).max(axis=1)
    assert expected_largest(number) == pytest.approx(draws.mean(), rel=0.04)
    assert expected_largest(1) == 0.0


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0])
def test_the_spread_of_a_running_sequence(cv: float) -> None:
    """The formula agrees with drawn sequences of gamma-distributed lengths, seen at uniform ages."""
    rng = np.random.default_rng(1)
    lengths = np.full(400_000, 1000.0) if cv == 0 else rng.gamma(1 / cv**2, 1000 * cv**2, 400_000)
    seen = rng.choice(lengths, 400_000, p=lengths / lengths.sum())
    contexts = 200 + seen * rng.uniform(size=len(seen))
    workload = Workload(1200, 200, cv)
    assert workload.mean_context == pytest.approx(contexts.mean(), rel=0.02)
    assert workload.context_spread == pytest.approx(contexts.std() / contexts.mean(), rel=0.03)


@pytest.mark.parametrize(("r_workers", "each"), [(8, 64), (8, 16), (32, 16)])
def test_the_barrier_of_random_placement(r_workers: int, each: int) -> None:
    """The formula agrees with the largest of P sums of contexts at random ages over their mean."""
    ages = np.random.default_rng(2).uniform(size=(2000, r_workers, each)).sum(axis=2)
    drawn = (ages.max(axis=1) / ages.mean(axis=1)).mean()
    assert barrier(r_workers, each, Workload(1024).context_spread) == pytest.approx(drawn, rel=0.01)


def test_r_workers_without_a_sequence_help_nobody() -> None:
    assert barrier(1, 5.0, 0.5) == 1.0
    assert barrier(40, 0.25, 0.0) == 4.0 and barrier(40, 4.0, 0.0) == 1.0
    assert barrier(4, 6.75, 0.0) == 7 / 6.75, "one of four has seven of 27"
    assert math.isclose(barrier(2, 1.0, 1.0), 1.0 + NormalDist().inv_cdf(1.625 / 2.25))


NAMES = ["--model", "llama-3-8b", "--gpu", "a10", "--cpu", "epyc-7452"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", *NAMES, "--random-input-len", "100000000"], "a simulation needs more than 1 GiB for each"),
        (["simulate", *NAMES, "--num-prompts", "100000000"], "fit 1 GiB"),
        (["simulate", *PAPER[:6], "--random-output-len", "100000000"], "more than 60 s"),
        (["simulate", *NAMES, "--random-output-len", "200000"], "are beyond the 131,072 of llama-3-8b"),
        (["simulate", *NAMES, "--num-r-workers", "1000000000"], "num_r_workers must be at most 100,000"),
        (["plan", *NAMES, "--seq-len", "8192", "--num-r-workers", "1000000000"], "num_r_workers must be at most"),
        (
            ["plan", *NAMES, "--seq-len", "200000"],
            "seq_len: 200,000 tokens of prompt and output are beyond the 131,072",
        ),
    ],
)
def test_what_is_too_much_is_refused_with_what_fits(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error and "\n" not in error


def test_out_of_memory_names_flags_of_the_command_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("fastdecode.perfmodel.lab.cli.simulate.read_simulation", exhaust)
    assert main(["simulate", *NAMES]) == 1
    error = capfd.readouterr().err
    assert "--num-prompts" in error and "--prefill-scratch" not in error


def test_what_no_engine_runs_is_not_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer or a type of model that the engine refuses is not recommended."""
    words = ["plan", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--cpu", "epyc-9654", "--seq-len", "131072"]
    monkeypatch.setitem(recurrent.CANNOT, "gpu", "this model keeps a state per sequence; leave it out")
    assert main([*words, "--output-json", str(tmp_path / "plan.json")]) == 0
    found, line = json.loads((tmp_path / "plan.json").read_text("utf-8")), capsys.readouterr().out.splitlines()[0]
    assert line.startswith("Do not plan on this: no engine runs it today (gpu: ") and found["use_fastdecode"] is False
    assert "ms per token for each of" in line
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "xlnet", "n_layer": 2, "d_model": 64, "n_head": 2, "vocab_size": 100}')
    assert main(["plan", "--model", str(config), *words[3:]]) == 1
    assert "the engine refuses models of the type xlnet" in capsys.readouterr().err
