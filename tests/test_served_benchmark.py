"""``bench serve`` and the Grafana dashboard against a real ``fastdecode serve``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.servers import CHAT_TEMPLATE, RunningServer, serving

from fastdecode.cli.main import main

pytestmark = pytest.mark.slow

DASHBOARD = Path(__file__).resolve().parents[1] / "examples" / "grafana" / "fastdecode.json"
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--chat-template", CHAT_TEMPLATE, "--max-num-seqs", "8", "--kv-load-limit", "4000"]
    flags += [
        "--park-dir",
        str(tmp_path_factory.mktemp("parked")),
        "--journal",
        str(tmp_path_factory.mktemp("journal")),
    ]
    with serving(tmp_path_factory.mktemp("server"), *flags, FASTDECODE_API_KEY="secret") as running:
        yield running


@pytest.fixture(scope="module")
def reports(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Return the reports that ``bench serve`` saved, by its backend."""
    folder, found = tmp_path_factory.mktemp("reports"), {}
    for backend in ("openai", "openai-chat"):
        flags = ["--base-url", server.url, "--backend", backend, "--num-prompts", str(NUM_PROMPTS), "--input-len", "40"]
        flags += ["--output-len", "9", "--request-rate", "40", "--max-concurrency", "6", "--temperature", "0"]
        flags += [
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(folder),
            "--result-filename",
            f"{backend}.json",
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPENAI_API_KEY", "secret")
            assert main(["bench", "serve", *flags]) == 0
        found[backend] = json.loads((folder / f"{backend}.json").read_text())
    return found


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_real_server_is_measured(reports: dict[str, dict], backend: str) -> None:
    """Lengths are exact, every token is in one chunk at most, and latencies add up."""
    report = reports[backend]
    assert (report["completed"], report["failed"]) == (NUM_PROMPTS, 0), report["errors"]
    assert report["output_lens"] == [9] * NUM_PROMPTS
    if backend == "openai":
        assert report["input_lens"] == [40] * NUM_PROMPTS
    assert all(0 < ttft < report["p99_e2el_ms"] / 1e3 * 2 for ttft in report["ttfts"])
    assert all(len(itls) <= 8 for itls in report["itls"])
    assert 0 < report["mean_tpot_ms"] < report["mean_e2el_ms"]
    assert report["output_throughput"] == pytest.approx(9 * NUM_PROMPTS / report["duration"])


def test_every_metric_of_the_dashboard_exists(server: RunningServer, reports: dict[str, dict]) -> None:
    """The metrics also have the labels by which the dashboard groups."""
    status, text = server.request("/metrics", headers={"authorization": "Bearer secret"})
    assert status == 200 and reports
    samples = [line for line in text.splitlines() if line.startswith("fastdecode:")]
    expressions = re.findall(r'"(?:expr|query)": "((?:[^"\\]|\\.)*)"', DASHBOARD.read_text())
    assert len(expressions) > 20
    for expression in expressions:
        for name in re.findall(r"fastdecode:\w+", expression):
            found = [line for line in samples if re.match(rf"{name}[{{ ]", line)]
            assert found, f"{name} of {expression} is not in /metrics"
            assert all('model_name="' in line for line in found)
        for label in re.findall(r"sum by \((\w+)\)", expression):
            assert any(f'{label}="' in line for line in found), f"{name} has no label {label}"


def test_the_dashboard_s_legends_are_labels(server: RunningServer, reports: dict[str, dict]) -> None:
    _, text = server.request("/metrics", headers={"authorization": "Bearer secret"})
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                (name, *_) = re.findall(r"fastdecode:\w+", target["expr"])
                assert re.search(rf'{name}{{[^}}]*{label}="', text), f"{name} has no label {label}"
